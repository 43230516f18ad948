"""fdcache's ``CacheManager`` with a device tier only, as an engine's scheduler calls it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.adapters.base import Adapter, OutOfBlocksError, Pool, Tokens
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.settings.cache import CacheSettings, EvictionPolicy

HASH_BYTES = 32

Native = Tokens | list[int]


class FdcacheAdapter(Adapter):
    """Takes tokens as int32 arrays, or as lists. Evicts by last use, as the others do, for equal hits."""

    def __init__(self, pool: Pool, *, lists: bool) -> None:
        self._lists = lists
        layout = KVLayout.uniform(
            model="bench",
            revision="1",
            num_layers=2,
            block_size=pool.block_size,
            kv_heads=1,
            head_dim=16,
            dtype="bfloat16",
        )
        settings = CacheSettings(device_blocks=pool.blocks, eviction=EvictionPolicy.LRU)
        self._manager = CacheManager(settings, layout)

    def make_request(self, number: int, prompt: Tokens) -> Request:
        return Request(str(number), self.make_output(prompt))

    def make_output(self, tokens: Tokens) -> Native:
        return tokens.tolist() if self._lists else tokens

    def hash(self, request: Request) -> None:
        self._manager.prepare([request])

    def match(self, request: Request) -> int:
        self._manager.match_prefix([request])
        return request.num_cached_tokens

    def allocate(self, request: Request) -> None:
        (allocation,) = self._manager.allocate_device_blocks([(request, request.num_prompt_tokens)])
        if not allocation.ok:
            raise OutOfBlocksError(f"request {allocation.request_id}")

    def commit(self, request: Request) -> None:
        self._manager.commit([(request, request.num_prompt_tokens)])

    def decode(self, request: Request, output: Native) -> None:
        self._advance([request], [output])

    def decode_step(self, requests: Sequence[Request], step: list[list[int]]) -> None:
        self._advance(requests, step)

    def free(self, request: Request) -> None:
        self._manager.finish([request])

    def entry_bytes(self) -> float:
        stats = self._manager._device.stats()
        return stats.memory_bytes / stats.slots - HASH_BYTES

    def check(self) -> None:
        self._manager.check_integrity()

    def _advance(self, requests: Sequence[Request], outputs: Sequence[Native]) -> None:
        added = self._manager.advance(requests, outputs, uncomputed_tokens=0)
        if not added.ok:
            raise OutOfBlocksError(f"{len(added.failed)} requests")


def make(pool: Pool, *, lists: bool) -> FdcacheAdapter:
    """Return an adapter."""
    return FdcacheAdapter(pool, lists=lists)
