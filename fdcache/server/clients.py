"""Clients: who is registered, what each holds, and whether its processes are alive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fdcache.node.liveness import Watch
from fdcache.node.protocol import Live
from fdcache.server.namespace import Namespace


@dataclass(eq=False, slots=True)
class Client:
    """One session. ``stock`` has the generation of each slot it may copy into, ``runs`` its pinned look-ups.

    What is in ``stock`` is given back by the client, or when every one of its processes is proved gone.
    """

    session: int
    identity: bytes
    namespace: Namespace
    live: Live
    name: str
    wants_events: bool
    watches: list[Watch]
    stock_lease: int
    stock: dict[int, int] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    figures: bytes = b"{}"
    since: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    silent: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    device_resets: int = 0
    device_resets_applied: int = 0
    lookups: int = 0
    stored: int = 0

    def watch(self, live: Live, rank: int) -> None:
        """Another of its processes copies."""
        if live.path not in self.ranks:
            self.watches.append(Watch(live))
        self.ranks[live.path] = rank

    def is_gone(self) -> bool:
        """Whether none of its processes is left; those that are gone are watched no more."""
        alive = []
        for watch in self.watches:
            if watch.is_gone():
                watch.close()
                self.ranks.pop(watch.live.path, None)
            else:
                alive.append(watch)
        self.watches = alive
        return not alive

    def give_up_runs(self) -> int:
        """Unpin what it looked up; a load that still reads there finds the slot's header changed, and fails."""
        tier = self.namespace.tier
        if tier is not None:
            for lease in self.runs:
                tier.release(lease)
        count = len(self.runs)
        self.runs.clear()
        return count

    def take_everything_back(self) -> None:
        """Its slots and pins: it has said that it is done with them, or is proved gone."""
        self.give_up_runs()
        if self.namespace.tier is not None:
            self.namespace.tier.release(self.stock_lease)
        self.stock.clear()
        for watch in self.watches:
            watch.close()
        self.watches = []
