"""ReadLeases: what a node holds for others that read it, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fdcache.transfer.leases import MOST_LEASES, Leases, lease_seconds
from fdcache.transfer.nodes.holdings import Holdings, LentSlots


@dataclass(slots=True)
class _Held:
    seconds: float
    slots: list[tuple[Holdings, LentSlots]] = field(default_factory=list)


class ReadLeases:
    """Slots that are held for readers, by reader and number. Beyond ``MOST_LEASES`` a reader reads without a lease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: Leases[tuple[bytes, int], _Held] = Leases()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, reader: bytes, number: int, milliseconds: int, holdings: Holdings, hashes: Sequence[bytes]
    ) -> None:
        """Hold those of these blocks that are there, beside what the lease of this number has so far."""
        held = self._leases.get((reader, number))
        if (held is None and len(self._leases) >= MOST_LEASES) or (slots := holdings.hold(hashes)) is None:
            return
        if held is None:
            held = _Held(lease_seconds(milliseconds))
            self._leases.grant((reader, number), held, 0.0)
        held.slots.append((holdings, slots))
        self.renew(reader, number)

    def renew(self, reader: bytes, number: int) -> None:
        """Begin the time of a lease anew."""
        if (held := self._leases.get((reader, number))) is not None:
            self._leases.renew((reader, number), self._clock() + held.seconds)

    def end(self, reader: bytes, number: int) -> None:
        """Hold nothing any more for this lease."""
        held = self._leases.end((reader, number))
        for holdings, slots in held.slots if held is not None else ():
            holdings.let_go(slots)

    def expire(self) -> float | None:
        """End the leases whose time is over; return the seconds until the next one's is, None without any."""
        now = self._clock()
        for key in self._leases.expired(now):
            self.expired += 1
            self.end(*key)
        next_end = self._leases.next_end
        return None if next_end is None else next_end - now

    def end_all(self) -> None:
        """End every lease."""
        for key in list(self._leases):
            self.end(*key)
