"""One rank: the model, its paged cache, and all calls of fdcache's controller."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from examples.paddle_engine.batch import Batch, Chunk, find_row, make_batches
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.model import Model, Reduce
from examples.paddle_engine.paged_kv import PagedKV
from examples.paddle_engine.sampling import Sample, propose, sample
from fdcache import CacheController, TransferPlan, TransferReport
from fdcache.devices.base import Device
from fdcache.integrations.paddle import allocate_planes, current_device, current_stream
from fdcache.metadata import StorageScan
from fdcache.tiers.host import HostCache


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Result of a chunk: its first ``computed`` tokens count, and ``samples`` follow them."""

    sequence: str
    computed: int
    samples: tuple[Sample, ...]
    draft: int | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of the chunks in order, and reports of plans that ended meanwhile."""

    chunks: tuple[ChunkResult, ...]
    reports: tuple[TransferReport, ...]


def no_reduce(x: Tensor) -> Tensor:
    """Return the tensor: there is one rank."""
    return x


class Worker:
    """Worker of one rank. With ``host_cache`` it has a ``CacheController`` with its planes registered."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        host_cache: HostCache | None,
        *,
        rank: int = 0,
        reduce: Reduce = no_reduce,
        device: Device | None = None,
    ) -> None:
        self._engine = engine
        self._model = Model(model, rank, engine.ranks, reduce)
        self.logits: dict[tuple[str, int], NDArray[np.float32]] | None = None
        self.controller: CacheController | None = None
        self.address: str | None = None
        self._scan: StorageScan | None = None
        if host_cache is None:
            self._kv = PagedKV(engine.layout, allocate_planes(engine.layout, engine.device_blocks))
            return
        self.controller = CacheController.from_settings(
            engine.layout, engine.settings, rank=rank, device=device or current_device
        )
        if engine.settings.peers.is_on:  # peers read the planes in memory that they can map
            planes = self.controller.initialize_kv_cache(engine.device_blocks, "paddle")
            self._kv = PagedKV(engine.layout, planes)
        else:
            planes = allocate_planes(engine.layout, engine.device_blocks)
            self.controller.register_kv_cache(planes)
            self._kv = PagedKV(engine.layout, planes)
        self.controller.initialize_host_cache(host_cache)
        self._scan = self.controller.open_storage()
        self.address = self.controller.open_transfer(lookahead_tokens=engine.settings.cache.lookahead_tokens)

    def execute(self, plans: Sequence[TransferPlan], chunks: Sequence[Chunk]) -> StepResult:
        """Submit the plans and compute the chunks, each layer as soon as its blocks are loaded."""
        stream = current_stream()
        counters = [self.controller.submit_swap_tasks(plan, stream) for plan in plans if self.controller]

        def wait_for_layer(layer: int) -> None:
            for counter in counters:
                counter.wait_for_layer(layer, stream=stream)

        engine = self._engine
        batches = make_batches(chunks, engine.block_size, engine.grid, engine.split_kv)
        computed = {chunk.sequence: chunk.stop // engine.block_size for chunk in chunks}

        def hand_over(layer: int) -> None:
            if self.controller and self.address and layer >= 0:
                self.controller.layer_computed(layer, computed, stream)

        def last_batch(layer: int) -> None:
            hand_over(layer - 1)
            wait_for_layer(layer)

        with paddle.no_grad():
            hidden = [
                self._model.forward(batch, self._kv, last_batch if batch is batches[-1] else wait_for_layer)
                for batch in batches
            ]
            hand_over(self._model.config.layers - 1)
            accepted = self._accept(chunks, batches, hidden)
            drafts: Sequence[int | None] = [None] * len(chunks)
            if self._model.config.draft_layers:
                drafts = propose(self._model, self._kv, chunks, batches, hidden, accepted, wait_for_layer)
                hand_over(self._model.config.layers)
        results = tuple(
            ChunkResult(
                sequence=chunk.sequence,
                computed=chunk.sample_from + len(samples),
                samples=samples,
                draft=draft if samples else None,
            )
            for chunk, samples, draft in zip(chunks, accepted, drafts, strict=True)
        )
        return StepResult(results, self._reports(wait=not chunks))

    def addresses(self) -> list[str]:
        """Return the address at which peers reach this rank; [] if blocks are not handed over."""
        return [] if self.address is None else [self.address]

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """Name a prefill instance that blocks will be fetched from."""
        if self.controller:
            self.controller.connect_peers(addresses)

    def storage_scans(self) -> list[StorageScan]:
        """Return the scan of this rank's storage at the start; [] without storage."""
        return [self._scan] if self._scan else []

    def update_weights(self, seed: int) -> None:
        """Replace the weights; cached blocks still belong to the old ones."""
        self._model.load_weights(seed)

    def shutdown(self) -> None:
        """Wait for copies and release the memory."""
        if self.controller:
            self.controller.shutdown()

    def _reports(self, *, wait: bool) -> tuple[TransferReport, ...]:
        if self.controller is None:
            return ()
        patience = self._engine.idle_seconds
        return tuple(self.controller.wait_reports(timeout=patience) if wait else self.controller.poll())

    def _accept(
        self, chunks: Sequence[Chunk], batches: Sequence[Batch], hidden: Sequence[Tensor]
    ) -> list[tuple[Sample, ...]]:
        """Sample each chunk's rows until a draft differs from the sampled token."""
        accepted, first = [], 0
        for chunk in chunks:
            samples: list[Sample] = []
            for column in range(chunk.sample_from, len(chunk.tokens)):
                logits = self._model.logits(find_row(first + column, batches, hidden))[0].numpy()
                position = chunk.start + column + 1
                if self.logits is not None:
                    self.logits[chunk.sequence, position] = logits
                if self._engine.log_digests:
                    digest = hashlib.sha256(logits.tobytes()).hexdigest()[:16]
                    print(f"digest {chunk.sequence} {position} {digest}", file=sys.stderr)
                samples.append(sample(logits, chunk.temperature, chunk.seed, position))
                if column + 1 < len(chunk.tokens) and chunk.tokens[column + 1] != samples[-1].token:
                    break
            accepted.append(tuple(samples))
            first += len(chunk.tokens)
        return accepted
