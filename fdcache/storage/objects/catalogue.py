"""The index of a node: which objects hold which blocks, as far as this process has seen."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fdcache.storage.objects.pack import Headers


@dataclass(slots=True, eq=False)
class Pack:
    """An object as it was seen at ``seen_at``. ``used_at``: when this process marked it as used. By its own clock.

    ``is_doubted``: a read found that it is not like this any more.
    """

    name: str
    headers: Headers
    seen_at: float
    used_at: float = float("-inf")
    is_doubted: bool = False


Place = tuple[Pack, int]
"""An object, and the position of a block's record in it."""


class Catalogue:
    """Blocks of one rank of one layout by hash; any thread may use it. Objects not seen for long are forgotten.

    It may be behind: an object that another node has removed is forgotten once it is found missing.
    """

    def __init__(self, most_blocks: int = 1 << 18) -> None:
        self._lock = threading.Lock()
        self._most_blocks = most_blocks
        self._packs: OrderedDict[str, Pack] = OrderedDict()
        self._places: dict[bytes, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, block_hash: bytes) -> Place | None:
        """Return where a block is, None if that is not known."""
        with self._lock:
            place = self._places.get(block_hash)
            if place is not None:
                self._packs.move_to_end(place[0].name)
            return None if place is None or place[0].is_doubted else place

    def last_seen(self, block_hash: bytes) -> str | None:
        """Return the name of the object that held a block when it was last seen."""
        with self._lock:
            place = self._places.get(block_hash)
            return None if place is None else place[0].name

    def enter(self, name: str, headers: Headers) -> Pack:
        """Record what an object holds, in place of what was known of it."""
        pack = Pack(name, headers, time.monotonic())
        with self._lock:
            if (before := self._forget(name)) is not None:
                pack.used_at = before.used_at
            self._packs[name] = pack
            for position, header in enumerate(headers):
                self._places[header.hash] = (pack, position)
            while len(self._places) > self._most_blocks and len(self._packs) > 1:
                self._forget(next(iter(self._packs)))
            return pack

    def doubt(self, hashes: Iterable[bytes]) -> None:
        """Look at the objects again that are believed to hold these blocks, before they are found."""
        with self._lock:
            for block_hash in hashes:
                if (place := self._places.get(block_hash)) is not None:
                    place[0].is_doubted = True

    def forget(self, name: str) -> None:
        """Forget an object."""
        with self._lock:
            self._forget(name)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._packs.clear()
            self._places.clear()

    def _forget(self, name: str) -> Pack | None:
        pack = self._packs.pop(name, None)
        if pack is not None:
            for header in pack.headers:
                if self._places.get(header.hash, (None, 0))[0] is pack:
                    del self._places[header.hash]
        return pack

    def stale_path(self, pack: Pack, now: float, interval: float) -> list[Pack]:
        """Return an object and those before it on its path that were not marked for ``interval``, the first one first.

        They count as marked ``now``.
        """
        found: list[Pack] = []
        with self._lock:
            current: Pack | None = pack
            while current is not None and now - current.used_at >= interval:
                current.used_at = now
                found.append(current)
                place = self._places.get(current.headers[0].parent)
                current = None if place is None else place[0]
        return found[::-1]


class Catalogues:
    """The catalogues of a process: one for each place and rank, shared by the connectors that are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: WeakValueDictionary[tuple[str, str], Catalogue] = WeakValueDictionary()

    def of(self, place: str, prefix: str) -> Catalogue:
        """Return the catalogue of a rank's objects."""
        with self._lock:
            found = self._open.get((place, prefix))
            if found is None:
                found = self._open[place, prefix] = Catalogue()
            return found


CATALOGUES = Catalogues()
