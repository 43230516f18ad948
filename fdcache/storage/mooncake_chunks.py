"""Moving a few records at a time between host memory and Mooncake Store, each with its slot header behind it."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from operator import methodcaller

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageGoneError
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.storage.call_lane import CallLane
from fdcache.storage.connector import Outcome, RecordBatch
from fdcache.storage.mooncake_client import in_words, is_stored, outcome_of
from fdcache.storage.mooncake_keys import ObjectKeys
from fdcache.storage.mooncake_link import MooncakeLink
from fdcache.storage.record_check import RecordCheck

CHUNK = 64
"""Records of one call at most."""

Moved = tuple[NDArray[np.uint8], NDArray[np.uint64], str | None]
"""Outcomes, checksums, the first failure in words."""


class Direction:
    """Reads or writes: their lane, and the memory for the headers of one chunk."""

    def __init__(self, writing: bool) -> None:
        self.lane = CallLane("fdcache-mooncake-put" if writing else "fdcache-mooncake-get")
        self.headers = _core.HostMemory(CHUNK * SLOT_HEADER_BYTES)

    def addresses(self, count: int) -> list[int]:
        """Where the first headers lie."""
        return [self.headers.address + i * SLOT_HEADER_BYTES for i in range(count)]


class Chunks:
    """Calls that move records, once the right to make them is taken in a ``Direction``'s lane."""

    def __init__(self, link: MooncakeLink, keys: ObjectKeys, check: RecordCheck, record_bytes: int) -> None:
        self._link = link
        self._keys = keys
        self._check = check
        self._record_bytes = record_bytes

    def get(self, batch: RecordBatch, direction: Direction, deadline: float) -> Moved:
        """Read into host records and check each. Raises ``CallOverdueError`` at the deadline."""
        records = batch.records.addresses(batch.host_slots)[0]
        headers = direction.addresses(len(batch))
        for i in range(len(batch)):
            self._check.stamp_writing(batch, i)
        read = partial(
            self._link.client.batch_get_into_multi_buffers,
            self._keys.of(batch.hashes),
            *self._buffers(records, headers),
        )
        codes = direction.lane.call(read, left(deadline))
        size = self._record_bytes + SLOT_HEADER_BYTES
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
        error = self.judge(codes)
        refused = np.flatnonzero(outcomes == Outcome.CORRUPT)
        return outcomes, checksums, error or self._remove(batch.hashes[refused], deadline)

    def put(self, batch: RecordBatch, direction: Direction, deadline: float) -> Moved:
        """Store from host records. Raises ``CallOverdueError`` at the deadline."""
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
            self._keys.of(chosen.hashes),
            *self._buffers(chosen.records.addresses(chosen.host_slots)[0], headers),
        )
        codes = direction.lane.call(write, left(deadline))
        torn = []
        for i, code in zip(positions, codes, strict=True):
            if not is_stored(code):
                outcomes[i] = outcome_of(code)
            elif batch.records.header(int(batch.host_slots[i])).to_bytes() != found[i].to_bytes():
                # What was stored may be torn; whoever reads it finds out, but nobody need.
                torn.append(i)
        outcomes[torn] = Outcome.SOURCE_CHANGED
        error = self.judge([code for code in codes if not is_stored(code)])
        return outcomes, checksums, error or self._remove(batch.hashes[torn], deadline)

    def _remove(self, hashes: HashArray, deadline: float) -> str | None:
        """Remove records that are of no use; what stays is refused again."""
        if not len(hashes):
            return None
        try:
            self._link.ask(methodcaller("batch_remove", self._keys.of(hashes), True), left(deadline))
        except StorageGoneError as error:
            return str(error)
        return None

    def judge(self, codes: list[int]) -> str | None:
        """Open or close the breaker by what the store answered; returns the first failure in words."""
        failures = [code for code in codes if code < 0 and outcome_of(code) is not Outcome.MISS]
        if any(outcome_of(code) is Outcome.PEER_GONE for code in failures):
            self._link.breaker.failed(in_words(failures[0]))
        else:
            self._link.breaker.succeeded()
        return in_words(failures[0]) if failures else None

    def _buffers(
        self, records: NDArray[np.uint64], headers: list[int]
    ) -> tuple[list[list[int]], list[list[int]]]:
        pointers = [[record, header] for record, header in zip(records.tolist(), headers, strict=True)]
        return pointers, [[self._record_bytes, SLOT_HEADER_BYTES]] * len(headers)


def left(deadline: float) -> float:
    """Seconds until the deadline, 0 after it."""
    return max(deadline - time.monotonic(), 0.0)
