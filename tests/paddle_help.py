"""The engine of the examples with a small model, for tests that compare it with and without fdcache."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

pytest.importorskip("paddle")

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from examples.paddle_engine.batch import Chunk
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.engine import Engine, Task
from examples.paddle_engine.kv_cache import FdcacheBlocks, FreshBlocks, Prompt
from examples.paddle_engine.worker import StepResult, Worker
from fdcache import TransferPlan
from fdcache.devices.base import Device
from fdcache.tiers.host import host_block_bytes

GQA = ModelConfig(vocab=256, hidden=48, layers=3, heads=4, kv_heads=2, head_dim=12, ffn=64)
MLA = replace(GQA, latent_dim=16, rope_dim=8)
FP8 = replace(GQA, kv_dtype="fp8")
BF16 = replace(GQA, kv_dtype="bfloat16")
MTP = replace(GQA, vocab=6, draft_layers=1)
MODELS = {"gqa": GQA, "mla": MLA, "fp8": FP8, "bf16": BF16, "mtp": MTP}


@dataclass(frozen=True)
class Sizes:
    """Sizes of an engine, for any model."""

    device_blocks: int = 64
    host_blocks: int = 64
    step_tokens: int = 64
    max_running: int = 8
    ranks: int = 1
    grid: int = 32
    write_policy: str = "write_through"
    server: str | None = None
    storage: Path | None = None
    load_or_recompute: str = "always"
    peers: tuple[str, Path] | None = None
    """Role in hand-overs, and the folder of their sockets and planes."""

    def load(self, model: ModelConfig) -> EngineConfig:
        """Return the engine's configuration, independent of the environment."""
        cache: dict[str, object] = {
            "FDCACHE_DEVICE_BLOCKS": self.device_blocks,
            "FDCACHE_HOST_MEMORY": self.host_blocks * host_block_bytes(model.layout(16, self.ranks)),
            "FDCACHE_RANKS": self.ranks,
            "FDCACHE_SERVER": self.server,
            "FDCACHE_WRITE_POLICY": self.write_policy,
            "FDCACHE_LOAD_OR_RECOMPUTE": self.load_or_recompute,
        }
        if self.storage:
            cache |= {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": self.storage}
        if self.peers:
            role, folder = self.peers
            cache |= {
                "FDCACHE_TRANSFER": "ipc",
                "FDCACHE_TRANSFER_ROLE": role,
                "FDCACHE_TRANSFER_DIR": folder,
            }
            cache |= {"FDCACHE_TRANSFER_ADDRESS": f"ipc://{folder}/{role}"}
        limits = {"step_tokens": self.step_tokens, "max_running": self.max_running}
        config = EngineConfig.load(model, cache, grid=self.grid, **limits)
        return replace(config, idle_seconds=0.01) if self.peers else config


ENGINE = Sizes()


def tokens(seed: int, count: int, vocab: int = GQA.vocab) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
    return found


def prompt(name: str, text: Sequence[int], max_tokens: int = 8, **options: Any) -> Prompt:
    return Prompt(name, list(text), max_tokens, **options)


class Server:
    """Engine with its cache and one rank that records all logits and drafts."""

    def __init__(
        self,
        model: ModelConfig = GQA,
        sizes: Sizes = ENGINE,
        *,
        cached: bool = True,
        device: Device | None = None,
    ) -> None:
        self.sizes = sizes
        self.config = engine = sizes.load(model)
        self.model = model
        self.cache: FdcacheBlocks | FreshBlocks = FdcacheBlocks(engine) if cached else FreshBlocks(engine)
        self.worker = Worker(model, engine, self.cache.host_cache, device=device)
        self.worker.logits = {}
        self.restored = self.cache.restore(self.worker.storage_scans())
        self.drafts: dict[tuple[str, int], int] = {}
        self.accepted_drafts = 0
        self.engine = Engine(engine, self.cache, self)

    def execute(self, plans: Sequence[TransferPlan], chunks: Sequence[Chunk]) -> StepResult:
        result = self.worker.execute(plans, chunks)
        for chunk, answer in zip(chunks, result.chunks, strict=True):
            if answer.draft is not None:
                self.drafts[answer.sequence, chunk.start + answer.computed] = answer.draft
            self.accepted_drafts += len(answer.samples) > 1
        return result

    @property
    def fdcache(self) -> FdcacheBlocks:
        assert isinstance(self.cache, FdcacheBlocks)
        return self.cache

    @property
    def logits(self) -> dict[tuple[str, int], NDArray[np.float32]]:
        assert self.worker.logits is not None
        return self.worker.logits

    def submit(self, *prompts: Prompt) -> list[Task]:
        return [self.engine.submit(each) for each in prompts]

    def serve(self, *prompts: Prompt) -> list[Task]:
        tasks = self.submit(*prompts)
        self.finish()
        return tasks

    def finish(self) -> None:
        """Run to the end and wait for all copies."""
        self.engine.run()
        if isinstance(self.cache, FdcacheBlocks):
            while self._is_busy():
                self.engine.step()
            self.cache.manager.check_integrity()
            stats = self.cache.manager.get_stats()
            assert self.cache.manager.shared_blocks_in_use == 0
            own = (stats.device, None if self.config.server else stats.host)
            for tier in filter(None, own):
                assert (tier.pins, tier.holds, tier.leases, tier.writing) == (0, 0, 0, 0)

    def _is_busy(self) -> bool:
        stats = self.fdcache.manager.get_stats()
        return bool(stats.plans_in_flight or stats.queued_backups or stats.queued_stores)

    def close(self) -> None:
        self.worker.shutdown()
        self.cache.close()


def spoken(tasks: Sequence[Task]) -> list[list[int]]:
    return [[sample.token for sample in task.samples] for task in tasks]


def assert_as_without_cache(server: Server, tasks: Sequence[Task], weights: int | None = None) -> None:
    """Assert the same tokens, logit bits and drafts as those of an engine that computes everything."""
    sizes = replace(server.sizes, device_blocks=256, server=None, storage=None)
    alone = Server(server.model, sizes, cached=False)
    if weights is not None:
        alone.worker.update_weights(weights)
    expected = [alone.serve(task.prompt)[0] for task in tasks]
    assert spoken(tasks) == spoken(expected)
    names = {task.name for task in tasks}
    for key, logits in alone.logits.items():
        assert np.array_equal(server.logits[key], logits), f"the logits of {key} differ"
    assert {key: draft for key, draft in server.drafts.items() if key[0] in names} == alone.drafts
