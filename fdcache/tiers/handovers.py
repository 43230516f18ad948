"""Counts of hand-overs between instances, by peer and result."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from fdcache.metadata import HandoverEnd, SwapPurpose, TransferReport
from fdcache.tiers.statistics import HandoverCount

OTHERS = "others"
"""Peer of the counts of those that have not been counted for longest."""
_MOST_PEERS = 32


class HandoverTally:
    """Counts by peer, direction and result. Those of peers beyond the last few are added up under ``OTHERS``."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, dict[tuple[str, str], HandoverCount]] = OrderedDict()

    def record(self, report: TransferReport) -> None:
        """Count a rank's report of a hand-over; ignore others."""
        if (end := report.handover) is not None:
            for result in report.results:
                self.add(result.purpose, end, result.copied_bytes, result.seconds)

    def add(self, purpose: SwapPurpose, end: HandoverEnd, moved_bytes: int, moved_seconds: float) -> None:
        """Count a hand-over that has ended."""
        self._add(
            HandoverCount(
                purpose.value,
                end.peer,
                end.result,
                1,
                end.blocks,
                moved_bytes,
                end.waited_seconds,
                moved_seconds,
            )
        )
        self._peers.move_to_end(end.peer)
        named = len(self._peers) - (OTHERS in self._peers)
        if named > _MOST_PEERS:
            oldest = next(peer for peer in self._peers if peer != OTHERS)
            for count in self._peers.pop(oldest).values():
                count.peer = OTHERS
                self._add(count)

    def _add(self, count: HandoverCount) -> None:
        counts = self._peers.setdefault(count.peer, {})
        key = (count.direction, count.result)
        if key in counts:
            counts[key].add(count)
        else:
            counts[key] = count

    def counts(self) -> list[HandoverCount]:
        """Return a snapshot."""
        return [msgspec.structs.replace(each) for counts in self._peers.values() for each in counts.values()]
