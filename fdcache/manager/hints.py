"""RequestHints: the hints of a manager's requests, for its own tiers and for those of a service."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fdcache.errors import HintError
from fdcache.groups import record_keys
from fdcache.hints import GivenHint, Hint, HintOutcome
from fdcache.manager.tiers import Tiers
from fdcache.metadata import HashArray
from fdcache.tiers.hint_book import HintBook
from fdcache.tiers.statistics import HintFigures


class RequestHints:
    """Takes hints of requests that end to all tiers, and collects what became of them."""

    def __init__(
        self, tiers: Tiers, block_size: int, clock: Callable[[], float], num_groups: int = 1
    ) -> None:
        self.figures = HintFigures()
        own = list(tiers.own_pools.values())
        self._book = HintBook(lambda: own, clock, self.figures) if own else None
        self._service = tiers.service.hints if tiers.service is not None else None
        self._block_size = block_size
        self._num_groups = num_groups

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
