"""Hints: what they do to the tiers of this process and of a service, and what became of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from fdcache._core import HintAnswer, HintFate, read_hints
from fdcache.errors import HintError
from fdcache.groups import record_keys
from fdcache.hints import EARLY_REASONS, GivenHints, Hint, HintOutcome, HintOutcomes, HintStatus
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

_NO_BLOCK, _WAS_REPLACED = int(HintAnswer.NO_BLOCK), int(HintAnswer.REPLACED)
_STATUS = {
    int(HintAnswer.TAKEN): HintStatus.TAKEN,
    int(HintAnswer.OVER_BUDGET): HintStatus.OVER_BUDGET,
    _WAS_REPLACED: HintStatus.NO_BLOCK,
    _NO_BLOCK: HintStatus.NO_BLOCK,
    int(HintAnswer.NOT_LEARNING): HintStatus.IGNORED,
}
_BEST_FIRST = tuple(_STATUS)
_REPLACED = "later hints are about all its blocks"
_HASH = 32
"""Bytes of a hash."""

Answer = tuple[int, int, int, bytes]
"""What a tier answers to a hint: with its first block, their number, and a sample of their hashes if it keeps them."""


class TakenHints(HintOutcomes):
    """What tiers answered to the hints of a request."""

    __slots__ = ("_answers",)

    def __init__(self, given: GivenHints, answers: list[Answer]) -> None:
        super().__init__(given)
        self._answers = answers

    def _outcome(self, index: int) -> HintOutcome:
        answer, _, blocks, _ = self._answers[index]
        hint = self.given.hints[index]
        return HintOutcome(
            request_id=self.given.request_id,
            id=hint.id,
            kind=hint.kind,
            status=_STATUS[answer],
            blocks=blocks,
            reason=_REPLACED if answer == _WAS_REPLACED else "",
        )


@dataclass(slots=True, order=True)
class _Open:
    """The watched hints of a request: when each falls due and its position, the next one at the end."""

    due: float
    number: int
    given: GivenHints = field(compare=False)
    answers: list[Answer] = field(compare=False)
    watched: list[tuple[float, int]] = field(compare=False)


class HintBook:
    """The hints in force in some tiers; ``pools`` returns those that there are, from the top down.

    ``figures`` count the outcomes. A hint is remembered by a sample of its blocks, whatever their number.
    """

    def __init__(
        self, pools: Callable[[], Sequence[BlockPool]], clock: Callable[[], float], figures: HintFigures
    ) -> None:
        self._pools = pools
        self._clock = clock
        self.open: list[_Open] = []
        """Hints that wait for their time to be over, the next one first."""
        self._num_watched = 0
        self._numbers = count()
        self._outcomes: deque[HintOutcome] = deque(maxlen=MOST_OUTCOMES)
        self.figures = figures

    def take(self, path: HashArray, given: GivenHints) -> Sequence[HintOutcome]:
        """Apply hints about blocks of one path, whose request has ended; return the outcome of each as it is now.

        A block takes the last hint about it.
        """
        said = given.said
        pools = self._pools() if len(path) else ()
        found: list[list[Answer]] = [pool.hint(path, said, SAMPLE) for pool in pools]
        if not found:
            answers: list[Answer] = [(_NO_BLOCK, 0, 0, b"")] * len(said)
        elif len(found) == 1:
            answers = found[0]
        else:
            answers = [min(each, key=_worse) for each in zip(*found, strict=True)]
        self._watch(given, answers)
        codes = [each[0] for each in answers]
        for code in set(codes):
            self.figures.count(_STATUS[code], codes.count(code))
        return TakenHints(given, answers)

    def _watch(self, given: GivenHints, answers: list[Answer]) -> None:
        """Remember the hints that keep blocks, up to ``MOST_OPEN``, until their time is over."""
        now, hints = self._clock(), given.hints
        watched = [
            (now + (hints[i].seconds or _PRIORITY_SECONDS), i)
            for i, (_, _, _, sample) in enumerate(answers)
            if sample
        ][: MOST_OPEN - self._num_watched]
        if watched:
            self._num_watched += len(watched)
            watched.sort(reverse=True)
            heapq.heappush(self.open, _Open(watched[-1][0], next(self._numbers), given, answers, watched))

    def waiting(self, hashes: HashArray) -> HashArray:
        """Return those of the blocks that are there and were not used since a hint about them."""
        waiting: HashArray = hashes[self._fates(hashes) == int(HintFate.WAITING)]
        return waiting

    def forget(self, request_id: str) -> None:
        """Forget the hints of a request whose outcomes nothing asks for any more."""
        self.open[:] = [each for each in self.open if each.given.request_id != request_id]
        self._num_watched = sum(len(each.watched) for each in self.open)
        heapq.heapify(self.open)
        self._outcomes = deque(
            (each for each in self._outcomes if each.request_id != request_id), maxlen=MOST_OUTCOMES
        )

    def settle(self) -> None:
        """Find out what became of the hints whose time is over, the first ``MOST_SETTLED`` of them."""
        if not self.open:
            return
        now = self._clock()
        due: list[tuple[GivenHints, int, Answer]] = []
        while self.open and self.open[0].due <= now and len(due) < MOST_SETTLED:
            due.append(self._take_next())
        if not due:
            return
        samples = [np.frombuffer(sample, np.uint8).reshape(-1, _HASH) for *_, (*_, sample) in due]
        fates = self._fates(np.concatenate(samples))
        ends = np.cumsum([len(sample) for sample in samples])
        for (given, i, (_, _, blocks, _)), found in zip(due, np.split(fates, ends[:-1]), strict=True):
            outcome = _settled(given.request_id, given.hints[i], blocks, found)
            self._outcomes.append(outcome)
            self.figures.count(outcome.status, reason=outcome.reason)

    def _take_next(self) -> tuple[GivenHints, int, Answer]:
        """Return the hint that falls due first, by its position, with what was answered."""
        request = self.open[0]
        _, i = request.watched.pop()
        self._num_watched -= 1
        if request.watched:
            request.due = request.watched[-1][0]
            heapq.heapreplace(self.open, request)
        else:
            heapq.heappop(self.open)
        return request.given, i, request.answers[i]

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


def _worse(answer: Answer) -> tuple[int, int]:
    """Return what is lowest for the best answer of several tiers."""
    return _BEST_FIRST.index(answer[0]), -answer[2]


def _settled(request_id: str, hint: Hint, blocks: int, fates: NDArray[np.uint8]) -> HintOutcome:
    evicted = int(np.count_nonzero(fates == int(HintFate.EVICTED)))
    gone = int(np.count_nonzero(fates == int(HintFate.GONE)))
    lost = -(-(evicted + gone) * blocks // len(fates))
    return HintOutcome(
        request_id=request_id,
        id=hint.id,
        kind=hint.kind,
        status=HintStatus.EVICTED_EARLY if lost else HintStatus.KEPT,
        blocks=blocks,
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
        self.open: Sequence[object] = self._book.open if self._book is not None else ()
        """Hints that wait for their time to be over: there is something to ``settle``."""

        self._service = service
        self._block_size = layout.block_size
        self._num_records = layout.page_records

    def take(
        self, request_id: str, hints: Iterable[Hint], hashes: HashArray, prompt_tokens: int
    ) -> Sequence[HintOutcome]:
        """Apply hints about a request that has ended, and return the outcome of each as it is now.

        That is the outcome in the tiers of this process, if there are any.
        """
        hints = tuple(hints)
        if not hints:
            return ()
        for kind in set(map(type, hints)):
            if not issubclass(kind, Hint):
                raise HintError(f"hints: {kind.__name__} is not a Hint")
        said = read_hints(hints, prompt_tokens, self._block_size, len(hashes), self._num_records)
        given = GivenHints(request_id, hints, said)
        self.figures.given += len(hints)
        path = record_keys(hashes, self._num_records)
        sent: Sequence[HintOutcome] = ()
        if self._service is not None:
            sent = outcomes = self._service.give(path, given)
            self.figures.count(outcomes.status, len(hints))
        return self._book.take(path, given) if self._book is not None else sent

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
            self.figures.count(outcome.status, reason=outcome.reason)
        return own + theirs
