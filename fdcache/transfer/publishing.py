"""Parts that wait to be published: until they are computed, and until the connector has room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fdcache.devices.base import Event
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import Pieces, TransferConnector
from fdcache.transfer.prefill import Part, PrefillSide, Publish


@dataclass(slots=True)
class ComputedPart:
    """A part that is computed once ``event`` is reached."""

    plan_id: int
    part: Part
    event: Event | None


class Publisher:
    """Publishes the parts for which a peer asks, in order, as far as the connector has room."""

    def __init__(
        self,
        connector: TransferConnector,
        side: PrefillSide,
        slots_of: Callable[[int], Int32Array],
        pieces: Pieces | None,
    ) -> None:
        self._connector, self._side, self._slots_of, self._pieces = connector, side, slots_of, pieces
        self._wanted: deque[Publish] = deque()

    def publish(self, wanted: Publish) -> None:
        """Publish a part as soon as there is room."""
        self._wanted.append(wanted)

    def tick(self) -> None:
        """Publish what there is room for. A peer that waits for room does not hold up others."""
        waiting: set[bytes] = set()
        for _ in range(len(self._wanted)):
            wanted = self._wanted.popleft()
            if not self._side.is_asked(wanted.plan_id, wanted.peer, wanted.attempt):
                continue
            if wanted.peer in waiting or (rest := self._publish(wanted)) is wanted:
                waiting.add(wanted.peer)
                self._wanted.append(wanted)
            elif rest is not None:
                self._wanted.append(rest)

    def _publish(self, wanted: Publish) -> Publish | None:
        """Publish the leading blocks of a part; return what is left of it."""
        part = wanted.part
        while part.first < part.last:
            most = self._connector.most_blocks(part.first_plane, part.last_plane)
            head = part._replace(last=min(part.last, part.first + most))
            slots = self._slots_of(wanted.plan_id)[head.first : head.last]
            places = self._connector.publish(slots, part.first_plane, part.last_plane, self._pieces)
            if places is None:
                break
            self._side.published(wanted.plan_id, wanted.peer, wanted.attempt, head, places)
            part = part._replace(first=head.last)
        if part == wanted.part:
            return wanted
        return wanted._replace(part=part) if part.first < part.last else None
