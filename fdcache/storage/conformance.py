"""What every storage connector must do, as a pytest suite.

A test module of yours subclasses ``ConnectorConformance`` and says how a connector is made::

    from fdcache.storage.conformance import ConnectorConformance

    class TestMyConnector(ConnectorConformance):
        @pytest.fixture
        def open_connector(self):
            return lambda layout, rank: MyConnector(...)

``open_connector(layout, rank)`` may be called several times in one test; each call gives a connector to the same
storage. Everything it opens is closed by the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.storage.conformance_records import READY, HostRecords, conformance_layout, path_of
from fdcache.storage.connector import (
    BatchResult,
    Outcome,
    StorageConnector,
    StorageState,
    StorageStats,
)

__all__ = ["ConnectorConformance", "HostRecords", "conformance_layout", "path_of"]

_TIMEOUT = 30.0

OpenConnector = Callable[[KVLayout, int], StorageConnector]


class ConnectorConformance:
    """The tests. Subclasses give the fixture ``open_connector``."""

    blocks = 20

    @pytest.fixture
    def open_connector(self) -> OpenConnector:
        """How a connector is made; to be given by the subclass."""
        raise NotImplementedError("give the fixture open_connector")

    @contextmanager
    def _connected(
        self, open_connector: OpenConnector, layout: KVLayout, rank: int = 0
    ) -> Iterator[tuple[Any, HostRecords]]:
        connector = open_connector(layout, rank)
        records = HostRecords(layout, 2 * self.blocks)
        try:
            connector.register(records.table)
            connector.clear(_TIMEOUT)
            yield connector, records
        finally:
            connector.close()

    def test_is_a_connector(self, open_connector: OpenConnector) -> None:
        """It has every method, and stats say that it is ready."""
        with self._connected(open_connector, conformance_layout()) as (connector, _):
            assert isinstance(connector, StorageConnector)
            stats = connector.stats()
            assert isinstance(stats, StorageStats)
            assert stats.name == connector.name
            assert stats.state is StorageState.READY

    def test_what_was_put_comes_back(self, open_connector: OpenConnector) -> None:
        """Every byte, the header stamped, the checksum told."""
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
        """A miss is no error, and leaves nothing that looks ready."""
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            records.wipe()
            read = connector.get(records.batch(path_of(3, "never")), _TIMEOUT)
            assert _outcomes(read) == [Outcome.MISS] * 3
            assert all(records.table.header(slot).state != READY for slot in range(3))

    def test_a_batch_has_an_outcome_for_each_block(self, open_connector: OpenConnector) -> None:
        """Hits and misses of one batch do not touch each other."""
        hashes = path_of(self.blocks, "mixed")
        half = self.blocks // 2
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            connector.put(records.fill(hashes[:half]), _TIMEOUT)
            records.wipe()
            read = connector.get(records.batch(hashes), _TIMEOUT)
            assert _outcomes(read) == [Outcome.OK] * half + [Outcome.MISS] * (self.blocks - half)
            assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(half))

    def test_exists_is_the_leading_run(self, open_connector: OpenConnector) -> None:
        """Blocks behind a gap do not count."""
        hashes = path_of(self.blocks, "run")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            assert connector.exists(hashes, _TIMEOUT).length == 0
            connector.put(records.fill(hashes[: self.blocks // 2]), _TIMEOUT)
            found = connector.exists(hashes, _TIMEOUT)
            assert (found.length, found.outcome) == (self.blocks // 2, Outcome.OK)
            assert connector.exists(path_of(1, "no such"), _TIMEOUT).length == 0
            assert connector.exists(hashes[:0], _TIMEOUT).length == 0

    def test_putting_twice_is_ok(self, open_connector: OpenConnector) -> None:
        """A block that is there already counts as stored."""
        hashes = path_of(4, "twice")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            for _ in range(2):
                assert _outcomes(connector.put(records.fill(hashes), _TIMEOUT)) == [Outcome.OK] * 4

    def test_a_record_that_is_another_block_is_not_stored(self, open_connector: OpenConnector) -> None:
        """The header of the record decides, not the caller's word."""
        hashes = path_of(3, "source")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            batch = records.fill(hashes)
            records.table.set_header(2, records.table.header(1))
            stored = connector.put(batch, _TIMEOUT)
            assert _outcomes(stored) == [Outcome.OK, Outcome.OK, Outcome.SOURCE_CHANGED]
            assert connector.exists(hashes, _TIMEOUT).length == 2

    def test_delete_removes_what_is_named(self, open_connector: OpenConnector) -> None:
        """The last block goes, those above it stay; a second time it is a miss."""
        hashes = path_of(4, "delete")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            connector.put(records.fill(hashes), _TIMEOUT)
            assert _outcomes(connector.delete(hashes[3:], _TIMEOUT)) == [Outcome.OK]
            assert connector.exists(hashes, _TIMEOUT).length == 3
            assert _outcomes(connector.delete(hashes[3:], _TIMEOUT)) == [Outcome.MISS]

    def test_clear_keeps_to_its_namespace(self, open_connector: OpenConnector) -> None:
        """Another layout's blocks with the same hashes stay, and were never mixed up."""
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
        """The same hash is another record on another rank."""
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
        """A cancel before the call takes all of it back."""
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
        """With no time left nothing is moved, and nothing is called a miss."""
        hashes = path_of(3, "late")
        with self._connected(open_connector, conformance_layout()) as (connector, records):
            connector.put(records.fill(hashes), _TIMEOUT)
            records.wipe()
            assert _outcomes(connector.get(records.batch(hashes), 0.0)) == [Outcome.TIMEOUT] * 3

    def test_closing_twice_is_harmless(self, open_connector: OpenConnector) -> None:
        """And calls after it fail as values."""
        connector = open_connector(conformance_layout(), 0)
        records = HostRecords(conformance_layout(), 2)
        connector.close()
        connector.close()
        assert not connector.get(records.batch(path_of(2, "closed")), _TIMEOUT).ok.any()


def _outcomes(result: BatchResult) -> list[Outcome]:
    return [Outcome(value) for value in result.outcomes.tolist()]
