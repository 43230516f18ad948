"""MooncakeConnector: blocks in Mooncake Store, one object a record, shared by every engine of the same layout.

An object is a record followed by its slot header; its key is ``fdcache/1/<fingerprint>/<rank>of<ranks>/<hash>``.
"""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageGoneError
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.call_lane import CallLane, CallOverdueError, LaneBlockedError
from fdcache.storage.connector import (
    BatchResult,
    Outcome,
    RecordBatch,
    RunResult,
    StorageState,
    StorageStats,
)
from fdcache.storage.context import ConnectorContext
from fdcache.storage.mooncake_client import ClientOptions, in_words, is_stored, outcome_of
from fdcache.storage.mooncake_link import MooncakeLink
from fdcache.storage.record_check import RecordCheck
from fdcache.storage.tally import StorageTally

_CHUNK = 64
_LOOKUP_CHUNK = 1024


class MooncakeConnector:
    """One rank's view of the store. Without a master it is off, fails fast, and comes back when there is one.

    Raises ``ConnectorNotFoundError`` without the client's package and ``StorageError`` for wrong settings.
    """

    name = "mooncake"

    def __init__(self, context: ConnectorContext) -> None:
        layout = context.layout
        self._layout = layout
        self._rank = context.rank or 0
        self._check = RecordCheck(layout, verify=context.verify)
        self._tally = StorageTally()
        tier = context.settings
        self._link = MooncakeLink(
            ClientOptions.resolve(context.mooncake, context.rank),
            CircuitBreaker(tier.retry_after),
            tier.timeout,
        )
        self._directions = {writing: _Direction(writing) for writing in (False, True)}
        for direction in self._directions.values():
            self._link.register(direction.headers.address, direction.headers.nbytes)
        self._link.reach()

    def register(self, records: _core.RecordTable) -> None:
        """Register the records' memory with the client, one region for each run of records."""
        for region in self._regions_of(records):
            self._link.register(*region)

    def unregister(self, records: _core.RecordTable) -> None:
        """Let the client forget the records' memory, which no call uses any more."""
        for region in self._regions_of(records):
            self._link.unregister(*region)

    def _regions_of(self, records: _core.RecordTable) -> list[tuple[int, int]]:
        addresses = records.addresses(np.arange(records.num_slots, dtype=np.int32))[0]
        record_bytes = self._layout.record_bytes
        starts = np.flatnonzero(np.diff(addresses, prepend=addresses[:1] - 2 * record_bytes) != record_bytes)
        ends = np.append(starts[1:], len(addresses))
        return [
            (int(addresses[start]), (end - start) * record_bytes)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    # --- blocks -------------------------------------------------------------------------------------------

    def key(self, block_hash: bytes, rank: int | None = None) -> str:
        """The key of a block's record."""
        return self._prefix(self._rank if rank is None else rank) + block_hash.hex()

    def _prefix(self, rank: int) -> str:
        return f"fdcache/1/{self._layout.fingerprint.hex()}/{rank}of{self._layout.tp_size}/"

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """How many of the first blocks every rank has stored."""
        deadline = time.monotonic() + timeout
        length = 0
        for first in range(0, len(hashes), _LOOKUP_CHUNK):
            part = hashes[first : first + _LOOKUP_CHUNK]
            if (reason := self._link.reach()) is not None:
                return RunResult(length, Outcome.PEER_GONE, reason)
            ranks = range(self._layout.tp_size)
            keys = [self.key(row.tobytes(), rank) for row in part for rank in ranks]
            ask = methodcaller("batch_is_exist", keys)
            try:
                found = self._link.ask(ask, _left(deadline))
            except StorageGoneError as error:
                return RunResult(length, Outcome.TIMEOUT, str(error))
            codes = np.array(found, np.int64).reshape(len(part), len(ranks))
            if (codes < 0).any():
                code = int(codes.min())
                self._link.breaker.failed(in_words(code))
                return RunResult(length, outcome_of(code), in_words(code))
            self._link.breaker.succeeded()
            whole = (codes == 1).all(axis=1)
            run = len(part) if whole.all() else int(np.argmin(whole))
            length += run
            if run < len(part):
                break
        return RunResult(length)

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Read blocks straight into their host records, each checked against the header that came with it."""
        return self._move(batch, timeout, cancel, writing=False)

    def put(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        """Store blocks straight from their host records."""
        return self._move(batch, timeout, cancel, writing=True)

    def _move(
        self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None, *, writing: bool
    ) -> BatchResult:
        deadline = time.monotonic() + timeout
        result = BatchResult.of(len(batch), Outcome.TIMEOUT)
        error: str | None = None
        unfinished: Future[Any] | None = None
        direction = self._directions[writing]
        try:
            with direction.lane.turn(timeout):
                for first in range(0, len(batch), _CHUNK):
                    part = slice(first, first + _CHUNK)
                    if cancel is not None and cancel.is_set:
                        result.outcomes[part] = Outcome.CANCELLED
                        continue
                    if not _left(deadline):
                        continue
                    if (reason := self._link.reach() or self._probe(deadline)) is not None:
                        result.outcomes[part], error = Outcome.PEER_GONE, error or reason
                        continue
                    move = self._put_chunk if writing else self._get_chunk
                    try:
                        moved = move(batch.select(part), direction, deadline)
                    except CallOverdueError as overdue:
                        # Its memory is in use until it ends; the outcome stays TIMEOUT, whatever it does by then.
                        unfinished, error = overdue.call, error or f"mooncake: {overdue}"
                        self._link.breaker.failed(f"mooncake: {overdue}")
                        continue
                    result.outcomes[part], result.checksums[part], message = moved
                    error = error or message
        except LaneBlockedError as blocked:
            result, error = BatchResult.of(len(batch), Outcome.PEER_GONE), f"mooncake: {blocked}"
        moved_bytes = int(result.ok.sum()) * self._layout.record_bytes
        self._tally.add(result.outcomes, moved_bytes, writing=writing)
        return BatchResult(result.outcomes, result.checksums, moved_bytes, error, unfinished)

    def _probe(self, deadline: float) -> str | None:
        """Ask the master something small: with memory at stake nothing can be reused until a call has ended."""
        prefix = self._prefix(self._rank)
        try:
            (code,) = self._link.ask(methodcaller("batch_is_exist", [prefix]), _left(deadline))
        except StorageGoneError as error:
            return str(error)
        if code >= 0:
            return None
        self._link.breaker.failed(in_words(code))
        return in_words(code)

    def _get_chunk(self, batch: RecordBatch, direction: _Direction, deadline: float) -> _Moved:
        records = batch.records.addresses(batch.host_slots)[0]
        headers = direction.addresses(len(batch))
        for i in range(len(batch)):
            self._check.stamp_writing(batch, i)
        read = partial(
            self._link.client.batch_get_into_multi_buffers,
            self._keys(batch),
            *self._buffers(records, headers),
        )
        codes = direction.lane.call(read, _left(deadline))
        size = self._layout.record_bytes + SLOT_HEADER_BYTES
        outcomes = np.zeros(len(batch), np.uint8)
        checksums = np.zeros(len(batch), np.uint64)
        for i, code in enumerate(codes):
            if code != size:
                outcomes[i] = outcome_of(code) if code < 0 else Outcome.CORRUPT
                continue
            header = _core.SlotHeader.from_bytes(ctypes.string_at(headers[i], SLOT_HEADER_BYTES))
            if self._check.is_intact(batch, i, header):
                checksums[i] = header.payload_checksum
                self._check.stamp_ready(batch, i, header.payload_checksum)
            else:
                outcomes[i] = Outcome.CORRUPT
        error = self._judge(codes)
        refused = np.flatnonzero(outcomes == Outcome.CORRUPT)
        return outcomes, checksums, error or self._remove(batch.hashes[refused], deadline)

    def _put_chunk(self, batch: RecordBatch, direction: _Direction, deadline: float) -> _Moved:
        found = [batch.records.header(int(slot)) for slot in batch.host_slots]
        good = np.array([self._check.is_source(batch, i, found[i]) for i in range(len(batch))], np.bool_)
        outcomes = np.where(good, Outcome.OK, Outcome.SOURCE_CHANGED).astype(np.uint8)
        checksums = np.array([header.payload_checksum for header in found], np.uint64)
        if not good.any():
            return outcomes, checksums, None
        chosen = batch.select(good)
        positions = np.flatnonzero(good).tolist()
        headers = direction.addresses(len(chosen))
        for address, i in zip(headers, positions, strict=True):
            ctypes.memmove(address, found[i].to_bytes(), SLOT_HEADER_BYTES)
        write = partial(
            self._link.client.batch_put_from_multi_buffers,
            self._keys(chosen),
            *self._buffers(chosen.records.addresses(chosen.host_slots)[0], headers),
        )
        codes = direction.lane.call(write, _left(deadline))
        torn = []
        for i, code in zip(positions, codes, strict=True):
            if not is_stored(code):
                outcomes[i] = outcome_of(code)
            elif batch.records.header(int(batch.host_slots[i])).to_bytes() != found[i].to_bytes():
                # What was stored may be torn; whoever reads it finds out, but nobody need.
                torn.append(i)
        outcomes[torn] = Outcome.SOURCE_CHANGED
        error = self._judge([code for code in codes if not is_stored(code)])
        return outcomes, checksums, error or self._remove(batch.hashes[torn], deadline)

    def _remove(self, hashes: HashArray, deadline: float) -> str | None:
        """Remove records that are of no use; what stays is refused again."""
        if not len(hashes):
            return None
        keys = [self.key(row.tobytes()) for row in hashes]
        try:
            self._link.ask(methodcaller("batch_remove", keys, True), _left(deadline))
        except StorageGoneError as error:
            return str(error)
        return None

    def _judge(self, codes: list[int]) -> str | None:
        """Open or close the breaker by what the store answered; returns the first failure in words."""
        failures = [code for code in codes if code < 0 and outcome_of(code) is not Outcome.MISS]
        if any(outcome_of(code) is Outcome.PEER_GONE for code in failures):
            self._link.breaker.failed(in_words(failures[0]))
        else:
            self._link.breaker.succeeded()
        return in_words(failures[0]) if failures else None

    def _keys(self, batch: RecordBatch) -> list[str]:
        return [self.key(row.tobytes()) for row in batch.hashes]

    def _buffers(
        self, records: NDArray[np.uint64], headers: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        pointers = [[record, header] for record, header in zip(records.tolist(), headers, strict=True)]
        return pointers, [[self._layout.record_bytes, SLOT_HEADER_BYTES]] * len(headers)

    # --- the rest -------------------------------------------------------------------------------------------

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove this rank's records."""
        if (reason := self._link.reach()) is not None:
            return BatchResult.of(len(hashes), Outcome.PEER_GONE, reason)
        keys = [self.key(row.tobytes()) for row in hashes]
        try:
            codes = self._link.ask(methodcaller("batch_remove", keys, True), timeout)
        except StorageGoneError as error:
            return BatchResult.of(len(hashes), Outcome.TIMEOUT, str(error))
        result = BatchResult.of(len(hashes), Outcome.OK, self._judge(codes))
        result.outcomes[:] = [Outcome.OK if code >= 0 else outcome_of(code) for code in codes]
        return result

    def clear(self, timeout: float) -> int:
        """Remove this layout's and rank's records, nobody else's. Raises ``StorageGoneError`` without an answer."""
        if (reason := self._link.reach()) is not None:
            raise StorageGoneError(reason)
        pattern = f"^{self._prefix(self._rank)}.*"
        removed = self._link.ask(methodcaller("remove_by_regex", pattern, True), timeout)
        if removed < 0:
            self._link.breaker.failed(in_words(removed))
            raise StorageGoneError(in_words(removed))
        return int(removed)

    def stats(self) -> StorageStats:
        """Counts and state."""
        state = StorageState.READY if self._link.is_up else StorageState.OFF
        return self._tally.stats(self.name, state, self._link.breaker.reason)

    def close(self) -> None:
        """Leave the store, once no call uses our memory; what this rank's memory held of it goes with it."""
        for direction in self._directions.values():
            direction.lane.close()
        self._link.close()


class _Direction:
    """Reads or writes: their lane, and the memory for the headers of one chunk."""

    def __init__(self, writing: bool) -> None:
        self.lane = CallLane("fdcache-mooncake-put" if writing else "fdcache-mooncake-get")
        self.headers = _core.HostMemory(_CHUNK * SLOT_HEADER_BYTES)

    def addresses(self, count: int) -> list[int]:
        """Where the first headers lie."""
        return [self.headers.address + i * SLOT_HEADER_BYTES for i in range(count)]


_Moved = tuple[NDArray[np.uint8], NDArray[np.uint64], str | None]
"""Outcomes, checksums, the first failure in words."""


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
