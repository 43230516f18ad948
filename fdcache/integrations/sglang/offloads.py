"""Offloads of SGLang: pages of nodes that are to be stored, in its order, a piece at a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fdcache.integrations.sglang.pool_tier import PoolTier
from fdcache.metadata import HashArray, Int32Array

MOST_PAGES = 256
"""Pages that one call begins to store: the scheduler's thread does nothing else meanwhile."""

MOST_BYTES = 512 << 20
"""Bytes that one call begins to store: copies of more would go on beside the next token of a prompt just computed."""

_PARTS = 8
"""Of more pages than 8 times as many, a call begins an 8th: steps may take long, and nodes stay locked meanwhile."""


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Pages of one pool; ``read`` waits for the slots that SGLang has told of."""

    tier: PoolTier
    keys: HashArray
    read: Callable[[], Int32Array]

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return len(self.keys) * self.tier.layout.payload_bytes


@dataclass(slots=True)
class _Run:
    """Pages of one pool that are offered piece by piece: those before ``offered`` were."""

    tier: PoolTier
    keys: HashArray
    slots: Int32Array
    offered: int = 0


@dataclass(slots=True, eq=False)
class _Offload:
    """Pages of a node, until the last of its offers has ended. ``runs``: None until its slots are filled."""

    parts: Sequence[PoolPart]
    is_ready: Callable[[], bool]
    is_whole: bool
    runs: list[_Run] | None = None
    waits_for: set[tuple[str, int]] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        return (
            self.runs is not None
            and not self.waits_for
            and all(run.offered == len(run.keys) for run in self.runs)
        )

    def forget(self) -> None:
        for run in self.runs or ():
            run.tier.manager.forget(run.slots)


class Offloads:
    """The offloads that have not been popped."""

    def __init__(self, tiers: Mapping[str, PoolTier]) -> None:
        self._tiers = tiers
        self._offloads: deque[_Offload] = deque()
        self._completed: deque[bool] = deque()
        self._pages_left = self._bytes_left = 0

    @property
    def are_many(self) -> bool:
        """True if more pages wait than calls begin that have nothing else to do."""
        return self._pages_left > _PARTS * MOST_PAGES

    def add(self, parts: Sequence[PoolPart], is_ready: Callable[[], bool], *, is_whole: bool) -> None:
        """Take one, which is begun once ``is_ready``; ``is_whole``: False if it is not to be stored."""
        self._offloads.append(_Offload(parts, is_ready, is_whole))
        self._pages_left += sum(len(each.keys) for each in parts)
        self._bytes_left += sum(each.nbytes for each in parts)

    def begin(self) -> None:
        """Offer the next pages of those that are ready."""
        pages = max(MOST_PAGES, self._pages_left // _PARTS)
        nbytes = max(MOST_BYTES, self._bytes_left // 2)
        for offload in self._offloads:
            if offload.runs is None:
                if not offload.is_ready():
                    return
                offload.runs = [_Run(each.tier, each.keys, each.read()) for each in offload.parts]
            for run in offload.runs:
                size = run.tier.layout.payload_bytes
                count = min(pages, max(-(-nbytes // size), 0), len(run.keys) - run.offered)
                if count:
                    self._offer(offload, run, count)
                    pages, nbytes = pages - count, nbytes - count * size
                if run.offered < len(run.keys):
                    return

    def _offer(self, offload: _Offload, run: _Run, count: int) -> None:
        first, stop = run.offered, run.offered + count
        above = run.keys[first - 1].tobytes() if first else None
        number = run.tier.offer(run.keys[first:stop], run.slots[first:stop], above)
        offload.waits_for.add((run.tier.pages.name, number))
        run.offered = stop
        self._pages_left -= count
        self._bytes_left -= count * run.tier.layout.payload_bytes

    def take_ends(self) -> int:
        """Count what has ended, and return how many offloads have, in their order."""
        for name, tier in self._tiers.items():
            for end in tier.take_ends():
                self._ended((name, end.number), is_whole=end.is_whole)
        while self._offloads and self._offloads[0].has_ended:
            offload = self._offloads.popleft()
            offload.forget()
            self._completed.append(offload.is_whole)
        return len(self._completed)

    def _ended(self, offer: tuple[str, int], *, is_whole: bool) -> None:
        for offload in self._offloads:
            if offer in offload.waits_for:
                offload.waits_for.remove(offer)
                offload.is_whole &= is_whole
                return

    def pop(self) -> bool:
        """Return True if the oldest offload that has ended is stored whole."""
        return self._completed.popleft()

    def forget(self) -> None:
        """Offer nothing more of what was taken."""
        for offload in self._offloads:
            offload.forget()

    def clear(self) -> None:
        """Forget all, once no copy is in flight."""
        for tier in self._tiers.values():
            tier.take_ends()
        self._offloads.clear()
        self._completed.clear()
        self._pages_left = self._bytes_left = 0
