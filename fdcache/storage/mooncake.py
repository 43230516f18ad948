"""MooncakeConnector: blocks in Mooncake Store, one object a record, shared by every engine of the same layout.

An object is a record followed by its slot header; its key is ``fdcache/1/<fingerprint>/<rank>of<ranks>/<hash>``.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from operator import methodcaller
from typing import Any

import numpy as np

from fdcache import _core
from fdcache.errors import StorageGoneError
from fdcache.metadata import HashArray
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.call_lane import CallOverdueError, LaneBlockedError
from fdcache.storage.connector import (
    BatchResult,
    Outcome,
    RecordBatch,
    RunResult,
    StorageState,
    StorageStats,
)
from fdcache.storage.context import ConnectorContext
from fdcache.storage.mooncake_chunks import CHUNK, Chunks, Direction, left
from fdcache.storage.mooncake_client import ClientOptions, in_words, outcome_of
from fdcache.storage.mooncake_keys import ObjectKeys
from fdcache.storage.mooncake_link import MooncakeLink
from fdcache.storage.record_check import RecordCheck
from fdcache.storage.tally import StorageTally

_LOOKUP_CHUNK = 1024


class MooncakeConnector:
    """One rank's view of the store. Without a master it is off, fails fast, and comes back when there is one.

    Raises ``ConnectorNotFoundError`` without the client's package and ``StorageError`` for wrong settings.
    """

    name = "mooncake"

    def __init__(self, context: ConnectorContext) -> None:
        layout = context.layout
        self._layout = layout
        self._keys = ObjectKeys(layout, context.rank or 0)
        self._tally = StorageTally()
        tier = context.settings
        self._link = MooncakeLink(
            ClientOptions.resolve(context.mooncake, context.rank),
            CircuitBreaker(tier.retry_after),
            tier.timeout,
        )
        check = RecordCheck(layout, verify=context.verify)
        self._chunks = Chunks(self._link, self._keys, check, layout.record_bytes)
        self._directions = {writing: Direction(writing) for writing in (False, True)}
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

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        """How many of the first blocks every rank has stored."""
        deadline = time.monotonic() + timeout
        length = 0
        for first in range(0, len(hashes), _LOOKUP_CHUNK):
            part = hashes[first : first + _LOOKUP_CHUNK]
            if (reason := self._link.reach()) is not None:
                return RunResult(length, Outcome.PEER_GONE, reason)
            ask = methodcaller("batch_is_exist", self._keys.of_all_ranks(part))
            try:
                found = self._link.ask(ask, left(deadline))
            except StorageGoneError as error:
                return RunResult(length, Outcome.TIMEOUT, str(error))
            codes = np.array(found, np.int64).reshape(len(part), self._layout.tp_size)
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
                for first in range(0, len(batch), CHUNK):
                    part = slice(first, first + CHUNK)
                    if cancel is not None and cancel.is_set:
                        result.outcomes[part] = Outcome.CANCELLED
                        continue
                    if not left(deadline):
                        continue
                    if (reason := self._link.reach() or self._probe(deadline)) is not None:
                        result.outcomes[part], error = Outcome.PEER_GONE, error or reason
                        continue
                    move = self._chunks.put if writing else self._chunks.get
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
        prefix = self._keys.prefix()
        try:
            (code,) = self._link.ask(methodcaller("batch_is_exist", [prefix]), left(deadline))
        except StorageGoneError as error:
            return str(error)
        if code >= 0:
            return None
        self._link.breaker.failed(in_words(code))
        return in_words(code)

    # --- the rest -------------------------------------------------------------------------------------------

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        """Remove this rank's records."""
        if (reason := self._link.reach()) is not None:
            return BatchResult.of(len(hashes), Outcome.PEER_GONE, reason)
        try:
            codes = self._link.ask(methodcaller("batch_remove", self._keys.of(hashes), True), timeout)
        except StorageGoneError as error:
            return BatchResult.of(len(hashes), Outcome.TIMEOUT, str(error))
        result = BatchResult.of(len(hashes), Outcome.OK, self._chunks.judge(codes))
        result.outcomes[:] = [Outcome.OK if code >= 0 else outcome_of(code) for code in codes]
        return result

    def clear(self, timeout: float) -> int:
        """Remove this layout's and rank's records, nobody else's. Raises ``StorageGoneError`` without an answer."""
        if (reason := self._link.reach()) is not None:
            raise StorageGoneError(reason)
        pattern = f"^{self._keys.prefix()}.*"
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
