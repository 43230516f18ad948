"""Parts that wait to be published: until they are computed, and until the connector has room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fdcache.devices.base import Event
from fdcache.errors import DeviceError
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import Packer, Pieces, TransferConnector
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
        self._packing: deque[tuple[Publish, Part, tuple[int, ...]]] = deque()

    def publish(self, wanted: Publish) -> None:
        """Publish a part as soon as there is room."""
        self._wanted.append(wanted)

    def publish_next(self) -> bool:
        """Announce what is packed, or publish the leading blocks of the next part for which there is room.

        Returns False if nothing was done. A peer that waits for room does not hold up others.
        """
        if self._announce_next():
            return True
        waiting: set[bytes] = set()
        passed: list[Publish] = []
        published = False
        while self._wanted and not published:
            wanted = self._wanted.popleft()
            if not self._side.is_asked(wanted.plan_id, wanted.peer, wanted.attempt):
                continue
            published = wanted.peer not in waiting and self._publish(wanted)
            if not published:
                waiting.add(wanted.peer)
                passed.append(wanted)
        self._wanted.extendleft(reversed(passed))
        return published

    def _publish(self, wanted: Publish) -> bool:
        """Publish the leading blocks of a part if there is room, and keep the rest of it."""
        part = wanted.part
        most = self._connector.most_blocks(part.first_plane, part.last_plane)
        head = part._replace(last=min(part.last, part.first + most))
        slots = self._slots_of(wanted.plan_id)[head.first : head.last]
        try:
            places = self._connector.publish(slots, part.first_plane, part.last_plane, self._pieces)
        except DeviceError as error:
            self._side.cancel(wanted.plan_id, str(error))
            return True
        if places is None:
            return False
        if head.last < part.last:
            self._wanted.appendleft(wanted._replace(part=part._replace(first=head.last)))
        self._packing.append((wanted, head, places))
        self._announce_next()
        return True

    def _announce_next(self) -> bool:
        """Announce the first part that is being packed, if peers may read it."""
        if not self._packing:
            return False
        wanted, head, places = self._packing[0]
        try:
            if isinstance(self._connector, Packer) and not self._connector.is_packed(places):
                return False
        except DeviceError as error:
            self._side.cancel(wanted.plan_id, str(error))
        self._packing.popleft()
        self._side.published(wanted.plan_id, wanted.peer, wanted.attempt, head, places)
        return True
