"""Blocks of the sequences: all calls of fdcache's manager, and a free list to compare it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.paddle_engine.batch import Chunk
from examples.paddle_engine.config import EngineConfig
from fdcache import (
    CacheManager,
    LoadOutcome,
    MatchStatus,
    MultimodalItem,
    Request,
    TransferPlan,
    TransferReport,
)
from fdcache.errors import TransferError
from fdcache.manager.requests import PeerSource
from fdcache.metadata import StorageScan
from fdcache.tiers.host import HostCache
from fdcache.transfer.handovers import Handovers


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a user. ``images`` are items whose placeholders are among the tokens.

    ``hands_over`` its blocks to a decode instance, under its name; or reads them from the prefill instance ``source``.
    """

    name: str
    tokens: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    images: tuple[MultimodalItem, ...] = ()
    hands_over: bool = False
    source: PeerSource | None = None


class FdcacheBlocks:
    """Blocks managed by fdcache. Sequences are named by their prompt's name."""

    def __init__(self, engine: EngineConfig) -> None:
        layout, settings = engine.layout, engine.settings
        self.manager = CacheManager.from_settings(layout, settings, device_bytes=engine.device_bytes)
        self._peers = Handovers.from_settings(self.manager, settings)
        self._requests: dict[str, Request] = {}
        self._handed_over: set[str] = set()  # sequences whose hand-over has begun; there is one for each
        self._sent: dict[str, Request] = {}  # those that were sent, live as long as their blocks are held

    @property
    def host_cache(self) -> HostCache:
        """Description of the host tier for the ranks."""
        return self.manager.host_cache

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Restore the blocks in the ranks' storage; return their number."""
        return self.manager.restore_storage(scans) if scans else 0

    def admit(self, prompt: Prompt) -> int | None:
        """Return the cached prefix of a new or resumed sequence in tokens.

        None: its blocks are still being read; call it again in a later step.
        """
        request = self._requests.get(prompt.name)
        if request is None:
            request = Request(prompt.name, list(prompt.tokens), multimodal=prompt.images)
            self._requests[prompt.name] = request
            self.manager.begin([request])
        if self._fetches(prompt) and self._peers is not None and not self._peers.fetch_room:
            return None
        match = self.manager.match_prefix([request])[0]
        return match.num_cached_tokens if match.status is MatchStatus.MATCHED else None

    def admit_blocks(self, prompt: Prompt, num_tokens: int) -> bool | None:
        """Take the first blocks of a matched sequence, and begin its hand-over. None: no room, and it is not matched.

        Return True if its computation waits for blocks of a prefill instance.
        """
        request, fetched = self._requests[prompt.name], 0
        if source := self._fetches(prompt):
            fetched = self._on_peers().fetch([(request, source)])[0]
        if (source or self._sends(prompt)) and num_tokens < request.num_tokens:
            num_tokens = request.num_tokens
        if not self.grow(prompt.name, num_tokens):
            self.manager.unmatch([request])
            return None
        if self._sends(prompt):
            self._on_peers().send([(request, prompt.name)])
            self._sent[prompt.name] = request
        self._handed_over.add(prompt.name)
        return fetched > 0

    def _fetches(self, prompt: Prompt) -> PeerSource | None:
        return None if prompt.name in self._handed_over else prompt.source

    def _on_peers(self) -> Handovers:
        if self._peers is None:
            raise TransferError("hand-overs are off: set FDCACHE_TRANSFER, for instance to ipc")
        return self._peers

    def _sends(self, prompt: Prompt) -> bool:
        return prompt.hands_over and prompt.name not in self._handed_over

    def grow(self, name: str, num_tokens: int) -> bool:
        """Extend the block table to cover ``num_tokens`` tokens; the first time also plan the loads. False: no room."""
        return self.manager.allocate_device_blocks([(self._requests[name], num_tokens)])[0].ok

    def has_room(self, num_blocks: int) -> bool:
        """Return True if that many blocks are free or can be evicted."""
        return self.manager.can_allocate_device_blocks(num_blocks)

    def block_table(self, name: str) -> NDArray[np.int32]:
        """Return the sequence's blocks, in order."""
        return self._requests[name].block_table

    def is_loading(self, name: str) -> bool:
        """Return True while a load of the sequence is not confirmed."""
        return self._requests[name].is_loading

    def take_plans(self) -> list[TransferPlan]:
        """Close the step and return its plans for the ranks."""
        return self.manager.take_plans()

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Apply the ranks' reports, expire overdue plans, and return the outcomes of loads."""
        outcomes = self.manager.apply(reports) + self.manager.expire()
        self._sent = {name: request for name, request in self._sent.items() if request.is_live}
        return outcomes

    def observe(self, chunks: Sequence[Chunk], seconds: float, *, waited: bool) -> None:
        """Report the time of a step; ``waited``: its layers waited for loads."""
        found = [(self._requests[chunk.sequence], chunk) for chunk in chunks]
        computed = [(request, chunk.start, min(chunk.stop, request.num_tokens)) for request, chunk in found]
        self.manager.observe_prefill(computed, seconds, waited=waited)

    def append(self, name: str, tokens: Sequence[int], num_computed: int) -> None:
        """Append accepted tokens; the first ``num_computed`` tokens have their KV on every rank."""
        request = self._requests[name]
        request.append_tokens(list(tokens))
        self.manager.commit([(request, num_computed)])

    def release(self, name: str, *, resumes: bool) -> None:
        """Release the blocks, at the end or, if the sequence ``resumes``, until it is admitted again."""
        if resumes and self._peers is not None:
            self._peers.end_transfers([self._requests[name]])
        self.manager.finish([self._requests[name]])
        if not resumes:
            del self._requests[name]
            self._handed_over.discard(name)

    def is_sending(self, name: str) -> bool:
        """Return True while blocks of a prompt are handed over under this name."""
        return name in self._sent

    @property
    def is_handing_over(self) -> bool:
        """True while blocks are handed over to another instance."""
        return self.manager.get_stats().sending_blocks > 0

    def handovers(self) -> dict[str, int]:
        """Return how many hand-overs have ended in which way."""
        counts: Counter[str] = Counter()
        for each in self.manager.get_stats().handovers:
            counts[f"{each.direction} {each.result}"] += each.transfers
        return dict(counts)

    def close(self) -> None:
        """Disconnect from the service, if any; call it after the workers have ended."""
        self.manager.close()


class FreshBlocks:
    """Same interface as ``FdcacheBlocks``, but only a free list: nothing is cached."""

    host_cache = None

    def __init__(self, engine: EngineConfig) -> None:
        self._block_size = engine.block_size
        self._free = list(range(engine.device_blocks))
        self._tables: dict[str, list[int]] = {}

    def restore(self, scans: Sequence[StorageScan]) -> int:
        """Return nothing: there are no copies."""
        return 0

    def admit(self, prompt: Prompt) -> int | None:
        """Return 0: nothing is cached."""
        self._tables[prompt.name] = []
        return 0

    def grow(self, name: str, num_tokens: int) -> bool:
        """Take blocks from the free list."""
        table = self._tables[name]
        missing = -(-num_tokens // self._block_size) - len(table)
        if missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(missing))
        return True

    def admit_blocks(self, prompt: Prompt, num_tokens: int) -> bool | None:
        """Take the first blocks of a sequence; None without room for them, False as it waits for nothing."""
        if self.grow(prompt.name, num_tokens):
            return False
        self.release(prompt.name, resumes=True)
        return None

    def has_room(self, num_blocks: int) -> bool:
        """Return True if that many blocks are free."""
        return num_blocks <= len(self._free)

    def block_table(self, name: str) -> NDArray[np.int32]:
        """Return the sequence's blocks."""
        return np.array(self._tables[name], np.int32)

    def is_loading(self, name: str) -> bool:
        """Return False: nothing is ever loaded."""
        return False

    def take_plans(self) -> list[TransferPlan]:
        """Return []: nothing is ever copied."""
        return []

    def apply(self, reports: Sequence[TransferReport]) -> list[LoadOutcome]:
        """Return nothing: there are no copies."""
        return []

    def observe(self, chunks: Sequence[Chunk], seconds: float, *, waited: bool) -> None:
        """Do nothing: nothing could be loaded instead."""

    def append(self, name: str, tokens: Sequence[int], num_computed: int) -> None:
        """Do nothing: tokens are not cached."""

    def release(self, name: str, *, resumes: bool) -> None:
        """Return the blocks to the free list."""
        self._free.extend(self._tables.pop(name))

    def close(self) -> None:
        """Do nothing: there is no service."""
