"""NamespaceHints: the hints that clients have given for the blocks of a namespace, and what became of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from fdcache.errors import HintError
from fdcache.hints import MOST_HINTS, Hint, HintOutcome, HintStatus
from fdcache.metadata import HashArray
from fdcache.service.wire.protocol import HintGiven, HintResult, hashes_from
from fdcache.tiers.hint_book import HintBook
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import HintFigures

_SHARE = 0.5
"""Of a tenant's quota whose blocks may stay for hints, as of a tier's slots."""

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
        self._kept: defaultdict[int, list[HashArray]] = defaultdict(list)  # by tenants with a limit

    def take(self, session: int, given: Sequence[HintGiven]) -> list[HintResult]:
        """Apply hints of a client; return the outcome of each as it is now. Raises ``ProtocolError`` for bad hashes."""
        return [self._take(session, each, is_extra=i >= MOST_HINTS) for i, each in enumerate(given)]

    def _take(self, session: int, given: HintGiven, *, is_extra: bool) -> HintResult:
        hashes = hashes_from(given.hashes)
        self.figures.given += 1
        try:
            if is_extra:
                raise HintError(f"a message may have {MOST_HINTS} hints")
            end = 1 if given.whole else None  # any range: the hashes are those of the range
            hint = Hint(kind=given.kind, seconds=given.seconds, priority=given.priority, end=end)
        except HintError as error:
            return self._refused(given, HintStatus.REFUSED, str(error))
        limit = self._limit_of(hashes) if hint.keeps and len(hashes) else None
        if limit is not None and not self._has_room(*limit, hashes):
            return self._refused(
                given, HintStatus.OVER_BUDGET, "half of the tenant's quota stays for hints already"
            )
        outcome = self._book.take(f"{session}/{given.number}", hint, hashes)
        if limit is not None and outcome.status is HintStatus.TAKEN:
            self._kept[limit[0]].append(self._book.waiting(hashes))
        return _result(given.number, outcome)

    def _refused(self, given: HintGiven, status: HintStatus, reason: str) -> HintResult:
        self.figures.count(HintOutcome(request_id="", kind=given.kind, status=status))
        return HintResult(given.number, status, reason=reason)

    def _has_room(self, tenant: int, most: int, hashes: HashArray) -> bool:
        """Return True if these blocks of a tenant, too, may stay for hints; those used since do not count."""
        room = int(_SHARE * most)
        if sum(map(len, self._kept[tenant])) + len(hashes) <= room:
            return True
        kept = np.unique(np.concatenate([*self._kept[tenant], hashes[:0]]), axis=0)
        self._kept[tenant] = [self._book.waiting(kept)]
        return len(np.unique(np.concatenate([*self._kept[tenant], hashes]), axis=0)) <= room

    def settle(self) -> dict[int, list[HintResult]]:
        """Return what became of hints whose time is over, by the session of their client."""
        results: dict[int, list[HintResult]] = {}
        for outcome in self._book.take_outcomes():
            session, number = map(int, outcome.request_id.split("/"))
            results.setdefault(session, []).append(_result(number, outcome))
        return results

    def forget(self, session: int) -> None:
        """Forget the open hints of a client that has gone. What they said of blocks holds until its time is over."""
        self._book.forget(lambda request_id: request_id.startswith(f"{session}/"))


def _result(number: int, outcome: HintOutcome) -> HintResult:
    return HintResult(number, outcome.status, outcome.blocks, outcome.lost, outcome.reason)
