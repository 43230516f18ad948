"""Recalls: memory that a layout stocks, asked back for another one that has less than its share."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from fdcache.node.protocol import Recall
from fdcache.server.clients import Client
from fdcache.server.namespace import Namespace

_HELD = 2.5
"""Seconds; longer than a client that was granted too little, or turned away, waits before it asks again."""
_PAUSE = 10.0
"""Seconds between a recall that freed nothing, because a load or a copy went on there, and the next one."""


class Recalls:
    """Layouts whose last extent is wanted. Until it is given away, or 2.5 s have passed, they are granted no slots."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[Namespace, float] = {}
        self._untold: list[Namespace] = []

    def begin(self, giver: Namespace) -> None:
        """Ask for what is stocked in the last extent of a layout, unless that was tried just now."""
        now = self._clock()
        self._until = {each: until for each, until in self._until.items() if now < until + _PAUSE}
        if giver not in self._until:
            self._until[giver] = now + _HELD
            self._untold.append(giver)

    def is_held(self, namespace: Namespace) -> bool:
        """Whether nothing may be granted to this layout now."""
        return self._clock() < self._until.get(namespace, 0.0)

    def end(self) -> None:
        """Who wanted an extent has one."""
        self._until.clear()
        self._untold.clear()

    def tell(self, clients: Collection[Client], tell: Callable[[bytes, Recall], object]) -> None:
        """Let the clients of these layouts know."""
        for giver in self._untold:
            first = giver.num_slots - giver.geometry.records_per_extent
            for client in clients:
                if client.namespace is giver:
                    tell(client.identity, Recall(first))
        self._untold.clear()
