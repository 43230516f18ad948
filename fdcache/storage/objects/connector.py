"""Connectors to a bucket and to a shared folder: records in objects that all nodes with the same layout share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from fdcache._core import CancelFlag, RecordTable
from fdcache.errors import StorageGoneError
from fdcache.metadata import HashArray
from fdcache.settings.cache import FsyncPolicy
from fdcache.settings.variable import Group
from fdcache.storage.connector import (
    BatchResult,
    ConnectorContext,
    Outcome,
    RecordBatch,
    RunResult,
    StorageCounters,
    StorageState,
    StorageStats,
)
from fdcache.storage.objects.backend import (
    LAYOUT,
    ROOT,
    DamagedObjectError,
    ObjectBackend,
    ObjectExistsError,
    ObjectMissingError,
    StoreFailedError,
)
from fdcache.storage.objects.bucket import Bucket, require_bucket
from fdcache.storage.objects.calls import CallPool
from fdcache.storage.objects.catalogue import CATALOGUES, Catalogues, Pack
from fdcache.storage.objects.folder import SharedFolder
from fdcache.storage.objects.locator import Locator
from fdcache.storage.objects.outcomes import StoreHealth
from fdcache.storage.objects.pack import MOST_RECORDS, ObjectFormat
from fdcache.storage.objects.reads import BatchRead
from fdcache.storage.objects.room import Room
from fdcache.storage.objects.variables import ObjectSettings
from fdcache.storage.objects.writes import BatchWrite
from fdcache.storage.records import RecordCheck

_VERSION = 1
_GROUPS_AT_ONCE = 16


def layout_prefix(fingerprint: bytes) -> str:
    """Return what the names of a layout's objects begin with."""
    return f"{ROOT}/{_VERSION}/{fingerprint.hex()}/"


class ObjectConnector:
    """One rank's view of the objects in ``backend``. A store that fails is left alone for a while, and comes back.

    ``size``: most bytes of all objects in the store. ``most_records``: neighbouring records in one object.
    """

    def __init__(
        self,
        name: str,
        backend: ObjectBackend,
        context: ConnectorContext,
        *,
        catalogues: Catalogues = CATALOGUES,
    ) -> None:
        layout, tier = context.layout, context.settings
        self.name = name
        self._backend = backend
        self._rank = context.rank or 0
        self._timeout = tier.timeout
        self._health = StoreHealth(backend.place, tier.retry_after)
        self._counters = StorageCounters()
        self._check = RecordCheck(layout, verify=context.verify)
        self._objects = ObjectFormat(layout)
        self._most_records = min(max(tier.object_bytes // layout.record_bytes, 1), MOST_RECORDS)
        self._pool = CallPool(tier.threads, f"fdcache-{name}")
        self._ranks = [self._locator(context, rank, catalogues) for rank in range(layout.record_ranks)]
        self.room = Room(backend, tier.size, self._own.catalogue.forget)
        self._layout = layout
        self._has_layout = False
        self._closed = False
        if context.rank is not None:
            self.room.look()

    def _locator(self, context: ConnectorContext, rank: int, catalogues: Catalogues) -> Locator:
        layout = context.layout
        prefix = f"{layout_prefix(layout.fingerprint)}{rank}of{layout.record_ranks}/"
        return Locator(
            self._backend,
            self._pool,
            catalogues.of(self._backend.place, prefix),
            self._objects,
            prefix,
            self._most_records,
            self._health.breaker,
        )

    @property
    def _own(self) -> Locator:
        return self._ranks[self._rank]

    def register(self, records: RecordTable) -> None:
        """Do nothing: bytes are copied into host records, and out of them."""

    def unregister(self, records: RecordTable) -> None:
        """Do nothing, as ``register``."""

    # --- blocks ---------------------------------------------------------------------------------------------

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """Return the leading run of blocks that every rank has stored, as far as this node knows."""
        if (reason := self._refusal(writing=False)) is not None:
            return RunResult(0, Outcome.PEER_GONE, reason)
        deadline = time.monotonic() + timeout
        run = [row.tobytes() for row in hashes]
        result = RunResult(len(run))
        for locator in self._ranks:
            found = locator.find(run, deadline, only_run=True)
            length = next((i for i in range(len(run)) if i not in found.places), len(run))
            run = run[:length]
            error = found.failed.get(length)
            outcome, message = (
                (result.outcome, result.error) if error is None else self._judge(error, timeout)
            )
            result = RunResult(length, outcome, message)
        return result

    def last(self, hashes: HashArray, width: int, timeout: float) -> RunResult:
        """Return how many groups of blocks there are up to the last of which every rank has all stored.

        A few are asked for at a time, from the end downwards, by their first blocks.
        """
        if (reason := self._refusal(writing=False)) is not None:
            return RunResult(0, Outcome.PEER_GONE, reason)
        deadline = time.monotonic() + timeout
        groups = [[row.tobytes() for row in each] for each in hashes.reshape(-1, width, 32)]
        for stop in range(len(groups), 0, -_GROUPS_AT_ONCE):
            first = max(stop - _GROUPS_AT_ONCE, 0)
            begun = self._own.find([each[0] for each in groups[first:stop]], deadline, is_path=False)
            for at in sorted(begun.places, reverse=True):
                found = [locator.find(groups[first + at], deadline, only_run=True) for locator in self._ranks]
                if all(len(each.places) == width for each in found):
                    return RunResult(first + at + 1)
                begun.failed.update((at, error) for each in found for error in each.failed.values())
            if begun.failed:
                return RunResult(0, *self._judge(next(iter(begun.failed.values())), timeout))
        return RunResult(0)

    def doubt(self, hashes: HashArray) -> None:
        """Look for these blocks again: a read has not found them."""
        lost = [row.tobytes() for row in hashes]
        for locator in self._ranks:
            locator.catalogue.doubt(lost)

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Read blocks into their host records, and check each."""
        if (refused := self._refused(len(batch), cancel, writing=False)) is not None:
            return refused
        deadline = time.monotonic() + timeout
        judge = partial(self._judge, timeout=timeout)
        read = BatchRead(batch, self._backend, self._objects, self._check, judge)
        read.run(self._pool, self._own, deadline, cancel)
        if read.used:
            self._health.answered()
        self._mark_used(read.used)
        self._discard(read.corrupt, deadline)
        result = BatchResult(read.outcomes, read.checksums, error=read.error)
        return self._counted(result, int(result.ok.sum()) * self._objects.record_bytes, writing=False)

    def put(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        """Store blocks from their host records, unless they are there."""
        if (refused := self._refused(len(batch), cancel, writing=True)) is not None:
            return refused
        judge = partial(self._judge, timeout=timeout)
        write = BatchWrite(batch, self._backend, self._objects, self._check, judge)
        deadline = time.monotonic() + timeout
        write.run(self._pool, self._own, self._most_records, deadline, cancel)
        if write.used or write.nbytes:
            self._health.answered()
        if write.nbytes:
            self._health.wrote()
            self.room.wrote(write.nbytes)
            if not self._has_layout:
                self._pool.results([self._store_layout], deadline)
        elif self._health.is_full:
            self.room.is_short()
        self._mark_used(write.used)
        result = BatchResult(write.outcomes, write.checksums, error=write.error)
        return self._counted(result, write.nbytes, writing=True)

    def _store_layout(self) -> None:
        """Store the layout, for those who look into the store without an engine."""
        name = layout_prefix(self._layout.fingerprint) + LAYOUT
        text = np.frombuffer(self._layout.to_json().encode(), np.uint8)
        with suppress(StoreFailedError):
            with suppress(ObjectExistsError):
                self._backend.create(name, text)
            self._has_layout = True

    def _refusal(self, *, writing: bool) -> str | None:
        if self._closed:
            return f"{self.name}: closed"
        if self._pool.is_blocked:
            return f"{self._backend.place}: earlier calls have not returned yet"
        return self._health.refuses(writing=writing)

    def _refused(self, count: int, cancel: CancelFlag | None, *, writing: bool) -> BatchResult | None:
        if cancel is not None and cancel.is_set:
            result = BatchResult.of(count, Outcome.CANCELLED, "cancelled")
        elif (reason := self._refusal(writing=writing)) is not None:
            result = BatchResult.of(count, Outcome.PEER_GONE, reason)
        else:
            return None
        return self._counted(result, 0, writing=writing)

    def _counted(self, result: BatchResult, moved: int, *, writing: bool) -> BatchResult:
        self._counters.add(result.outcomes, moved, writing=writing)
        return BatchResult(result.outcomes, result.checksums, moved, result.error)

    def _judge(self, error: Exception, timeout: float) -> tuple[Outcome, str]:
        return self._health.judge(error, timeout)

    def _mark_used(self, packs: Iterable[Pack]) -> None:
        """Mark objects and those before them on their paths as used, unless that was done a while ago."""
        now, interval = time.monotonic(), self.room.interval
        names = [each.name for pack in packs for each in self._own.catalogue.stale_path(pack, now, interval)]
        if names:
            self.room.mark_used(names)

    # --- removal --------------------------------------------------------------------------------------------

    def _discard(self, corrupt: Sequence[tuple[str, int]], deadline: float) -> None:
        """Cut objects at their first wrong record: no path reaches those behind it."""
        first: dict[str, int] = {}
        for name, position in corrupt:
            first[name] = min(position, first.get(name, position))
        calls = [partial(self._cut, name, position) for name, position in first.items()]
        for answer in self._pool.results(calls, deadline):
            if isinstance(answer, Exception):
                self._judge(answer, self._timeout)

    def _cut(self, name: str, position: int) -> None:
        """Leave the records of an object that are before a position."""
        self._own.catalogue.forget(name)
        if not position:
            self._backend.delete([name])
            return
        with suppress(ObjectMissingError, DamagedObjectError):
            pack = self._own.look_at(name)
            kept = pack.headers[:position]
            if len(kept) == len(pack.headers):
                return  # another node was faster
            size = self._objects.size(len(kept))
            try:
                data = self._backend.read(name, 0, size)
            except DamagedObjectError:
                data = b""
            if len(data) < size:
                self._backend.delete([name])
                self._own.catalogue.forget(name)
                return
            content = np.frombuffer(data, np.uint8).copy()
            self._objects.write_page(content[: self._objects.offset(0)], kept)
            self._backend.replace(name, content)
            self._own.catalogue.enter(name, kept)

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove this rank's blocks, and those behind them in their objects; MISS for blocks that are not stored."""
        if (reason := self._refusal(writing=True)) is not None:
            return BatchResult.of(len(hashes), Outcome.PEER_GONE, reason)
        deadline = time.monotonic() + timeout
        run = [row.tobytes() for row in hashes]
        self._own.catalogue.doubt(run)
        found = self._own.find(run, deadline)
        result = BatchResult.of(len(hashes), Outcome.MISS)
        for i, error in found.failed.items():
            result.outcomes[i] = self._judge(error, timeout)[0]
        first: dict[str, int] = {}
        for pack, position in found.places.values():
            first[pack.name] = min(position, first.get(pack.name, position))
        names = list(first)
        calls = [partial(self._cut, name, first[name]) for name in names]
        answers = dict(zip(names, self._pool.results(calls, deadline), strict=True))
        for i, (pack, _) in found.places.items():
            answer = answers[pack.name]
            outcome = Outcome.OK if answer is None else self._judge(answer, timeout)[0]
            result.outcomes[i] = outcome
        return result

    def clear(self, timeout: float) -> int:
        """Remove this layout's and rank's blocks, and no others. Raises ``StorageGoneError`` without an answer."""
        if (reason := self._refusal(writing=True)) is not None:
            raise StorageGoneError(reason)
        (answer,) = self._pool.results([self._clear], time.monotonic() + timeout)
        if isinstance(answer, Exception):
            raise StorageGoneError(self._judge(answer, timeout)[1]) from answer
        return answer

    def _clear(self) -> int:
        found = list(self._backend.stored(self._own.prefix))
        self._backend.delete([each.name for each in found])
        self._own.catalogue.clear()
        return sum(self._objects.count(each.size) for each in found)

    # --- state ----------------------------------------------------------------------------------------------

    def stats(self) -> StorageStats:
        """Return counts and state."""
        health = self._health
        if health.breaker.reason is not None or self._closed:
            state = StorageState.OFF
        elif health.writes.reason is not None:
            state = StorageState.FULL if health.is_full else StorageState.READ_ONLY
        else:
            state = StorageState.READY
        return self._counters.stats(
            self.name,
            state,
            health.reason,
            store_bytes=self.room.bytes,
            store_objects=self.room.objects,
            removed_objects=self.room.removed,
        )

    def close(self) -> None:
        """Make no further calls. One that hangs is left behind: it has no host memory."""
        if not self._closed:
            self._closed = True
            self._pool.close()
            self.room.close()
            self._backend.close()


class BucketConnector(ObjectConnector):
    """A bucket of S3, Google or Azure, or a local folder. Raises ``StorageError`` for wrong settings."""

    def __init__(self, context: ConnectorContext, *, catalogues: Catalogues = CATALOGUES) -> None:
        options = context.options if isinstance(context.options, ObjectSettings) else ObjectSettings()
        backend = Bucket(options, context.settings.timeout)
        super().__init__("object", backend, context, catalogues=catalogues)

    @staticmethod
    def require(options: Group | None) -> None:
        """Raise ``StorageError`` early for settings with which no connector can ever be made."""
        require_bucket(options if isinstance(options, ObjectSettings) else ObjectSettings())


class FolderConnector(ObjectConnector):
    """A folder of a shared file system, ``FDCACHE_STORAGE_DIR``."""

    def __init__(self, context: ConnectorContext, *, catalogues: Catalogues = CATALOGUES) -> None:
        tier = context.settings
        backend = SharedFolder(tier.directory, fsync=tier.fsync is not FsyncPolicy.NEVER)
        super().__init__("shared", backend, context, catalogues=catalogues)
