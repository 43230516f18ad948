"""Hints: what they do to the tiers of this process and of a service, and what became of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from fdcache._core import HintAnswer, HintFate
from fdcache._core import HintKind as NativeKind
from fdcache.errors import HintError
from fdcache.groups import record_keys
from fdcache.hints import EARLY_REASONS, GivenHint, Hint, HintKind, HintOutcome, HintStatus
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.tiers.host import SharedHints
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import HintFigures

MOST_OPEN = 4096
"""Hints whose blocks are watched. A further one takes effect, but no outcome follows."""

MOST_OUTCOMES = 4096
"""Outcomes that wait to be taken; of more the oldest are dropped."""

MOST_SETTLED = 64
"""Hints whose outcome one call finds out; the others wait for the next one."""

SAMPLE = 32
"""Most blocks of a hint that are looked up when its time is over, and tell of those between them."""

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
    HintAnswer.REPLACED: HintStatus.NO_BLOCK,
}
_BEST_FIRST = (
    HintAnswer.TAKEN,
    HintAnswer.OVER_BUDGET,
    HintAnswer.REPLACED,
    HintAnswer.NO_BLOCK,
    HintAnswer.NOT_LEARNING,
)
_REPLACED = "later hints are about all its blocks"


@dataclass(slots=True, order=True)
class _Open:
    """A hint that was taken to keep ``blocks`` until ``due``; ``sample`` has the hashes of some of them."""

    due: float
    number: int
    request_id: str = field(compare=False)
    hint: Hint = field(compare=False)
    blocks: int = field(compare=False)
    sample: HashArray = field(compare=False)


class HintBook:
    """The hints in force in some tiers; ``pools`` returns those that there are, from the top down.

    ``figures`` count the outcomes. A hint is remembered by a sample of its blocks, whatever their number.
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

    def take(self, path: HashArray, given: Sequence[GivenHint]) -> list[HintOutcome]:
        """Apply hints about blocks of one path, whose requests have ended; return the outcome of each as it is now.

        A block takes the last hint about it.
        """
        said = [
            (_NATIVE[each.hint.kind], each.hint.value, each.start, each.stop, not each.hint.has_range)
            for each in given
        ]
        answers = [pool.hint(path, said) for pool in self._pools()] if len(path) else []
        return [self._taken(path, each, [found[i] for found in answers]) for i, each in enumerate(given)]

    def _taken(
        self, path: HashArray, given: GivenHint, found: list[tuple[HintAnswer, int, int]]
    ) -> HintOutcome:
        answers = {answer for answer, *_ in found}
        answer = next((each for each in _BEST_FIRST if each in answers), HintAnswer.NO_BLOCK)
        hint, blocks = given.hint, 0
        if answer == HintAnswer.TAKEN:
            _, first, blocks = max((each for each in found if each[0] == answer), key=itemgetter(2))
            if hint.keeps and not self.is_full:
                due = self._clock() + (hint.seconds or _PRIORITY_SECONDS)
                step = (blocks + SAMPLE - 1) // SAMPLE
                sample = path[first : first + blocks][::-step].copy()  # with the last one, which goes first
                heapq.heappush(
                    self._open, _Open(due, next(self._numbers), given.request_id, hint, blocks, sample)
                )
        outcome = HintOutcome(
            request_id=given.request_id,
            id=hint.id,
            kind=hint.kind,
            status=_STATUS[answer],
            blocks=blocks,
            reason=_REPLACED if answer == HintAnswer.REPLACED else "",
        )
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
        """Find out what became of the hints whose time is over, the first ``MOST_SETTLED`` of them."""
        if not self._open:
            return
        now = self._clock()
        due: list[_Open] = []
        while self._open and self._open[0].due <= now and len(due) < MOST_SETTLED:
            due.append(heapq.heappop(self._open))
        if not due:
            return
        fates = self._fates(np.concatenate([each.sample for each in due]))
        ends = np.cumsum([len(each.sample) for each in due])
        for each, found in zip(due, np.split(fates, ends[:-1]), strict=True):
            self._outcomes.append(_settled(each, found))
            self.figures.count(self._outcomes[-1])

    def take_outcomes(self) -> list[HintOutcome]:
        """Return the outcomes of hints whose time is over, each once."""
        self.settle()
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    def _fates(self, hashes: HashArray) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the best fate of each block in any tier: they come in that order."""
        fates: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.full(len(hashes), int(HintFate.GONE), np.uint8)
        for pool in self._pools():
            fates = np.minimum(fates, pool.hint_fates(hashes))
        return fates


def _settled(given: _Open, fates: NDArray[np.uint8]) -> HintOutcome:
    evicted = int(np.count_nonzero(fates == int(HintFate.EVICTED)))
    gone = int(np.count_nonzero(fates == int(HintFate.GONE)))
    lost = -(-(evicted + gone) * given.blocks // len(fates))
    return HintOutcome(
        request_id=given.request_id,
        id=given.hint.id,
        kind=given.hint.kind,
        status=HintStatus.EVICTED_EARLY if lost else HintStatus.KEPT,
        blocks=given.blocks,
        lost=lost,
        reason="" if not lost else EARLY_REASONS[evicted < gone],
    )


class RequestHints:
    """Takes hints of a manager's requests to its ``pools`` and to a ``service``; collects what became of them."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        service: SharedHints | None,
        layout: KVLayout,
        clock: Callable[[], float],
    ) -> None:
        self.figures = HintFigures()
        self._book = HintBook(lambda: pools, clock, self.figures) if pools else None
        self._service = service
        self._block_size = layout.block_size
        self._num_groups = layout.num_groups

    def take(
        self, request_id: str, hints: Iterable[Hint], hashes: HashArray, prompt_tokens: int
    ) -> list[HintOutcome]:
        """Apply hints about a request that has ended, and return the outcome of each as it is now.

        That is the outcome in the tiers of this process, if there are any.
        """
        given = [self._given(request_id, hint, len(hashes), prompt_tokens) for hint in hints]
        if not given:
            return []
        self.figures.given += len(given)
        path = record_keys(hashes, self._num_groups)
        sent = self._service.give(path, given) if self._service is not None else []
        for outcome in sent:
            self.figures.count(outcome)
        return self._book.take(path, given) if self._book is not None else sent

    def _given(self, request_id: str, hint: Hint, num_blocks: int, prompt_tokens: int) -> GivenHint:
        if not isinstance(hint, Hint):
            raise HintError(f"hints: {type(hint).__name__} is not a Hint")
        start, stop, _ = hint.blocks(prompt_tokens, self._block_size).indices(num_blocks)
        return GivenHint(request_id, hint, start * self._num_groups, stop * self._num_groups)

    @property
    def has_open(self) -> bool:
        """True while hints wait for their time to be over."""
        return self._book is not None and self._book.has_open

    def settle(self) -> None:
        """Find out what became of the hints whose time is over."""
        if self._book is not None:
            self._book.settle()

    def take_outcomes(self) -> list[HintOutcome]:
        """Return the outcomes that came later, each once."""
        own = self._book.take_outcomes() if self._book is not None else []
        if self._service is None:
            return own
        theirs = self._service.take_outcomes()
        for outcome in theirs:
            self.figures.count(outcome)
        return own + theirs
