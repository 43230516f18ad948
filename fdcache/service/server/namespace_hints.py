"""NamespaceHints: the hints that clients have given for the blocks of a namespace, and what became of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fdcache._core import HintKind as NativeKind
from fdcache.errors import HintError
from fdcache.hints import MOST_HINTS, GivenHints, Hint, HintOutcome, HintStatus
from fdcache.metadata import HashArray
from fdcache.service.wire.arrays import hashes_from
from fdcache.service.wire.protocol import HintGiven, HintResult, Hints
from fdcache.tiers.hint_book import HintBook
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import HintFigures

_SHARE = 0.5
"""Of a tenant's quota whose blocks may have room for hints, as of a tier's slots."""

TenantLimit = Callable[[HashArray], tuple[int, int] | None]
"""Returns the number and the most blocks of the tenant that a path belongs to; None without a limit."""


class NamespaceHints:
    """One book for all clients of a namespace. ``pools`` returns its tiers from the top down."""

    def __init__(
        self,
        pools: Callable[[], Sequence[BlockPool]],
        limit_of: TenantLimit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = HintFigures()
        self._pools = pools
        self._limit_of = limit_of
        self._book = HintBook(pools, clock, self.figures)
        self.open: Sequence[object] = self._book.open
        """Hints that wait for their time to be over: there is something to ``settle``."""

        self._kept: defaultdict[int, list[HashArray]] = defaultdict(list)  # by tenants with a limit

    def take(self, session: int, message: Hints) -> list[HintResult]:
        """Apply hints of a client; return the outcome of each as it is now. Raises ``ProtocolError`` for bad hashes."""
        path = hashes_from(message.hashes)
        self.figures.given += len(message.hints)
        results: list[HintResult | None] = []
        accepted, said = list[Hint](), list[tuple[NativeKind, float, int, int, bool]]()
        limit, kept = self._limit_of(path) if len(path) else None, np.zeros(len(path), np.bool_)
        for i, each in enumerate(message.hints):
            hint = _hint(each, is_extra=i >= MOST_HINTS)
            start, stop = min(each.start, len(path)), min(each.stop, len(path))
            refused = self._refused(each, HintStatus.REFUSED, hint) if isinstance(hint, str) else None
            if isinstance(hint, Hint) and hint.takes_room and limit is not None:
                more = kept.copy()
                more[start:stop] = True
                if self._has_room(*limit, path[more]):
                    kept = more
                else:
                    reason = "half of the tenant's quota has room for hints already"
                    refused = self._refused(each, HintStatus.OVER_BUDGET, reason)
            if isinstance(hint, Hint) and refused is None:
                accepted.append(hint)
                said.append((NativeKind[hint.kind.name], hint.value, start, stop, not hint.has_range))
            results.append(refused)
        outcomes = iter(self._book.take(path, GivenHints(str(session), accepted, said)))
        if limit is not None and kept.any():
            self._kept[limit[0]].append(self._book.waiting(path[kept]))
        return [
            _result(each.number, next(outcomes)) if result is None else result
            for each, result in zip(message.hints, results, strict=True)
        ]

    def _refused(self, given: HintGiven, status: HintStatus, reason: str) -> HintResult:
        self.figures.count(status)
        return HintResult(given.number, status, reason=reason)

    def _has_room(self, tenant: int, most: int, hashes: HashArray) -> bool:
        """Return True if these blocks of a tenant, too, may have room for hints; those used since do not count."""
        room = int(_SHARE * most)
        if len(hashes) > room:
            return False
        if sum(map(len, self._kept[tenant])) + len(hashes) <= room:
            return True
        known = np.concatenate([*self._kept[tenant], hashes[:0]])
        self._kept[tenant] = [self._book.waiting(known[_first_of_each(known)])]
        return len(_first_of_each(np.concatenate([*self._kept[tenant], hashes]))) <= room

    def settle(self) -> dict[int, list[HintResult]]:
        """Return what became of hints whose time is over, by the session of their client."""
        results: dict[int, list[HintResult]] = {}
        for outcome in self._book.take_outcomes():
            results.setdefault(int(outcome.request_id), []).append(_result(int(outcome.id), outcome))
        return results

    def forget(self, session: int) -> None:
        """Forget the open hints of a client that has gone. What they said of blocks holds until its time is over."""
        self._book.forget(str(session))


def _hint(given: HintGiven, *, is_extra: bool) -> Hint | str:
    """Return a client's hint, or what is wrong with it."""
    try:
        if is_extra:
            raise HintError(f"a message may have {MOST_HINTS} hints")
        end = 1 if given.whole else None  # any range: the message has that of the blocks
        number = str(given.number)
        return Hint(kind=given.kind, seconds=given.seconds, priority=given.priority, end=end, id=number)
    except HintError as error:
        return str(error)


def _first_of_each(hashes: HashArray) -> NDArray[np.intp]:
    """Return the positions of distinct hashes, which differ in their first 8 bytes."""
    return np.unique(np.ascontiguousarray(hashes[:, :8]).view(np.uint64), return_index=True)[1]


def _result(number: int, outcome: HintOutcome) -> HintResult:
    return HintResult(number, outcome.status, outcome.blocks, outcome.lost, outcome.reason)
