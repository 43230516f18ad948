"""MooncakeConnector: blocks in Mooncake Store, one object a record, shared by every engine of the same layout.

An object is a record followed by its slot header; its key is ``fdcache/1/<fingerprint>/<rank>of<ranks>/<hash>``.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageError, StorageGoneError
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.connector import (
    BatchResult,
    Outcome,
    RecordBatch,
    RunResult,
    StorageState,
    StorageStats,
)
from fdcache.storage.context import ConnectorContext
from fdcache.storage.mooncake_client import (
    ClientOptions,
    connect,
    in_words,
    is_stored,
    outcome_of,
)
from fdcache.storage.record_check import RecordCheck

_CHUNK = 64
_LOOKUP_CHUNK = 1024
_CONNECT_SECONDS = 1.0

T = TypeVar("T")


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
        self._options = ClientOptions.resolve(context.mooncake, context.rank)
        self._breaker = CircuitBreaker(context.settings.retry_after)
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False
        self._regions: list[tuple[int, int]] = []
        self._headers = {
            writing: (_core.HostMemory(_CHUNK * SLOT_HEADER_BYTES), threading.Lock())
            for writing in (False, True)
        }
        self._asker = ThreadPoolExecutor(2, thread_name_prefix="fdcache-mooncake")
        self._counts = dict.fromkeys(
            ("hits", "misses", "corrupt", "stored", "errors", "timeouts", "peer_gone"), 0
        )
        self._bytes = {False: 0, True: 0}
        self._reach()

    # --- connection ---------------------------------------------------------------------------------------

    def _reach(self) -> str | None:
        """Make sure there is a client; returns why there is none."""
        with self._lock:
            if self._closed:
                return "mooncake: closed"
            if (reason := self._breaker.refuses()) is not None:
                return reason
            if self._client is None:
                try:
                    self._client = connect(self._options, _CONNECT_SECONDS)
                    for memory, _ in self._headers.values():
                        self._client.register_buffer(memory.address, memory.nbytes)
                    for address, nbytes in self._regions:
                        self._register(address, nbytes)
                except StorageGoneError as error:
                    self._client = None
                    self._breaker.failed(str(error))
                    return str(error)
            return None

    def register(self, records: _core.RecordTable) -> None:
        """Register the records' memory with the client, one region for each run of records."""
        with self._lock:
            for region in self._regions_of(records):
                self._regions.append(region)
                if self._client is not None:
                    self._register(*region)

    def unregister(self, records: _core.RecordTable) -> None:
        """Let the client forget the records' memory."""
        with self._lock:
            for region in self._regions_of(records):
                self._regions.remove(region)
                if self._client is not None:
                    self._client.unregister_buffer(region[0])

    def _regions_of(self, records: _core.RecordTable) -> list[tuple[int, int]]:
        addresses = records.addresses(np.arange(records.num_slots, dtype=np.int32))[0]
        record_bytes = self._layout.record_bytes
        starts = np.flatnonzero(np.diff(addresses, prepend=addresses[:1] - 2 * record_bytes) != record_bytes)
        ends = np.append(starts[1:], len(addresses))
        return [
            (int(addresses[start]), (end - start) * record_bytes)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def _register(self, address: int, nbytes: int) -> None:
        code = self._client.register_buffer(address, nbytes)
        if code:
            raise StorageError(f"mooncake: {nbytes} bytes of host records cannot be registered (code {code})")

    def _ask(self, question: Callable[[], T], timeout: float) -> T:
        """A call that touches no memory of ours, given up after ``timeout``. Raises ``TimeoutError``."""
        answer: Future[T] = self._asker.submit(question)
        return answer.result(timeout)

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
            if (reason := self._reach()) is not None:
                return RunResult(length, Outcome.PEER_GONE, reason)
            ranks = range(self._layout.tp_size)
            keys = [self.key(row.tobytes(), rank) for row in part for rank in ranks]
            try:
                found = self._ask(
                    partial(self._client.batch_is_exist, keys), max(deadline - time.monotonic(), 0.0)
                )
            except FutureTimeoutError:
                self._breaker.failed(f"mooncake: no answer within {timeout} s")
                return RunResult(length, Outcome.TIMEOUT, f"mooncake: no answer within {timeout} s")
            codes = np.array(found, np.int64).reshape(len(part), len(ranks))
            if (codes < 0).any():
                code = int(codes.min())
                self._breaker.failed(in_words(code))
                return RunResult(length, outcome_of(code), in_words(code))
            self._breaker.succeeded()
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
        memory, lock = self._headers[writing]
        with lock:
            for first in range(0, len(batch), _CHUNK):
                part = slice(first, first + _CHUNK)
                chunk = batch.select(part)
                if cancel is not None and cancel.is_set:
                    result.outcomes[part] = Outcome.CANCELLED
                    continue
                if time.monotonic() >= deadline:
                    continue
                if (reason := self._reach() or self._probe()) is not None:
                    result.outcomes[part], error = Outcome.PEER_GONE, error or reason
                    continue
                move = self._put_chunk if writing else self._get_chunk
                outcomes, checksums, message = move(chunk, memory)
                result.outcomes[part], result.checksums[part] = outcomes, checksums
                error = error or message
        return self._count(result, error, writing)

    def _probe(self) -> str | None:
        """Ask the master something small: with memory at stake a call cannot be given up when it is dead."""
        code = self._client.batch_is_exist([self._prefix(self._rank)])[0]
        if code >= 0:
            return None
        self._breaker.failed(in_words(code))
        return in_words(code)

    def _get_chunk(self, batch: RecordBatch, memory: _core.HostMemory) -> _Moved:
        records, headers = batch.records.addresses(batch.host_slots)[0], _header_addresses(memory, len(batch))
        for i in range(len(batch)):
            self._check.stamp_writing(batch, i)
        codes = self._client.batch_get_into_multi_buffers(self._keys(batch), *self._buffers(records, headers))
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
        refused = [self.key(batch.hashes[i].tobytes()) for i in np.flatnonzero(outcomes == Outcome.CORRUPT)]
        if refused:
            self._client.batch_remove(refused, True)
        return outcomes, checksums, self._judge(codes)

    def _put_chunk(self, batch: RecordBatch, memory: _core.HostMemory) -> _Moved:
        found = [batch.records.header(int(slot)) for slot in batch.host_slots]
        outcomes = np.array(
            [
                Outcome.OK if self._check.is_source(batch, i, found[i]) else Outcome.SOURCE_CHANGED
                for i in range(len(batch))
            ],
            np.uint8,
        )
        checksums = np.array([header.payload_checksum for header in found], np.uint64)
        good = np.flatnonzero(outcomes == Outcome.OK)
        if not len(good):
            return outcomes, checksums, None
        chosen = batch.select(good)
        records, headers = (
            chosen.records.addresses(chosen.host_slots)[0],
            _header_addresses(memory, len(good)),
        )
        for address, i in zip(headers, good, strict=True):
            ctypes.memmove(address, found[i].to_bytes(), SLOT_HEADER_BYTES)
        codes = self._client.batch_put_from_multi_buffers(
            self._keys(chosen), *self._buffers(records, headers)
        )
        for position, code in zip(good.tolist(), codes, strict=True):
            if not is_stored(code):
                outcomes[position] = outcome_of(code)
            elif (
                batch.records.header(int(batch.host_slots[position])).to_bytes() != found[position].to_bytes()
            ):
                # What was stored may be torn; whoever reads it finds out, but nobody need.
                self._client.remove(self.key(batch.hashes[position].tobytes()), True)
                outcomes[position] = Outcome.SOURCE_CHANGED
        return outcomes, checksums, self._judge([code for code in codes if not is_stored(code)])

    def _judge(self, codes: list[int]) -> str | None:
        """Open or close the breaker by what the store answered; returns the first failure in words."""
        failures = [code for code in codes if code < 0 and outcome_of(code) is not Outcome.MISS]
        if any(outcome_of(code) is Outcome.PEER_GONE for code in failures):
            self._breaker.failed(in_words(failures[0]))
        else:
            self._breaker.succeeded()
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
        if (reason := self._reach()) is not None:
            return BatchResult.of(len(hashes), Outcome.PEER_GONE, reason)
        keys = [self.key(row.tobytes()) for row in hashes]
        try:
            codes = self._ask(lambda: self._client.batch_remove(keys, True), timeout)
        except FutureTimeoutError:
            return BatchResult.of(len(hashes), Outcome.TIMEOUT, f"mooncake: no answer within {timeout} s")
        result = BatchResult.of(len(hashes), Outcome.OK, self._judge(codes))
        result.outcomes[:] = [Outcome.OK if code >= 0 else outcome_of(code) for code in codes]
        return result

    def clear(self, timeout: float) -> int:
        """Remove this layout's and rank's records, nobody else's. Raises ``StorageGoneError`` without an answer."""
        if (reason := self._reach()) is not None:
            raise StorageGoneError(reason)
        pattern = f"^{self._prefix(self._rank)}.*"
        try:
            removed = self._ask(lambda: self._client.remove_by_regex(pattern, True), timeout)
        except FutureTimeoutError as error:
            raise StorageGoneError(f"mooncake: no answer within {timeout} s") from error
        if removed < 0:
            self._breaker.failed(in_words(removed))
            raise StorageGoneError(in_words(removed))
        return int(removed)

    def _count(self, result: BatchResult, error: str | None, writing: bool) -> BatchResult:
        counted = np.bincount(result.outcomes, minlength=len(Outcome)).tolist()
        moved = counted[Outcome.OK] * self._layout.record_bytes
        with self._lock:
            self._counts["stored" if writing else "hits"] += counted[Outcome.OK]
            self._counts["misses"] += counted[Outcome.MISS]
            self._counts["corrupt"] += counted[Outcome.CORRUPT]
            self._counts["errors"] += counted[Outcome.ERROR] + counted[Outcome.SOURCE_CHANGED]
            self._counts["timeouts"] += counted[Outcome.TIMEOUT]
            self._counts["peer_gone"] += counted[Outcome.PEER_GONE]
            self._bytes[writing] += moved
        return BatchResult(result.outcomes, result.checksums, moved, error)

    def stats(self) -> StorageStats:
        """Counts and state."""
        with self._lock:
            reason = self._breaker.reason
            state = StorageState.READY if reason is None and self._client is not None else StorageState.OFF
            return StorageStats(
                name=self.name,
                state=state,
                error=reason,
                read_bytes=self._bytes[False],
                written_bytes=self._bytes[True],
                **self._counts,
            )

    def close(self) -> None:
        """Leave the store; what this rank's memory held of it goes with it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            client, self._client = self._client, None
        self._asker.shutdown(wait=False, cancel_futures=True)
        if client is not None:
            for address, _ in self._regions:
                client.unregister_buffer(address)
            client.close()


_Moved = tuple[NDArray[np.uint8], NDArray[np.uint64], str | None]


def _header_addresses(memory: _core.HostMemory, count: int) -> list[int]:
    return [memory.address + i * SLOT_HEADER_BYTES for i in range(count)]
