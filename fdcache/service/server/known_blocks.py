"""Blocks that were there before: a sample that tells what an endless cache would have found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fdcache.metadata import HashArray

MOST_KNOWN = 32768
"""Blocks in the sample of a namespace, about 3 MiB of memory."""
_RECENT = 64
_ALL, _LEAST = (1 << 64) - 1, 1 << 40


@dataclass(frozen=True, slots=True)
class SampledMisses:
    """Missing blocks of the sample, and how many of all they stand for: in all, and known before."""

    sample: int = 0
    missed: int = 0
    known: int = 0

    def plus(self, more: SampledMisses) -> SampledMisses:
        """Return the sums."""
        return SampledMisses(self.sample + more.sample, self.missed + more.missed, self.known + more.known)


class KnownBlocks:
    """Tells how many of the missing blocks of look-ups an earlier look-up or copy had.

    An endless cache would have had the latter. Blocks are told by the first 8 bytes of their hash, and only those below
    a limit count: the limit starts above all, and is halved whenever more than ``most`` blocks are known. So the sample
    is all blocks at first, and later one of 2, of 4, of 8 ... of each prompt, which stands for as many.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: set[int] = set()
        self._below = _ALL
        self._recent: deque[bytes] = deque(maxlen=_RECENT)

    def add_missing(self, hashes: HashArray) -> SampledMisses:
        """Add the missing blocks of a look-up.

        A look-up that was made just before is not counted again: a request that gets no blocks repeats it.
        """
        if (path := hashes[-1].tobytes()) in self._recent:
            return SampledMisses()
        self._recent.append(path)
        return self.add_missing_sample(self._sample(hashes), self._below)

    def add_missing_sample(self, sample: Iterable[int], below: int) -> SampledMisses:
        """Add missing blocks that a client noted: the beginnings of their hashes, those below its own limit."""
        if _LEAST <= below < self._below:
            self._lower(below)
        seen = [each for each in sample if each < self._below]
        fresh = set(seen) - self._known
        each = round(_ALL / self._below)
        self._add(fresh)
        return SampledMisses(len(seen), each * len(seen), each * (len(seen) - len(fresh)))

    def add_stored(self, hashes: HashArray) -> None:
        """Note blocks that were copied to the tier, whether they were kept or not."""
        self._add(set(self._sample(hashes)))

    def __len__(self) -> int:
        """Number of blocks in the sample."""
        return len(self._known)

    def _add(self, blocks: set[int]) -> None:
        self._known |= blocks
        while len(self._known) > self._most and self._below > _LEAST:
            self._lower(self._below // 2)

    def _lower(self, below: int) -> None:
        self._below = below
        self._known = {each for each in self._known if each < below}

    def _sample(self, hashes: HashArray) -> list[int]:
        starts = np.ascontiguousarray(hashes[:, :8]).view("<u8").ravel()
        chosen: list[int] = starts[starts < np.uint64(self._below)].tolist()
        return chosen
