"""fdcache's ``CacheManager`` with a device tier only, as an engine's scheduler calls it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.adapters.base import Adapter, OutOfBlocksError, Pool, Tokens
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, Request
from fdcache.settings.cache import CacheSettings

HASH_BYTES = 32

Native = Tokens | list[int]


class FdcacheAdapter(Adapter):
    """Takes tokens as int32 arrays, or as lists."""

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
        self._manager = CacheManager(CacheSettings(device_blocks=pool.blocks), layout)

    def make_request(self, number: int, prompt: Tokens) -> Request:
        return Request(str(number), self.make_output(prompt))

    def make_output(self, tokens: Tokens) -> Native:
        return tokens.tolist() if self._lists else tokens

    def hash(self, request: Request) -> None:
        layout = self._manager.layout
        request._bind(layout.block_size, layout.fingerprint).hashes  # noqa: B018  a match would do the same

    def match(self, request: Request) -> int:
        self._manager.match_prefix([request])
        return request.num_cached_tokens

    def allocate(self, request: Request) -> None:
        self._grow([(request, request.num_prompt_tokens)])

    def commit(self, request: Request) -> None:
        self._manager.commit([(request, request.num_prompt_tokens)])

    def decode(self, request: Request, output: Native) -> None:
        self._grow([(request, request.num_tokens + len(output))])
        request.append_tokens(output)
        self._manager.commit([(request, request.num_tokens)])

    def decode_step(self, requests: Sequence[Request], step: list[list[int]]) -> None:
        self._grow([(request, request.num_tokens + 1) for request in requests])
        for request, output in zip(requests, step, strict=True):
            request.append_tokens(output)
        self._manager.commit([(request, request.num_tokens) for request in requests])

    def free(self, request: Request) -> None:
        self._manager.request_finish([request])

    def entry_bytes(self) -> float:
        stats = self._manager._device.stats()
        return stats.memory_bytes / stats.slots - HASH_BYTES

    def check(self) -> None:
        self._manager.check_integrity()

    def _grow(self, wanted: list[tuple[Request, int]]) -> None:
        for allocation in self._manager.allocate_device_blocks(wanted):
            if not allocation.ok:
                raise OutOfBlocksError(f"request {allocation.request_id}")


def make(pool: Pool, *, lists: bool) -> FdcacheAdapter:
    """Return an adapter."""
    return FdcacheAdapter(pool, lists=lists)
