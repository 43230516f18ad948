"""Room of a connector for what is published, shared by the peers that it is published for."""

from __future__ import annotations

from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array
from fdcache.transfer.connector import Pieces, TransferConnector, whole_planes

Peer = bytes


class PlaceShares:
    """Publishes parts for peers. One may take half of the room that others leave, so that it cannot stop them.

    ``total``: bytes of the room. What takes none is not limited.
    """

    def __init__(self, connector: TransferConnector, layout: KVLayout, total: int) -> None:
        self._connector, self._total = connector, total
        self._whole = whole_planes(layout)
        self._taken: dict[Peer, int] = {}
        self._owners: dict[tuple[int, ...], tuple[Peer, int]] = {}

    def publish(
        self, peer: Peer, slots: Int32Array, first_plane: int, last_plane: int, pieces: Pieces | None
    ) -> tuple[int, ...] | None:
        """Do as the connector does; also return None if the peer has its share. Raises ``DeviceError``."""
        own = self._taken.get(peer, 0)
        needed = len(slots) * sum((pieces or self._whole).sizes[first_plane:last_plane])
        if own and own + needed > (self._total - sum(self._taken.values()) + own) // 2:
            return None
        before = self._connector.stats().places_used
        places = self._connector.publish(slots, first_plane, last_plane, pieces)
        taken = self._connector.stats().places_used - before
        if places is not None and taken > 0:
            self._owners[places] = peer, taken
            self._taken[peer] = own + taken
        return places

    def withdraw(self, places: tuple[int, ...]) -> None:
        """Free places."""
        self._connector.withdraw(places)
        if (owner := self._owners.pop(places, None)) is not None:
            peer, taken = owner
            self._taken[peer] -= taken
            if not self._taken[peer]:
                del self._taken[peer]
