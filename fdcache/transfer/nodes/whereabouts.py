"""Whereabouts: which other node was last seen to have a block, and which one is to be asked for it first."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence

_MOST_BLOCKS = 1 << 16


class Whereabouts:
    """What is known of the blocks of other nodes, the newest 65,536 of each kind. Any thread may call it.

    It may be behind: a block leaves another node without a word.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, str] = OrderedDict()
        self._sources: OrderedDict[bytes, str] = OrderedDict()

    def saw(self, asked: Iterable[bytes], holders: Mapping[bytes, str]) -> None:
        """Record who has each of the blocks that all nodes were asked for; ``holders`` lacks those of none."""
        with self._lock:
            for key in asked:
                self._seen.pop(key, None)
                if (holder := holders.get(key)) is not None:
                    self._seen[key] = holder
            _shorten(self._seen)

    def seen(self, keys: Iterable[bytes]) -> list[str | None]:
        """Return the node that had each block when nodes were last asked for it."""
        with self._lock:
            return [self._seen.get(key) for key in keys]

    def name_source(self, keys: Iterable[bytes], address: str) -> bool:
        """Ask this node first for these blocks, until one is read; return True unless that was known of all."""
        with self._lock:
            new = [key for key in keys if self._sources.get(key) != address]
            for key in new:
                self._sources.pop(key, None)
                self._sources[key] = address
            _shorten(self._sources)
            return bool(new)

    def forget_sources(self, keys: Iterable[bytes]) -> None:
        """Ask no node first for these blocks."""
        if self._sources:
            with self._lock:
                for key in keys:
                    self._sources.pop(key, None)

    def sources(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        """Return the places in ``keys`` of those for which a node is to be asked first, by its address."""
        found: dict[str, list[int]] = defaultdict(list)
        if self._sources:
            with self._lock:
                for place, key in enumerate(keys):
                    if (address := self._sources.get(key)) is not None:
                        found[address].append(place)
        return found


def _shorten(known: OrderedDict[bytes, str]) -> None:
    while len(known) > _MOST_BLOCKS:
        known.popitem(last=False)
