"""Outcomes of a batch of blocks, and what the failures of calls mean: for a block, and for the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np

from fdcache.metadata import UInt64Array
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.connector import Outcome, RecordBatch
from fdcache.storage.objects.backend import (
    DamagedObjectError,
    ObjectBackend,
    ObjectMissingError,
    StoreFailedError,
)
from fdcache.storage.objects.calls import GivenUpError, HangingError
from fdcache.storage.objects.catalogue import Pack
from fdcache.storage.objects.pack import ObjectFormat
from fdcache.storage.records import RecordCheck

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
            case DamagedObjectError():
                return Outcome.ERROR, str(error)
            case CancelledError():
                return Outcome.CANCELLED, "cancelled"
            case GivenUpError():
                has_begun = isinstance(error, HangingError)
                reason = f"{self._place}: {'no answer' if has_begun else 'not begun'} within {timeout:.3g} s"
                if has_begun:
                    self._open(self.breaker, reason)
                return Outcome.TIMEOUT, reason
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


Judge = Callable[[Exception], tuple[Outcome, str]]


class BatchInObjects:
    """One batch on its way between host and store. ``outcomes`` are CANCELLED or TIMEOUT for what was not begun.

    ``used``: the objects that were read, or that hold what was to be stored.
    """

    def __init__(
        self,
        batch: RecordBatch,
        backend: ObjectBackend,
        objects: ObjectFormat,
        check: RecordCheck,
        judge: Judge,
    ) -> None:
        self.outcomes = np.full(len(batch), Outcome.TIMEOUT, np.uint8)
        self.checksums: UInt64Array = np.zeros(len(batch), np.uint64)
        self.error: str | None = None
        self.used: list[Pack] = []
        self._batch = batch
        self._backend = backend
        self._objects = objects
        self._check = check
        self._judge = judge
        self._hashes = [row.tobytes() for row in batch.hashes]
