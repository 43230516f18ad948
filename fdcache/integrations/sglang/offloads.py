"""Offloads of SGLang: pages of nodes that are to be stored, in its order, a piece at a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fdcache._core import keys_from_hex
from fdcache.integrations.sglang.pool_tier import PoolTier
from fdcache.metadata import HashArray, Int32Array

MOST_PAGES = 256
"""Pages that one turn begins to store: a plan of the scheduler waits no longer than for these."""

MOST_BYTES = 512 << 20
"""Bytes that one turn begins to store: copies of more would go on beside the next token of a prompt just computed."""

_PARTS = 8
"""Of more pages than 8 times as many, a turn begins an 8th: steps may take long, and nodes stay locked meanwhile."""


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Pages of one pool by SGLang's ``names`` of them; ``read`` waits for the slots that it has told of."""

    tier: PoolTier
    names: list[str]
    read: Callable[[], Int32Array]

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return len(self.names) * self.tier.layout.payload_bytes

    def run(self) -> _Run:
        """Return the pages with their keys and slots, once the slots are told."""
        return _Run(self.tier, keys_from_hex(self.names), self.read())


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
    """The offloads that have not been popped.

    One thread calls ``add``, ``pop`` and ``num_completed``, which cost it next to nothing; another one the rest.
    """

    def __init__(self, tiers: Mapping[str, PoolTier]) -> None:
        self._tiers = tiers
        self._added: deque[_Offload] = deque()
        self._offloads: deque[_Offload] = deque()
        self._completed: deque[bool] = deque()
        self._pages_left = self._bytes_left = 0

    @property
    def are_open(self) -> bool:
        """True if some have not ended."""
        return bool(self._added or self._offloads)

    @property
    def are_many(self) -> bool:
        """True if more pages wait than turns begin that have nothing else to do."""
        return self._pages_left > _PARTS * MOST_PAGES

    @property
    def num_completed(self) -> int:
        """Number of offloads that have ended, in their order."""
        return len(self._completed)

    def add(self, parts: Sequence[PoolPart], is_ready: Callable[[], bool], *, is_whole: bool) -> None:
        """Take one, which is begun once ``is_ready``; ``is_whole``: False if it is not to be stored."""
        self._added.append(_Offload(parts, is_ready, is_whole))

    def take_added(self) -> None:
        """Count what was added as waiting."""
        while self._added:
            offload = self._added[0]
            self._offloads.append(offload)
            self._added.popleft()  # now: until then it is open by this one
            self._pages_left += sum(len(each.names) for each in offload.parts)
            self._bytes_left += sum(each.nbytes for each in offload.parts)

    def begin(self) -> None:
        """Offer the next pages of those that are ready."""
        pages = max(MOST_PAGES, self._pages_left // _PARTS)
        nbytes = max(MOST_BYTES, self._bytes_left // 2)
        for offload in self._offloads:
            if offload.runs is None:
                if not offload.is_ready():
                    return
                offload.runs = [each.run() for each in offload.parts]
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

    def take_ends(self) -> None:
        """Count what has ended."""
        for name, tier in self._tiers.items():
            for end in tier.take_ends():
                self._ended((name, end.number), is_whole=end.is_whole)
        while self._offloads and self._offloads[0].has_ended:
            offload = self._offloads[0]
            offload.forget()
            self._completed.append(offload.is_whole)
            self._offloads.popleft()

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
        self._added.clear()
        self._offloads.clear()
        self._completed.clear()
        self._pages_left = self._bytes_left = 0
