"""vLLM's own tiering manager with FdcacheTier below it."""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.service_help import TIMEOUT

CHUNK_BYTES = 8192
CHUNKS = 32


def fdcache_tier(folder: Path, **settings: Any) -> dict[str, Any]:
    settings = {"FDCACHE_STORAGE_DIR": str(folder), "FDCACHE_STORAGE_SIZE": "1MiB", **settings}
    return {"type": "FdcacheTier", "module_path": "fdcache.integrations.vllm.tier", **settings}


def config_of(
    tiers: list[dict[str, Any]],
    *,
    events: bool = False,
    groups: int = 1,
    model: str = "model",
    chunk_bytes: int = CHUNK_BYTES,
    chunks: int = CHUNKS,
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(tokens_per_block=16, layer_names=(f"layer.{index}",), group_id=index)
            for index in range(groups)
        ),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": chunks * chunk_bytes, "secondary_tiers": tiers},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig(name=model, dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )


def content(key: bytes, nbytes: int = CHUNK_BYTES) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(np.random.default_rng(list(key)).bytes(nbytes), np.uint8)


def keys_of(prompt: int, count: int, group: int = 0) -> list[Any]:
    parent, keys = b"", []
    for _ in range(count):
        parent = hashlib.sha256(parent + prompt.to_bytes(4, "little")).digest()
        keys.append(make_offload_key(parent, group))
    return keys


class Offloading:
    """vLLM's manager, and in place of its GPU worker bytes that follow from the key."""

    def __init__(self, folder: Path, *, tiers: list[dict[str, Any]] | None = None, **changes: Any) -> None:
        settings = {name: changes.pop(name) for name in list(changes) if name.startswith("FDCACHE_")}
        config = config_of([fdcache_tier(folder, **settings)] if tiers is None else tiers, **changes)
        self.manager = TieringOffloadingSpec(config).get_manager()
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self._numbers = itertools.count()

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Run steps until no tier has work."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            self.step()
            if not self.manager._jobs:
                return
            assert time.monotonic() < deadline, "the tiers' jobs do not end"
            time.sleep(0.0005)

    def request(self) -> ReqContext:
        context = ReqContext(f"request-{next(self._numbers)}")
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Sequence[Any]) -> list[Any]:
        """Copy the chunks of a prompt to the host, as its worker would; return those that were stored."""
        context = self.request()
        out = self.manager.prepare_store(keys, context)
        stored = [] if out is None else list(out.keys_to_store)
        if out is not None and stored:
            for key, chunk in zip(stored, out.store_spec.chunk_ids, strict=True):
                self.memory[chunk] = content(key, self.memory.shape[1])
            self.filled = time.perf_counter()
            self.manager.complete_store(stored, context)
        self.manager.on_request_finished(context)
        return stored

    def match(self, keys: Sequence[Any], context: ReqContext) -> int:
        """Return how many leading chunks vLLM finds, after it has brought them to the host."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            found = [self.manager.lookup(key, context) for key in keys]
            self.step()
            waits = {LookupResult.RETRY, LookupResult.HIT_PENDING}
            leading = list(itertools.takewhile(lambda each: each is not LookupResult.MISS, found))
            if not waits & set(leading):
                return len(leading)
            self.settle()
        raise AssertionError("the look-up does not end")

    def check(self, keys: Sequence[Any], context: ReqContext) -> None:
        """Compare the bytes of chunks that a look-up has found, and end the request."""
        if keys:
            spec = self.manager.prepare_load(keys, context)
            for key, chunk in zip(keys, spec.chunk_ids, strict=True):
                assert (self.memory[chunk] == content(key, self.memory.shape[1])).all(), "wrong bytes"
            self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)

    def load(self, keys: Sequence[Any]) -> int:
        """Return how many leading chunks are found, after a look at their bytes."""
        context = self.request()
        found = self.match(keys, context)
        self.check(keys[:found], context)
        return found


def fill(offloading: Offloading, prompts: Sequence[int], count: int = 8) -> None:
    for prompt in prompts:
        assert len(offloading.store(keys_of(prompt, count))) == count
        offloading.settle()


def counted(offloading: Offloading, name: str) -> int:
    """Return what the tier has counted since the last look."""
    stats = offloading.manager.get_stats()
    found = {} if stats is None else stats.data["data"].get(f"vllm:fdcache_tier_{name}", {})
    return int(found.get(("FdcacheTier",), 0))
