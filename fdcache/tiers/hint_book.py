"""HintBook: takes hints to the tiers of this process, and tells what became of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from fdcache._core import HintAnswer, HintFate
from fdcache._core import HintKind as NativeKind
from fdcache.hints import EARLY_REASONS, Hint, HintKind, HintOutcome, HintStatus
from fdcache.metadata import HashArray
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import HintFigures

MOST_OPEN = 4096
"""Hints whose blocks are watched. A further one takes effect, but no outcome follows."""

MOST_OUTCOMES = 4096
"""Outcomes that wait to be taken; of more the oldest are dropped."""

_PRIORITY_SECONDS = 3600.0
"""Time after which the outcome of a priority is told, which has no end of its own."""

_NATIVE = {
    HintKind.ONCE: NativeKind.ONCE,
    HintKind.RELEASE: NativeKind.RELEASE,
    HintKind.RETAIN: NativeKind.RETAIN,
    HintKind.RETURN: NativeKind.RETURN,
    HintKind.PRIORITY: NativeKind.PRIORITY,
}
_STATUS = {
    HintAnswer.TAKEN: HintStatus.TAKEN,
    HintAnswer.NOT_LEARNING: HintStatus.IGNORED,
    HintAnswer.OVER_BUDGET: HintStatus.OVER_BUDGET,
    HintAnswer.NO_BLOCK: HintStatus.NO_BLOCK,
}
_BEST_FIRST = (HintAnswer.TAKEN, HintAnswer.OVER_BUDGET, HintAnswer.NO_BLOCK, HintAnswer.NOT_LEARNING)


@dataclass(slots=True, order=True)
class _Open:
    """A hint that was taken to keep blocks until ``due``."""

    due: float
    number: int
    request_id: str = field(compare=False)
    hint: Hint = field(compare=False)
    hashes: HashArray = field(compare=False)


class HintBook:
    """The hints in force in some tiers; ``pools`` returns those that there are, from the top down.

    ``figures`` count the outcomes.
    """

    def __init__(
        self, pools: Callable[[], Sequence[BlockPool]], clock: Callable[[], float], figures: HintFigures
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._open: list[_Open] = []
        self._numbers = count()
        self._outcomes: deque[HintOutcome] = deque(maxlen=MOST_OUTCOMES)
        self.figures = figures

    @property
    def is_full(self) -> bool:
        """True if no further hint is watched."""
        return len(self._open) >= MOST_OPEN

    def take(self, request_id: str, hint: Hint, concerned: HashArray) -> HintOutcome:
        """Apply a hint about blocks of a request that has ended, and return its outcome as it is now."""
        answers = [
            pool.hint(concerned, _NATIVE[hint.kind], hint.value, hint.has_range)
            for pool in self._pools()
            if len(concerned)
        ]
        answer = next((each for each in _BEST_FIRST if each in answers), HintAnswer.NO_BLOCK)
        status = _STATUS[answer]
        blocks = 0
        if status is HintStatus.TAKEN:
            taken = self.waiting(concerned)
            blocks = len(taken)
            if hint.keeps and not self.is_full:
                due = self._clock() + (hint.seconds or _PRIORITY_SECONDS)
                heapq.heappush(self._open, _Open(due, next(self._numbers), request_id, hint, taken))
        outcome = HintOutcome(request_id=request_id, id=hint.id, kind=hint.kind, status=status, blocks=blocks)
        self.figures.count(outcome)
        return outcome

    def waiting(self, hashes: HashArray) -> HashArray:
        """Return those of the blocks that are there and were not used since a hint about them."""
        waiting: HashArray = hashes[self._fates(hashes) == int(HintFate.WAITING)]
        return waiting

    def forget(self, belongs: Callable[[str], bool]) -> None:
        """Forget the hints of requests whose outcomes nothing asks for any more."""
        self._open = [each for each in self._open if not belongs(each.request_id)]
        heapq.heapify(self._open)
        self._outcomes = deque(
            (each for each in self._outcomes if not belongs(each.request_id)), maxlen=MOST_OUTCOMES
        )

    @property
    def has_open(self) -> bool:
        """True while hints wait for their time to be over."""
        return bool(self._open)

    def settle(self) -> None:
        """Find out what became of the hints whose time is over."""
        if not self._open:
            return
        now = self._clock()
        while self._open and self._open[0].due <= now:
            self._outcomes.append(self._settled(heapq.heappop(self._open)))
            self.figures.count(self._outcomes[-1])

    def take_outcomes(self) -> list[HintOutcome]:
        """Return the outcomes of hints whose time is over, each once."""
        self.settle()
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    def _settled(self, found: _Open) -> HintOutcome:
        fates = self._fates(found.hashes)
        evicted = int(np.count_nonzero(fates == int(HintFate.EVICTED)))
        gone = int(np.count_nonzero(fates == int(HintFate.GONE)))
        lost = evicted + gone
        return HintOutcome(
            request_id=found.request_id,
            id=found.hint.id,
            kind=found.hint.kind,
            status=HintStatus.EVICTED_EARLY if lost else HintStatus.KEPT,
            blocks=len(found.hashes),
            lost=lost,
            reason="" if not lost else EARLY_REASONS[evicted < gone],
        )

    def _fates(self, hashes: HashArray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the best fate of each block in any tier: they come in that order."""
        fates: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.full(len(hashes), int(HintFate.GONE), np.uint8)
        for pool in self._pools():
            fates = np.minimum(fates, pool.hint_fates(hashes))
        return fates
