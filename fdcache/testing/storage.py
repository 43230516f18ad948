"""Test suite that every storage connector must pass, and host records with known bytes to test one with.

    from fdcache.testing.storage import ConnectorConformance

    class TestMyConnector(ConnectorConformance):
        @pytest.fixture
        def open_connector(self):
            return lambda layout, rank: MyConnector(...)

``open_connector(layout, rank)`` may be called several times in one test; each call returns a connector to the same
storage. The suite closes every connector that it opens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.metadata import SLOT_HEADER_BYTES, HashArray
from fdcache.storage.connector import (
    BatchResult,
    FindsLast,
    Outcome,
    RecordBatch,
    RunResult,
    StorageConnector,
    StorageState,
    StorageStats,
)

__all__ = ["ConnectorConformance", "KnownRecords", "conformance_layout", "path_of"]

_TIMEOUT = 30.0
_READY = 2

OpenConnector = Callable[[KVLayout, int], StorageConnector]


class ConnectorConformance:
    """The tests. A subclass defines the fixture ``open_connector``."""

    blocks = 20

    @pytest.fixture
    def open_connector(self) -> OpenConnector:
        """Return a function that opens a connector; the subclass defines it."""
        raise NotImplementedError("define the fixture open_connector")

    @contextmanager
    def _connected(
        self, open_connector: OpenConnector, layout: KVLayout, rank: int = 0
    ) -> Iterator[tuple[Any, KnownRecords]]:
        connector = open_connector(layout, rank)
        records = KnownRecords(layout, 2 * self.blocks)
        try:
            connector.register(records.table)
            connector.clear(_TIMEOUT)
            yield connector, records
        finally:
            connector.close()

    def test_is_a_connector(self, open_connector: OpenConnector) -> None:
        """Every method exists, and the statistics report a ready storage."""
        with self._connected(open_connector, conformance_layout()) as (connector, _):
            assert isinstance(connector, StorageConnector)
            stats = connector.stats()
            assert isinstance(stats, StorageStats)
            assert stats.name == connector.name
            assert stats.state is StorageState.READY

    def test_what_was_put_comes_back(self, open_connector: OpenConnector) -> None:
        """A get restores every byte, stamps the header and returns the checksum."""
        hashes = path_of(self.blocks, "back")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            stored = connector.put(records.fill(hashes), _TIMEOUT)
            assert _outcomes(stored) == [Outcome.OK] * self.blocks
            checksums = [records.table.header(slot).payload_checksum for slot in range(self.blocks)]
            records.wipe()
            read = connector.get(records.batch(hashes), _TIMEOUT)
            assert _outcomes(read) == [Outcome.OK] * self.blocks
            assert all(records.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))
            assert read.checksums.tolist() == checksums
            assert connector.stats().hits >= self.blocks

    def test_what_was_never_put_is_a_miss(self, open_connector: OpenConnector) -> None:
        """A miss is not an error, and leaves no header that looks ready."""
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            records.wipe()
            read = connector.get(records.batch(path_of(3, "never")), _TIMEOUT)
            assert _outcomes(read) == [Outcome.MISS] * 3
            assert all(records.table.header(slot).state != _READY for slot in range(3))

    def test_a_batch_has_an_outcome_for_each_block(self, open_connector: OpenConnector) -> None:
        """Hits and misses of one batch are independent."""
        hashes = path_of(self.blocks, "mixed")
        half = self.blocks // 2
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            connector.put(records.fill(hashes[:half]), _TIMEOUT)
            records.wipe()
            read = connector.get(records.batch(hashes), _TIMEOUT)
            assert _outcomes(read) == [Outcome.OK] * half + [Outcome.MISS] * (self.blocks - half)
            assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(half))

    def test_exists_is_the_leading_run(self, open_connector: OpenConnector) -> None:
        """Blocks after a gap do not count."""
        hashes = path_of(self.blocks, "run")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            assert connector.exists(hashes, _TIMEOUT).length == 0
            connector.put(records.fill(hashes[: self.blocks // 2]), _TIMEOUT)
            found = connector.exists(hashes, _TIMEOUT)
            assert (found.length, found.outcome) == (self.blocks // 2, Outcome.OK)
            assert connector.exists(path_of(1, "no such"), _TIMEOUT).length == 0
            assert connector.exists(hashes[:0], _TIMEOUT).length == 0

    def test_last_is_the_last_whole_group(self, open_connector: OpenConnector) -> None:
        """Groups before a gap count where a connector can be asked by position, and no others do."""
        hashes = path_of(self.blocks // 2 * 2, "last")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            by_position = connector
            if not isinstance(by_position, FindsLast):
                pytest.skip("this connector is not asked by position")
            assert by_position.last(hashes, 2, _TIMEOUT) == RunResult(0)
            stored = np.concatenate((hashes[:1], hashes[4:6]))
            connector.put(records.fill(stored), _TIMEOUT)
            assert by_position.last(hashes, 2, _TIMEOUT) == RunResult(3)
            assert by_position.last(hashes[:4], 2, _TIMEOUT) == RunResult(0)
            assert by_position.last(hashes[:0], 2, _TIMEOUT) == RunResult(0)

    def test_putting_twice_is_ok(self, open_connector: OpenConnector) -> None:
        """A block that is stored already counts as stored."""
        hashes = path_of(4, "twice")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            for _ in range(2):
                assert _outcomes(connector.put(records.fill(hashes), _TIMEOUT)) == [Outcome.OK] * 4

    def test_a_record_that_is_another_block_is_not_stored(self, open_connector: OpenConnector) -> None:
        """The header of the host record is compared with the hash in the batch."""
        hashes = path_of(3, "source")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            batch = records.fill(hashes)
            records.table.set_header(2, records.table.header(1))
            stored = connector.put(batch, _TIMEOUT)
            assert _outcomes(stored) == [Outcome.OK, Outcome.OK, Outcome.SOURCE_CHANGED]
            assert connector.exists(hashes, _TIMEOUT).length == 2

    def test_delete_removes_what_is_named(self, open_connector: OpenConnector) -> None:
        """Only the named block is removed; removing it again is a miss."""
        hashes = path_of(4, "delete")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            connector.put(records.fill(hashes), _TIMEOUT)
            assert _outcomes(connector.delete(hashes[3:], _TIMEOUT)) == [Outcome.OK]
            assert connector.exists(hashes, _TIMEOUT).length == 3
            assert _outcomes(connector.delete(hashes[3:], _TIMEOUT)) == [Outcome.MISS]

    def test_clear_keeps_to_its_namespace(self, open_connector: OpenConnector) -> None:
        """Another layout's blocks with the same hashes are kept apart, and stay."""
        hashes = path_of(5, "clear")
        mine, other = conformance_layout("mine"), conformance_layout("other")
        with (
            self._connected(open_connector, mine) as (first, records),
            self._connected(open_connector, other) as (second, others),
        ):
            first.put(records.fill(hashes), _TIMEOUT)
            assert second.exists(hashes, _TIMEOUT).length == 0
            second.put(others.fill(hashes), _TIMEOUT)
            assert first.clear(_TIMEOUT) >= 5
            assert first.exists(hashes, _TIMEOUT).length == 0
            others.wipe()
            assert _outcomes(second.get(others.batch(hashes), _TIMEOUT)) == [Outcome.OK] * 5
            assert all(others.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))

    def test_ranks_do_not_see_each_others_records(self, open_connector: OpenConnector) -> None:
        """Each rank has its own record of a hash."""
        layout = conformance_layout("ranks", tp_size=2)
        hashes = path_of(3, "ranks")
        with (
            self._connected(open_connector, layout, 0) as (first, records),
            self._connected(open_connector, layout, 1) as (second, others),
        ):
            first.put(records.fill(hashes), _TIMEOUT)
            others.wipe()
            assert _outcomes(second.get(others.batch(hashes), _TIMEOUT)) == [Outcome.MISS] * 3
            second.put(others.fill(hashes), _TIMEOUT)
            assert first.exists(hashes, _TIMEOUT).length == 3

    def test_a_cancelled_batch_moves_nothing(self, open_connector: OpenConnector) -> None:
        """A batch cancelled before the call moves nothing."""
        hashes = path_of(3, "cancel")
        cancel = _core.CancelFlag()
        cancel.set()
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            assert _outcomes(connector.put(records.fill(hashes), _TIMEOUT, cancel)) == [Outcome.CANCELLED] * 3
            assert connector.exists(hashes, _TIMEOUT).length == 0
            connector.put(records.fill(hashes), _TIMEOUT)
            records.wipe()
            read = connector.get(records.batch(hashes), _TIMEOUT, cancel)
            assert _outcomes(read) == [Outcome.CANCELLED] * 3

    def test_a_passed_deadline_is_a_timeout(self, open_connector: OpenConnector) -> None:
        """After the deadline nothing is moved, and no block is reported as a miss."""
        hashes = path_of(3, "late")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            connector.put(records.fill(hashes), _TIMEOUT)
            records.wipe()
            assert _outcomes(connector.get(records.batch(hashes), 0.0)) == [Outcome.TIMEOUT] * 3

    def test_closing_twice_is_harmless(self, open_connector: OpenConnector) -> None:
        """Calls after it return failures, and raise nothing."""
        connector = open_connector(conformance_layout(), 0)
        records = KnownRecords(conformance_layout(), 2)
        connector.close()
        connector.close()
        assert not connector.get(records.batch(path_of(2, "closed")), _TIMEOUT).ok.any()


def _outcomes(result: BatchResult) -> list[Outcome]:
    return [Outcome(value) for value in result.outcomes.tolist()]


def conformance_layout(model: str = "conformance", tp_size: int = 1) -> KVLayout:
    """Return a small layout of several planes."""
    return KVLayout.uniform(
        block_size=16,
        kv_heads=2,
        head_dim=16,
        dtype="bfloat16",
        model=model,
        revision="1",
        num_layers=3,
        tp_size=tp_size,
    )


def path_of(count: int, name: str) -> HashArray:
    """Return the hashes of one path's blocks."""
    rows, parent = [], name.encode()
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        rows.append(parent)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(count, 32)


class KnownRecords:
    """Host records with bytes derived from the hash of their block."""

    def __init__(self, layout: KVLayout, count: int) -> None:
        self.layout = layout
        self._memory = _core.HostMemory(count * layout.record_bytes)
        self._headers = _core.HostMemory(count * SLOT_HEADER_BYTES)
        self.table = _core.RecordTable(
            [self._memory.address],
            count,
            layout.record_bytes,
            [self._headers.address],
            count,
            (self._memory, self._headers),
        )

    def content(self, block_hash: bytes) -> NDArray[np.uint8]:
        """Return the bytes of a block's record."""
        record = np.zeros(self.layout.record_bytes, np.uint8)
        random = np.random.default_rng(int.from_bytes(block_hash[:8], "little"))
        for plane in self.layout.planes:
            end = plane.offset + plane.nbytes
            record[plane.offset : end] = random.integers(0, 256, plane.nbytes, np.uint8)
        return record

    def fill(self, hashes: HashArray) -> RecordBatch:
        """Fill records 0, 1, ... with these blocks of one path; return their batch."""
        batch = self.batch(hashes)
        for slot, (row, parent) in enumerate(zip(batch.hashes, batch.parents, strict=True)):
            self.put_block(slot, 1, row.tobytes(), parent.tobytes())
        return batch

    def put_block(self, slot: int, generation: int, block_hash: bytes, parent: bytes) -> None:
        """Fill a record with this block."""
        planes = self.layout.planes
        record = self.table.record(slot)
        record[:] = self.content(block_hash)
        checksum = _core.record_checksum(
            record, [plane.offset for plane in planes], [plane.nbytes for plane in planes]
        )
        header = _core.SlotHeader(
            _READY,
            generation,
            block_hash,
            parent,
            self.layout.fingerprint,
            self.layout.payload_bytes,
            checksum,
        )
        self.table.set_header(slot, header)

    def wipe(self) -> None:
        """Overwrite all records and clear their headers."""
        for slot in range(self.table.num_slots):
            self.wipe_block(slot)

    def wipe_block(self, slot: int) -> None:
        """Overwrite a record and clear its header."""
        self.table.record(slot)[:] = 0xA5
        self.table.set_header(slot, _core.SlotHeader.from_bytes(bytes(SLOT_HEADER_BYTES)))

    def batch(self, hashes: HashArray) -> RecordBatch:
        """Return a batch of records 0, 1, ... for these blocks of one path."""
        count = len(hashes)
        return RecordBatch(
            records=self.table,
            host_slots=np.arange(count, dtype=np.int32),
            host_generations=np.ones(count, np.uint32),
            hashes=hashes,
            parents=np.concatenate((np.zeros((1, 32), np.uint8), hashes[:-1])),
        )

    def holds(self, slot: int, block_hash: bytes) -> bool:
        """Return True when a record is stamped as this block and has its bytes."""
        header = self.table.header(slot)
        stamped = header.is_valid and header.state == _READY and header.hash == block_hash
        return stamped and bool((self.table.record(slot) == self.content(block_hash)).all())
