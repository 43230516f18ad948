"""Connector to Mooncake Store: one object per record, shared by all engines of the same layout.

An object is a record followed by its slot header. Its key is ``fdcache/1/<fingerprint>/<rank>of<ranks>/<hash>``.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageGoneError
from fdcache.integrations.mooncake.client import (
    CallLane,
    CallOverdueError,
    ClientOptions,
    LaneBlockedError,
    MooncakeClient,
    describe,
    is_stored,
    load_client,
    outcome_of,
)
from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.settings.variable import Group
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.connector import (
    BatchResult,
    ConnectorContext,
    Outcome,
    RecordBatch,
    RunResult,
    StorageCounters,
    StorageState,
    StorageStats,
    last_whole,
)
from fdcache.storage.records import RecordCheck

_LOOKUP_CHUNK = 1024
_MOVE_CHUNK = 64
"""Most keys of one look-up, and most records of one transfer."""

_Moved = tuple[NDArray[np.uint8], NDArray[np.uint64], str | None]
"""Outcomes, checksums, and the message of the first failure."""


def _settings(options: Group | None) -> MooncakeSettings:
    return options if isinstance(options, MooncakeSettings) else MooncakeSettings()


class MooncakeConnector:
    """One rank's view of the store. Without a master it is off, fails fast, and returns when the master does.

    Raises ``ConnectorNotFoundError`` without the client's package and ``StorageError`` for wrong settings.
    """

    name = "mooncake"

    def __init__(self, context: ConnectorContext) -> None:
        layout = context.layout
        self._layout = layout
        self._keys = _ObjectKeys(layout, context.rank or 0)
        self._check = RecordCheck(layout, verify=context.verify)
        self._counters = StorageCounters()
        tier = context.settings
        self._client = MooncakeClient(
            ClientOptions.resolve(_settings(context.options), context.rank),
            CircuitBreaker(tier.retry_after),
            tier.timeout,
        )
        self._reads, self._writes = _Direction("fdcache-mooncake-get"), _Direction("fdcache-mooncake-put")
        for direction in (self._reads, self._writes):
            self._client.register(direction.headers.address, direction.headers.nbytes)
        self._client.reach()

    @staticmethod
    def require(options: Group | None) -> None:
        """Raise ``StorageError`` early for settings with which no connector can ever be made."""
        load_client()
        with suppress(StorageGoneError):  # an absent master may come back
            ClientOptions.resolve(_settings(options), None)

    # --- host memory ----------------------------------------------------------------------------------------

    def register(self, records: _core.RecordTable) -> None:
        """Register the records' memory with the client, one region for each run of records."""
        for region in self._regions_of(records):
            self._client.register(*region)

    def unregister(self, records: _core.RecordTable) -> None:
        """Unregister the records' memory; no call may be using it."""
        for region in self._regions_of(records):
            self._client.unregister(*region)

    def _regions_of(self, records: _core.RecordTable) -> list[tuple[int, int]]:
        addresses = records.addresses(np.arange(records.num_slots, dtype=np.int32))[0]
        record_bytes = self._layout.record_bytes
        starts = np.flatnonzero(np.diff(addresses, prepend=addresses[:1] - 2 * record_bytes) != record_bytes)
        ends = np.append(starts[1:], len(addresses))
        return [
            (int(addresses[start]), (end - start) * record_bytes)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    # --- blocks ---------------------------------------------------------------------------------------------

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """Return the leading run of blocks that every rank has stored."""
        deadline = time.monotonic() + timeout
        length = 0
        for first in range(0, len(hashes), _LOOKUP_CHUNK):
            whole, failure = self._stored(hashes[first : first + _LOOKUP_CHUNK], deadline)
            if failure is not None:
                return replace(failure, length=length)
            run = len(whole) if whole.all() else int(np.argmin(whole))
            length += run
            if run < len(whole):
                break
        return RunResult(length)

    def last(self, hashes: HashArray, width: int, timeout: float) -> RunResult:
        """Return how many groups of blocks there are up to the last of which every rank has all stored."""
        deadline, most = time.monotonic() + timeout, max(_LOOKUP_CHUNK // width, 1) * width
        for first in range((len(hashes) - 1) // most * most, -1, -most):
            whole, failure = self._stored(hashes[first : first + most], deadline)
            if failure is not None:
                return failure
            if groups := last_whole(whole, width):
                return RunResult(first // width + groups)
        return RunResult(0)

    def _stored(self, hashes: HashArray, deadline: float) -> tuple[NDArray[np.bool_], RunResult | None]:
        """Return which blocks every rank has stored, and the failure that makes that unknown."""
        unknown = np.zeros(len(hashes), np.bool_)
        if (reason := self._client.reach()) is not None:
            return unknown, RunResult(0, Outcome.PEER_GONE, reason)
        ask = methodcaller("batch_is_exist", self._keys.of_all_ranks(hashes))
        try:
            found = self._client.ask(ask, _left(deadline))
        except StorageGoneError as error:
            return unknown, RunResult(0, Outcome.TIMEOUT, str(error))
        codes = np.array(found, np.int64).reshape(len(hashes), self._layout.record_ranks)
        if (codes < 0).any():
            code = int(codes.min())
            self._client.breaker.failed(describe(code))
            return unknown, RunResult(0, outcome_of(code), describe(code))
        self._client.breaker.succeeded()
        return np.asarray((codes == 1).all(axis=1)), None

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Read blocks directly into their host records; check each against the header that came with it."""
        return self._move(batch, timeout, cancel, writing=False)

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Store blocks directly from their host records."""
        return self._move(batch, timeout, cancel, writing=True)

    def _move(
        self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None, *, writing: bool
    ) -> BatchResult:
        deadline = time.monotonic() + timeout
        result = BatchResult.of(len(batch), Outcome.TIMEOUT)
        error: str | None = None
        unfinished: Future[Any] | None = None
        direction, move = (self._writes, self._put) if writing else (self._reads, self._get)
        try:
            with direction.lane.turn(timeout):
                for first in range(0, len(batch), _MOVE_CHUNK):
                    part = slice(first, first + _MOVE_CHUNK)
                    if cancel is not None and cancel.is_set:
                        result.outcomes[part] = Outcome.CANCELLED
                        continue
                    if not _left(deadline):
                        continue
                    if (reason := self._client.reach() or self._probe(deadline)) is not None:
                        result.outcomes[part], error = Outcome.PEER_GONE, error or reason
                        continue
                    try:
                        moved = move(batch.select(part), direction, deadline)
                    except CallOverdueError as overdue:
                        # Its memory is in use until it ends. The outcome stays TIMEOUT, even if it succeeds late.
                        unfinished, error = overdue.call, error or f"mooncake: {overdue}"
                        self._client.breaker.failed(f"mooncake: {overdue}")
                        continue
                    result.outcomes[part], result.checksums[part], message = moved
                    error = error or message
        except LaneBlockedError as blocked:
            result, error = BatchResult.of(len(batch), Outcome.PEER_GONE), f"mooncake: {blocked}"
        moved_bytes = int(result.ok.sum()) * self._layout.record_bytes
        self._counters.add(result.outcomes, moved_bytes, writing=writing)
        return BatchResult(result.outcomes, result.checksums, moved_bytes, error, unfinished)

    def _probe(self, deadline: float) -> str | None:
        """Ask the master something small before a call that uses host memory; return the failure, if any."""
        try:
            (code,) = self._client.ask(methodcaller("batch_is_exist", [self._keys.prefix()]), _left(deadline))
        except StorageGoneError as error:
            return str(error)
        if code >= 0:
            return None
        self._client.breaker.failed(describe(code))
        return describe(code)

    def _get(self, batch: RecordBatch, direction: _Direction, deadline: float) -> _Moved:
        """Read a chunk. Raises ``CallOverdueError`` at the deadline."""
        records = batch.records.addresses(batch.host_slots)[0]
        headers = direction.header_addresses(len(batch))
        for i in range(len(batch)):
            self._check.stamp_writing(batch, i)
        read = partial(
            self._client.store.batch_get_into_multi_buffers,
            self._keys.of(batch.hashes),
            *self._buffers(records, headers),
        )
        codes = direction.lane.call(read, _left(deadline))
        outcomes = np.zeros(len(batch), np.uint8)
        checksums = np.zeros(len(batch), np.uint64)
        for i, code in enumerate(codes):
            if code != self._layout.record_bytes + SLOT_HEADER_BYTES:
                outcomes[i] = outcome_of(code) if code < 0 else Outcome.CORRUPT
                continue
            header = _core.SlotHeader.from_bytes(ctypes.string_at(headers[i], SLOT_HEADER_BYTES))
            if self._check.is_intact(batch, i, header):
                checksums[i] = header.payload_checksum
                self._check.stamp_ready(batch, i, header.payload_checksum)
            else:
                outcomes[i] = Outcome.CORRUPT
        error = self._judge(codes)
        corrupt = np.flatnonzero(outcomes == Outcome.CORRUPT)
        return outcomes, checksums, error or self._discard(batch.hashes[corrupt], deadline)

    def _put(self, batch: RecordBatch, direction: _Direction, deadline: float) -> _Moved:
        """Store a chunk. Raises ``CallOverdueError`` at the deadline."""
        found = [batch.records.header(int(slot)) for slot in batch.host_slots]
        good = np.array([self._check.is_source(batch, i, found[i]) for i in range(len(batch))], np.bool_)
        outcomes = np.where(good, Outcome.OK, Outcome.SOURCE_CHANGED).astype(np.uint8)
        checksums = np.array([header.payload_checksum for header in found], np.uint64)
        if not good.any():
            return outcomes, checksums, None
        chosen = batch.select(good)
        positions = np.flatnonzero(good).tolist()
        headers = direction.header_addresses(len(chosen))
        for address, i in zip(headers, positions, strict=True):
            ctypes.memmove(address, found[i].to_bytes(), SLOT_HEADER_BYTES)
        write = partial(
            self._client.store.batch_put_from_multi_buffers,
            self._keys.of(chosen.hashes),
            *self._buffers(chosen.records.addresses(chosen.host_slots)[0], headers),
        )
        codes = direction.lane.call(write, _left(deadline))
        torn = []
        for i, code in zip(positions, codes, strict=True):
            if not is_stored(code):
                outcomes[i] = outcome_of(code)
            elif batch.records.header(int(batch.host_slots[i])).to_bytes() != found[i].to_bytes():
                # The record changed during the call. A reader would refuse it; removing it saves the read.
                torn.append(i)
        outcomes[torn] = Outcome.SOURCE_CHANGED
        error = self._judge([code for code in codes if not is_stored(code)])
        return outcomes, checksums, error or self._discard(batch.hashes[torn], deadline)

    def _buffers(
        self, records: NDArray[np.uint64], headers: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        pointers = [[record, header] for record, header in zip(records.tolist(), headers, strict=True)]
        return pointers, [[self._layout.record_bytes, SLOT_HEADER_BYTES]] * len(headers)

    def _judge(self, codes: Sequence[int]) -> str | None:
        """Open or close the breaker by the store's return codes; return the message of the first failure."""
        failures = [code for code in codes if code < 0 and outcome_of(code) is not Outcome.MISS]
        if any(outcome_of(code) is Outcome.PEER_GONE for code in failures):
            self._client.breaker.failed(describe(failures[0]))
        else:
            self._client.breaker.succeeded()
        return describe(failures[0]) if failures else None

    def _discard(self, hashes: HashArray, deadline: float) -> str | None:
        """Remove unusable records; one that cannot be removed is refused again when it is read."""
        if not len(hashes):
            return None
        try:
            self._client.ask(methodcaller("batch_remove", self._keys.of(hashes), True), _left(deadline))
        except StorageGoneError as error:
            return str(error)
        return None

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove this rank's records; MISS for records that are not stored."""
        if (reason := self._client.reach()) is not None:
            return BatchResult.of(len(hashes), Outcome.PEER_GONE, reason)
        try:
            codes = self._client.ask(methodcaller("batch_remove", self._keys.of(hashes), True), timeout)
        except StorageGoneError as error:
            return BatchResult.of(len(hashes), Outcome.TIMEOUT, str(error))
        result = BatchResult.of(len(hashes), Outcome.OK, self._judge(codes))
        result.outcomes[:] = [Outcome.OK if code >= 0 else outcome_of(code) for code in codes]
        return result

    def clear(self, timeout: float) -> int:
        """Remove this layout's and rank's records, and no others. Raises ``StorageGoneError`` without an answer."""
        if (reason := self._client.reach()) is not None:
            raise StorageGoneError(reason)
        pattern = f"^{self._keys.prefix()}.*"
        removed = self._client.ask(methodcaller("remove_by_regex", pattern, True), timeout)
        if removed < 0:
            self._client.breaker.failed(describe(removed))
            raise StorageGoneError(describe(removed))
        return int(removed)

    # --- state ----------------------------------------------------------------------------------------------

    def stats(self) -> StorageStats:
        """Return counts and state."""
        state = StorageState.READY if self._client.is_up else StorageState.OFF
        return self._counters.stats(self.name, state, self._client.breaker.reason)

    def close(self) -> None:
        """Wait for calls that use host memory, then leave the store; records in this rank's segment are lost."""
        self._reads.lane.close()
        self._writes.lane.close()
        self._client.close()


class _Direction:
    """Reads or writes: the lane of their calls, and memory for the headers of one chunk."""

    def __init__(self, name: str) -> None:
        self.lane = CallLane(name)
        self.headers = _core.HostMemory(_MOVE_CHUNK * SLOT_HEADER_BYTES)

    def header_addresses(self, count: int) -> list[int]:
        return [self.headers.address + i * SLOT_HEADER_BYTES for i in range(count)]


class _ObjectKeys:
    """Keys of one layout's records; those of ``rank`` unless another rank is given."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._fingerprint = layout.fingerprint.hex()
        self._ranks = layout.record_ranks
        self._rank = rank

    def prefix(self, rank: int | None = None) -> str:
        own = self._rank if rank is None else rank
        return f"fdcache/1/{self._fingerprint}/{own}of{self._ranks}/"

    def of(self, hashes: HashArray) -> list[str]:
        prefix = self.prefix()
        return [prefix + row.tobytes().hex() for row in hashes]

    def of_all_ranks(self, hashes: HashArray) -> list[str]:
        """Return the keys of every rank's record, block by block."""
        prefixes = [self.prefix(rank) for rank in range(self._ranks)]
        return [prefix + row.tobytes().hex() for row in hashes for prefix in prefixes]


def _left(deadline: float) -> float:
    """Seconds until the deadline, 0 after it."""
    return max(deadline - time.monotonic(), 0.0)
