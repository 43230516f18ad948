"""The service of the node under keys, for engines that keep host records themselves: bytes, faults, deadlines."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fdcache.integrations.vllm.keyed_service import KeyedService
from fdcache.integrations.vllm.keyed_storage import EndedJob
from fdcache.settings import Settings
from fdcache.storage.connector import StorageState
from tests.integration.test_keyed_storage import LAYOUT, ROW_BYTES, content, keys_of
from tests.service_help import TIMEOUT, LocalService, local_service, until

ROWS = 32


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Rows of an engine above a service, whose jobs are waited for."""

    def __init__(self, address: str, **settings: Any) -> None:
        given = {"FDCACHE_SERVER": address, "FDCACHE_RPC_TIMEOUT": 1, "FDCACHE_BLOCK_SIZE": 16, **settings}
        loaded = Settings.load(environ={}, arguments={**given, "FDCACHE_WRITE_POLICY": "write_through"})
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.clock = Clock()
        self.service = KeyedService(LAYOUT, loaded, self.rows, self.clock)
        self._number = 0

    def close(self) -> None:
        self.service.close()

    def store(self, numbers: range) -> EndedJob:
        for row, number in enumerate(numbers):
            self.rows[row] = content(number)
        self._number += 1
        self.service.store(self._number, keys_of(numbers), np.arange(len(numbers), dtype=np.int32))
        return self.ended()

    def load(self, numbers: range) -> list[bool]:
        """Return which blocks came, after a look at the bytes of all rows."""
        self.rows[:] = 0xEE
        self._number += 1
        self.service.load(self._number, keys_of(numbers), np.arange(len(numbers), dtype=np.int32))
        moved: list[bool] = self.ended().moved.tolist()
        for row, number in enumerate(numbers):
            if moved[row]:
                assert (self.rows[row] == content(number)).all(), f"block {number}"
        assert (self.rows[len(numbers) :] == 0xEE).all()
        return moved

    def ended(self) -> EndedJob:
        found: list[EndedJob] = []

        def has_ended() -> bool:
            self.clock.now += 0.01
            found.extend(self.service.take_ended())
            return bool(found)

        until(has_ended, "the job ends")
        assert [each.number for each in found] == [self._number]
        return found[0]

    def has(self, number: int) -> bool:
        return self.service.contains(keys_of([number])[0].tobytes())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path / "service", FDCACHE_HOST_MEMORY="4MiB") as service:
        yield service


def joined(service: LocalService, **settings: Any) -> Engine:
    engine = Engine(service.address, **settings)
    while not engine.store(range(900, 904)).moved.all():
        pass
    return engine


def test_engines_find_each_others_blocks_and_no_others(service: LocalService) -> None:
    first, second = joined(service), joined(service)
    assert first.store(range(8)).moved.all()
    until(lambda: second.has(7), "the service makes them findable")
    assert second.load(range(12)) == [True] * 8 + [False] * 4
    assert first.store(range(4, 10)).moved.all(), "those that are stored count as moved"
    until(lambda: second.has(9), "the service makes them findable")
    assert second.load(range(5, 12)) == [True] * 5 + [False] * 2
    first.close()
    assert second.load(range(8)) == [True] * 8
    second.close()


def test_flipped_bytes_are_not_loaded(service: LocalService) -> None:
    engine = joined(service, FDCACHE_VERIFY="all")
    engine.store(range(8))
    until(lambda: all(engine.has(number) for number in range(8)), "the service makes them findable")
    assert (
        sum(flip(path, content(3).tobytes()) for path in service.directory.iterdir() if path.is_file()) == 1
    )
    assert engine.load(range(8)) == [number != 3 for number in range(8)]
    assert engine.service.stats.corrupt == 1
    until(lambda: not engine.has(3), "nobody is promised it again")
    engine.close()


def flip(path: Path, record: bytes) -> bool:
    """Change a bit of a record in a file of the arena; return False if it is not there."""
    if path.stat().st_size < len(record):
        return False
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        place = memory.find(record)
        if place >= 0:
            memory[place + 99] ^= 4
        return place >= 0


def test_without_the_service_jobs_end_without_blocks(tmp_path: Path) -> None:
    service = LocalService(tmp_path / "service")
    engine = joined(service)
    assert engine.service.stats.state is StorageState.READY
    service.crash()
    until(lambda: not engine.has(900), "the session ends")
    until(lambda: engine.service.stats.state is StorageState.OFF, "the state says so")
    assert not engine.store(range(8)).moved.any()
    assert engine.load(range(4)) == [False] * 4
    engine.close()


def test_a_job_ends_at_its_deadline_and_its_rows_are_the_engines(service: LocalService) -> None:
    engine = joined(service)
    engine.store(range(16))
    until(lambda: engine.has(15), "the service makes them findable")
    engine.service.load(77, keys_of(range(16)), np.arange(16, dtype=np.int32))
    engine.clock.now += TIMEOUT
    ended: list[EndedJob] = []

    def has_ended() -> bool:
        ended.extend(engine.service.take_ended())
        return bool(ended)

    until(has_ended, "the job ends")
    engine.rows[:] = 0x11
    engine.service.drain()
    assert (engine.rows == 0x11).all(), "nothing is written afterwards"
    moved: NDArray[np.bool_] = ended[0].moved
    assert moved.all() or not engine.has(0), "after a deadline nothing is found for a while"
    engine.clock.now += TIMEOUT
    assert engine.load(range(16)) == [True] * 16
    engine.close()
