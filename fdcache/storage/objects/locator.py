"""Locator: finds the objects that hold the blocks of a path, without listing anything."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial

from fdcache import _core
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.objects.backend import DamagedObjectError, ObjectBackend, ObjectMissingError
from fdcache.storage.objects.calls import CallPool, GivenUpError
from fdcache.storage.objects.catalogue import Catalogue, Pack, Place
from fdcache.storage.objects.pack import PAGE, ObjectFormat

log = logging.getLogger(__name__)

_MOST_PROBES = 16
_MOST_NAMED = 1024


@dataclass(slots=True)
class Located:
    """Blocks by their index in the question: where they are, or why that is not known. Others are not stored."""

    places: dict[int, Place] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)


class Locator:
    """One rank's objects by the hashes of their blocks.

    An object has the name of its first block, and its page tells which others it holds. So the object of an unknown
    block is asked for by the block's name, and as many further along the path as objects can be expected there; what
    their pages tell is entered into the catalogue.
    """

    def __init__(
        self,
        backend: ObjectBackend,
        pool: CallPool,
        catalogue: Catalogue,
        objects: ObjectFormat,
        prefix: str,
        most_records: int,
        breaker: CircuitBreaker,
    ) -> None:
        self.catalogue = catalogue
        self.prefix = prefix
        self._backend = backend
        self._pool = pool
        self._objects = objects
        self._most_records = most_records
        self._breaker = breaker
        self._named: set[str] = set()

    def name(self, block_hash: bytes) -> str:
        """Return the name of the object whose first block this is."""
        text = block_hash.hex()
        return f"{self.prefix}{text[:2]}/{text}"

    def look_at(self, name: str) -> Pack:
        """Read an object's page and enter it. Raises the errors of the backend and ``DamagedObjectError``."""
        try:
            page = self._backend.read(name, 0, PAGE)
            headers = self._objects.headers(page)
        except (ObjectMissingError, DamagedObjectError) as error:
            self._breaker.succeeded()
            self.catalogue.forget(name)
            if isinstance(error, DamagedObjectError):
                self._report(name, error)
            raise
        self._breaker.succeeded()
        return self.catalogue.enter(name, headers)

    def _report(self, name: str, error: DamagedObjectError) -> None:
        """Log that an object is damaged, the first time."""
        if name not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(name)
            log.warning("the object %s is damaged, and its blocks count as not stored: %s", name, error)

    def find(
        self,
        hashes: Sequence[bytes],
        deadline: float,
        cancel: _core.CancelFlag | None = None,
        *,
        only_run: bool = False,
        is_path: bool = True,
    ) -> Located:
        """Find blocks of one path, or a few with which objects begin. ``only_run``: those before the first gap."""
        found = Located()
        missing: set[int] = set()
        probes = 2
        while True:
            for i, each in enumerate(hashes):
                if i not in found.places and (place := self.catalogue.find(each)) is not None:
                    found.places[i] = place
            unknown = [
                i for i in range(len(hashes)) if not (i in found.places or i in missing or i in found.failed)
            ]
            gap = missing or found.failed
            if not unknown or (only_run and gap and min((*missing, *found.failed)) < unknown[0]):
                return found
            asked = self._worth_asking(unknown, probes) if is_path else unknown
            probes = min(2 * probes, _MOST_PROBES)
            names = [self.catalogue.last_seen(hashes[i]) or self.name(hashes[i]) for i in asked]
            calls = [partial(self.look_at, name) for name in names]
            answers = self._pool.results(calls, deadline, cancel)
            for i, name, answer in zip(asked, names, answers, strict=True):
                if isinstance(answer, ObjectMissingError | DamagedObjectError):
                    if name == self.name(hashes[i]):
                        missing.add(i)
                elif isinstance(answer, Exception):
                    found.failed[i] = answer
                elif name == self.name(hashes[i]) and answer.headers[0].hash != hashes[i]:
                    missing.add(i)  # an object under a name that is not its own
            late = time.monotonic() >= deadline or (cancel is not None and cancel.is_set)
            if late or self._breaker.reason is not None:
                reason = next(iter(found.failed.values()), GivenUpError() if late else CancelledError())
                for i in unknown:
                    if i not in missing:
                        found.failed.setdefault(i, reason)

    def _worth_asking(self, unknown: Sequence[int], count: int) -> list[int]:
        """Return the first unknown block, and those with which later objects of the path are likely to begin."""
        first = unknown[0]
        later = set(unknown)
        steps = range(first, unknown[-1] + 1, self._most_records)
        return [i for i in steps if i in later][:count]
