"""Leases: what a node holds for others that read it, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fdcache.transfer.nodes.holdings import Holdings, LentSlots
from fdcache.transfer.prefill import lease_seconds

MOST_LEASES = 4096
"""Leases at once; who asks for a further one reads without."""


@dataclass(slots=True)
class _Lease:
    seconds: float
    end: float
    held: list[tuple[Holdings, LentSlots]] = field(default_factory=list)


class Leases:
    """Leases by reader and number, as the hand-over's: each lasts some time after the reader's last message about it.

    So a reader that has died holds nothing for long. One thread calls.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leases: dict[tuple[bytes, int], _Lease] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self, reader: bytes, number: int, milliseconds: int, holdings: Holdings, hashes: Sequence[bytes]
    ) -> None:
        """Hold those of these blocks that are there, beside what the lease of this number has so far."""
        if (reader, number) not in self._leases and len(self._leases) >= MOST_LEASES:
            return
        if (held := holdings.hold(hashes)) is not None:
            lease = self._leases.setdefault((reader, number), _Lease(lease_seconds(milliseconds), 0.0))
            lease.held.append((holdings, held))
            self.renew(reader, number)

    def renew(self, reader: bytes, number: int) -> None:
        """Begin the time of a lease anew."""
        lease = self._leases.get((reader, number))
        if lease is not None:
            lease.end = self._clock() + lease.seconds

    def end(self, reader: bytes, number: int) -> None:
        """Hold nothing any more for this lease."""
        lease = self._leases.pop((reader, number), None)
        for holdings, held in lease.held if lease is not None else ():
            holdings.let_go(held)

    def expire(self) -> float | None:
        """End the leases whose time is over; return the seconds until the next one's is, None without any."""
        now = self._clock()
        for key in [key for key, lease in self._leases.items() if lease.end <= now]:
            self.expired += 1
            self.end(*key)
        return min((lease.end - now for lease in self._leases.values()), default=None)

    def end_all(self) -> None:
        """End every lease."""
        for key in list(self._leases):
            self.end(*key)
