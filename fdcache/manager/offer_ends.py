"""Ends of offers: which blocks of an offer the host tier has now, in the order of the offers."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from fdcache._core import DevicePath, HostIndex
from fdcache.manager.copy_out import CopyOut
from fdcache.tiers.pool import READY


class OfferEnd(msgspec.Struct, frozen=True):
    """The end of the offer ``number``: of its ``blocks``, ``present`` were there before and ``stored`` are there now.

    The others were dropped.
    """

    number: int
    blocks: int = 0
    stored: int = 0
    present: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the host tier has all blocks."""
        return self.stored + self.present == self.blocks


class OpenOffer:
    """Blocks ``start`` to ``stop`` of a path, of which those before ``next`` have ended."""

    def __init__(self, path: DevicePath, start: int, stop: int, host: HostIndex) -> None:
        self.path = path
        self.start = self.next = start
        self.stop = stop
        self.there = 0
        self.present = int(np.count_nonzero(host.contains(path.hashes_from(start)[: stop - start]) == READY))

    def advance(self, copies: CopyOut) -> bool:
        """Look at the blocks that had not ended; return True once all have."""
        ended, there = copies.ended_of(self.path, self.next, self.stop)
        self.next += ended
        self.there += there
        return self.next == self.stop


class OfferEnds:
    """The offers whose ends are told. An offer without new blocks has ended."""

    def __init__(self) -> None:
        self._open: deque[tuple[int, OpenOffer | None]] = deque()
        self._last = 0

    def add(self, offer: OpenOffer | None) -> int:
        """Return the number of one more offer."""
        self._last += 1
        self._open.append((self._last, offer))
        return self._last

    def take(self, copies: CopyOut) -> list[OfferEnd]:
        """Return the ends since the last call."""
        ends = []
        while self._open:
            number, offer = self._open[0]
            if offer is None:
                ends.append(OfferEnd(number))
            elif offer.advance(copies):
                blocks = offer.stop - offer.start
                present = min(offer.present, offer.there)
                ends.append(OfferEnd(number, blocks, offer.there - present, present))
            else:
                break
            self._open.popleft()
        return ends
