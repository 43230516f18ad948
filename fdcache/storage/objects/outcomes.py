"""What the failures of calls mean: for a block, and for the store."""

from __future__ import annotations

import logging
from concurrent.futures import CancelledError

from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.connector import Outcome
from fdcache.storage.objects.backend import ObjectMissingError, StoreFailedError
from fdcache.storage.objects.calls import GivenUpError, HangingError

log = logging.getLogger(__name__)


class StoreHealth:
    """The circuit breakers of a store: one for every call, and one for writes that alone are refused.

    ``is_full``: the store has no room.
    """

    def __init__(self, place: str, retry_after: float) -> None:
        self.breaker = CircuitBreaker(retry_after)
        self.writes = CircuitBreaker(retry_after)
        self.is_full = False
        self._place = place

    def refuses(self, *, writing: bool) -> str | None:
        """Return why no call must be made now, or None."""
        return self.breaker.refuses() or (self.writes.refuses() if writing else None)

    @property
    def reason(self) -> str | None:
        """The failure that keeps the store, or writing to it, from being used."""
        return self.breaker.reason or self.writes.reason

    def judge(self, error: Exception, timeout: float) -> tuple[Outcome, str]:
        """Return what a failure means for its block, and its message; open a breaker if the store has failed."""
        match error:
            case ObjectMissingError():
                return Outcome.MISS, "not stored"
            case CancelledError():
                return Outcome.CANCELLED, "cancelled"
            case HangingError():
                reason = f"{self._place}: no answer within {timeout:.3g} s"
                self._open(self.breaker, reason)
                return Outcome.TIMEOUT, reason
            case GivenUpError():
                return Outcome.TIMEOUT, f"{self._place}: not begun within {timeout:.3g} s"
            case StoreFailedError():
                self.is_full = error.no_room
                self._open(self.writes if error.read_only else self.breaker, str(error))
                return Outcome.PEER_GONE, str(error)
        log.error("%s: a call failed", self._place, exc_info=error)
        return Outcome.ERROR, f"{self._place}: {type(error).__name__}: {error}"

    def answered(self) -> None:
        """Record a successful call."""
        self.breaker.succeeded()

    def wrote(self) -> None:
        """Record a successful write."""
        self.is_full = False
        self.writes.succeeded()

    @staticmethod
    def _open(breaker: CircuitBreaker, reason: str) -> None:
        if breaker.reason is None:
            log.warning("storage is left alone for a while: %s", reason)
        breaker.failed(reason)
