"""Tiers under keys, of an engine that keeps host records itself: bytes, bounds, faults, deadlines, restarts.

Below the rows is a file or the service of the node; what both promise is asked of both.
"""

from __future__ import annotations

import itertools
import mmap
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fdcache.errors import ConfigurationError
from fdcache.integrations.vllm.keyed_tiers import EndedJob, KeyedTiers
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.service.client import session_keeper
from fdcache.settings import Settings
from fdcache.storage.connector import StorageState
from tests import preload
from tests.service_help import TIMEOUT, LocalService, local_service, until

ROW_BYTES = 8192
LAYOUT = KVLayout.build(
    [PlaneSpec(PlaneKind.KEY, "uint8", (ROW_BYTES,))], model="m", revision="1", block_size=16, num_layers=1
)
ROWS = 32
Numbers = list[int] | range


def keys_of(numbers: Numbers) -> NDArray[np.uint8]:
    return np.array([np.random.default_rng(number).integers(0, 256, 32, np.uint8) for number in numbers])


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1000 + number).integers(0, 256, ROW_BYTES, np.uint8)


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Rows of an engine above the tiers, whose jobs are waited for."""

    def __init__(self, given: dict[str, Any], rows: int = ROWS, **clock: Any) -> None:
        self.rows = np.zeros((rows, ROW_BYTES), np.uint8)
        self.tiers = KeyedTiers(LAYOUT, Settings.load(environ={}, arguments=given), self.rows, **clock)
        self._number = 0

    def close(self) -> None:
        self.tiers.close()

    def store(self, numbers: Numbers, first: int = 0) -> EndedJob:
        rows = np.arange(first, first + len(numbers), dtype=np.int32)
        for row, number in zip(rows, numbers, strict=True):
            self.rows[row] = content(number)
        self._number += 1
        self.tiers.store(self._number, keys_of(numbers), rows)
        return self.ended()

    def load(self, numbers: Numbers, first: int = 0) -> EndedJob:
        """Return the end of a load, after a look at the bytes of its rows and of those beside them."""
        rows = np.arange(first, first + len(numbers), dtype=np.int32)
        self.rows[:] = 0xEE
        self._number += 1
        self.tiers.load(self._number, keys_of(numbers), rows)
        ended = self.ended()
        for row, number, moved in zip(rows, numbers, ended.moved, strict=True):
            assert not moved or (self.rows[row] == content(number)).all(), f"block {number}"
        assert (np.delete(self.rows, rows, axis=0) == 0xEE).all(), "rows of others"
        assert ended.nbytes == ROW_BYTES * np.count_nonzero(ended.moved)
        return ended

    def loads(self, numbers: Numbers) -> list[bool]:
        """Return which of these blocks are loaded."""
        moved: list[bool] = self.load(numbers).moved.tolist()
        return moved

    def ended(self) -> EndedJob:
        found: list[EndedJob] = []

        def has_ended() -> bool:
            found.extend(self.tiers.take_ended())
            return bool(found)

        until(has_ended, "the job ends")
        assert [each.number for each in found] == [self._number]
        return found[0]

    def has(self, number: int) -> bool:
        return self.tiers.contains(keys_of([number])[0].tobytes())


class ClockedEngine(Engine):
    """An engine whose time passes while it waits, and as the test says."""

    tick = 0.01

    def __init__(self, given: dict[str, Any]) -> None:
        self.clock = Clock()
        super().__init__(given, clock=self.clock)

    def ended(self) -> EndedJob:
        found: list[EndedJob] = []

        def has_ended() -> bool:
            self.clock.now += self.tick
            found.extend(self.tiers.take_ended())
            return bool(found)

        until(has_ended, "the job ends")
        return found[0]


def file_in(folder: Path, slots: int = 16, **changes: Any) -> dict[str, Any]:
    """Settings of a file of so many slots."""
    size = slots * (ROW_BYTES + 128) + 65536
    named = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": folder, "FDCACHE_STORAGE_SIZE": size}
    return {**named, **changes}


def with_file(folder: Path, slots: int = 16, rows: int = ROWS, **changes: Any) -> Engine:
    return Engine(file_in(folder, slots, **changes), rows)


def with_service(service: LocalService, **settings: Any) -> ClockedEngine:
    """An engine that has begun its session: its first blocks are stored."""
    named = {"FDCACHE_SERVER": service.address, "FDCACHE_RPC_TIMEOUT": 1, "FDCACHE_BLOCK_SIZE": 16}
    engine = ClockedEngine({**named, **settings})
    while not engine.store(range(900, 904)).moved.all():
        pass
    return engine


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path / "service", FDCACHE_HOST_MEMORY="4MiB") as service:
        yield service


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = with_file(tmp_path)
    yield engine
    engine.close()


# --- what file and service promise alike --------------------------------------------------------------------


@pytest.fixture(params=["file", "service"])
def roomy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An engine with room for all that its test stores."""
    if request.param == "file":
        engine = with_file(tmp_path, slots=2000)
    else:
        engine = with_service(request.getfixturevalue("service"), FDCACHE_PLAN_TIMEOUT=10 * TIMEOUT)
        engine.tick = 0.1  # what is missing is waited for FDCACHE_RPC_TIMEOUT
    yield engine
    engine.close()


def until_findable(engine: Engine, number: int) -> None:
    until(lambda: engine.has(number), "it is findable")


def test_blocks_come_back_into_other_rows(roomy: Engine) -> None:
    assert roomy.store(range(8)).moved.all()
    for number in (5, 2, 7):
        until_findable(roomy, number)
    assert roomy.load([5, 2, 7], first=20).moved.all()


def test_what_is_missing_leaves_its_row_alone(roomy: Engine) -> None:
    assert roomy.store([1, 3]).moved.all()
    until_findable(roomy, 1)
    until_findable(roomy, 3)
    assert roomy.loads([0, 1, 2, 3]) == [False, True, False, True]
    assert (roomy.rows[[0, 2]] == 0xEE).all()
    assert roomy.loads([8, 9]) == [False, False]


def test_what_is_stored_is_not_copied_again(roomy: Engine) -> None:
    roomy.store(range(4))
    ended = roomy.store(range(6))
    assert ended.moved.all() and ended.nbytes == 2 * ROW_BYTES


def test_rows_in_flight_are_at_most_half(roomy: Engine) -> None:
    assert not roomy.store(range(ROWS // 2 + 1)).moved.any()
    assert roomy.store(range(ROWS // 2)).moved.all()


def test_jobs_end_in_drain(roomy: Engine) -> None:
    for number in range(4):
        roomy.rows[number] = content(number)
    for number in range(4):
        roomy.tiers.store(number, keys_of([number]), np.array([number], np.int32))
    roomy.tiers.drain()
    assert {each.number for each in roomy.tiers.take_ended()} == set(range(4))
    assert roomy.tiers.is_idle


Operation = tuple[bool, list[int]]
_HISTORIES = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 20), min_size=1, max_size=10, unique=True)), max_size=12
)
_ALIKE = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_examples = itertools.count(1)


@_ALIKE
@given(_HISTORIES)
def test_every_history_ends_alike_whatever_is_below(roomy: Engine, history: list[Operation]) -> None:
    first = 10_000 * next(_examples)  # what earlier examples stored is of other keys
    stored: set[int] = set()
    for is_store, chosen in history:
        numbers = [first + each for each in chosen]
        if is_store:
            assert roomy.store(numbers).moved.all()
            stored.update(numbers)
            for number in numbers:
                until_findable(roomy, number)
        else:
            assert roomy.loads(numbers) == [number in stored for number in numbers]
        assert {each for each in range(first, first + 21) if roomy.has(each)} == stored


# --- a file -------------------------------------------------------------------------------------------------


STAGED = 4 * (ROW_BYTES + 128)
"""Memory between rows and file for four blocks."""


def test_jobs_larger_than_the_memory_between_rows_and_file_are_moved_whole(tmp_path: Path) -> None:
    engine = with_file(tmp_path, slots=64, FDCACHE_HOST_MEMORY=STAGED)
    assert engine.store(range(16)).moved.all()
    assert engine.store(range(16, 32)).moved.all()
    assert all(engine.loads(range(32)))
    engine.close()


def test_a_block_that_left_the_file_and_not_the_memory_above_is_written_again(tmp_path: Path) -> None:
    engine = with_file(tmp_path)
    slots = engine.tiers.usage.blocks
    for first in range(0, slots + 8, 8):
        engine.store(range(first, first + 8))
    assert engine.store([0]).moved.all()
    engine.close()
    engine = with_file(tmp_path)
    assert engine.loads([0, 1]) == [True, False]
    engine.close()


def test_the_file_keeps_its_size_and_the_last_used(tmp_path: Path) -> None:
    engine = with_file(tmp_path, FDCACHE_HOST_MEMORY=STAGED)
    slots = engine.tiers.usage.blocks
    for first in range(0, slots, 8):
        engine.store(range(first, min(first + 8, slots)))
    assert all(engine.has(number) for number in range(4))
    engine.store(range(100, 104))
    assert engine.tiers.usage.ready == slots
    assert all(engine.has(number) for number in [*range(4), *range(100, 104)])
    assert sum(engine.has(number) for number in range(slots)) == slots - 4
    engine.close()


def test_a_new_process_finds_them(tmp_path: Path) -> None:
    first = with_file(tmp_path)
    first.store(range(8))
    first.close()
    second = with_file(tmp_path)
    assert all(second.loads(range(8)))
    second.close()


STORES = """
import os, signal, sys
from pathlib import Path
from tests.integration.test_keyed_tiers import with_file
engine = with_file(Path(sys.argv[1]))
engine.store(range(8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_none(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", STORES, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    engine = with_file(tmp_path)
    assert all(engine.loads(range(8)))
    engine.close()


def test_changed_bytes_are_never_served(tmp_path: Path) -> None:
    engine = with_file(tmp_path, slots=300, rows=256)
    for first in range(0, 256, 64):
        engine.store(range(first, first + 64), first)
    engine.close()
    (slab,) = tmp_path.glob("*.slab")
    stored = bytearray(slab.read_bytes())
    flipped = set()
    for number in range(200):
        place = stored.find(content(number).tobytes())
        assert place > 0
        stored[place + number * 37 % ROW_BYTES] ^= 1 << number % 8
        flipped.add(number)
    slab.write_bytes(stored)
    engine = with_file(tmp_path, slots=300, rows=256)
    for first in range(0, 256, 64):
        ended = engine.load(range(first, first + 64), first)
        assert ended.moved.tolist() == [number not in flipped for number in range(first, first + 64)]
    assert engine.tiers.stats.corrupt == 200
    assert not engine.has(7), "it is not offered again"
    engine.close()


SLOW = """
import ctypes, sys, time
from pathlib import Path
from tests.integration.test_keyed_tiers import Engine, file_in
from tests.service_help import until
def hangs(milliseconds):
    ctypes.CDLL(None).setenv(b"SLOW_DISK_MS", milliseconds, 1)
ahead = 0.0
given = file_in(Path(sys.argv[1]), FDCACHE_STORAGE_TIMEOUT=1.0)
engine = Engine(given)
engine.store(range(8))
engine.close()
engine = Engine(given, clock=lambda: time.monotonic() + ahead)
hangs(b"600000")
assert not engine.load(range(8)).moved.any()
assert not engine.has(0), "nothing is found for a while"
assert not engine.store([50], first=30).moved.any()
engine.rows[:] = 0x11
ahead = 100.0
until(lambda: not engine.tiers.take_ended() and not engine.has(0), "nothing is found before the read has ended")
hangs(b"0")
until(lambda: not engine.tiers.take_ended() and engine.has(0), "the disk answers again")
assert (engine.rows == 0x11).all(), "a late read wrote into a row"
assert all(engine.loads(range(8)))
engine.close()
print("right")
"""


def test_a_disk_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    done = preload.run("slow_disk", SLOW, tmp_path, SLOW_DISK_MS="0")
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("connector", ["none", "shared"])
def test_a_storage_without_slots_is_refused(tmp_path: Path, connector: str) -> None:
    given = file_in(tmp_path, FDCACHE_STORAGE=connector)
    with pytest.raises(ConfigurationError, match="FDCACHE_STORAGE=local"):
        Engine(given)


@settings(max_examples=25, deadline=None)
@given(_HISTORIES)
def test_every_history_in_a_small_file_serves_right_bytes(
    tmp_path_factory: pytest.TempPathFactory, history: list[Operation]
) -> None:
    folder = tmp_path_factory.mktemp("history")
    engine = with_file(folder, FDCACHE_HOST_MEMORY=2 * STAGED)
    stored: set[int] = set()
    for is_store, numbers in history:
        found = {number for number in range(21) if engine.has(number)}
        assert found <= stored
        if is_store:
            assert engine.store(numbers).moved.all()
            stored.update(numbers)
        else:
            loaded = {number for number, moved in zip(numbers, engine.loads(numbers), strict=True) if moved}
            assert loaded <= found
        assert not engine.tiers.usage.holds and not engine.tiers.usage.writing
    engine.close()
    engine = with_file(folder)
    found = {number for number in range(21) if engine.has(number)}
    assert found <= stored and len(found) == min(len(stored), engine.tiers.usage.blocks)
    assert not found or all(engine.loads(sorted(found)))
    engine.close()


# --- the service of the node --------------------------------------------------------------------------------


def test_engines_find_each_others_blocks_and_no_others(service: LocalService) -> None:
    first, second = with_service(service), with_service(service)
    assert first.store(range(8)).moved.all()
    until(lambda: second.has(7), "the service makes them findable")
    assert second.loads(range(12)) == [True] * 8 + [False] * 4
    assert first.store(range(4, 10)).moved.all(), "those that are stored count as moved"
    until(lambda: second.has(9), "the service makes them findable")
    assert second.loads(range(5, 12)) == [True] * 5 + [False] * 2
    first.close()
    assert second.loads(range(8)) == [True] * 8
    second.close()


def test_flipped_bytes_are_not_loaded(service: LocalService) -> None:
    engine = with_service(service, FDCACHE_VERIFY="all")
    engine.store(range(8))
    until(lambda: all(engine.has(number) for number in range(8)), "the service makes them findable")
    assert (
        sum(flip(path, content(3).tobytes()) for path in service.directory.iterdir() if path.is_file()) == 1
    )
    assert engine.loads(range(8)) == [number != 3 for number in range(8)]
    assert engine.tiers.stats.corrupt == 1
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


def test_without_the_service_jobs_end_without_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_keeper, "_HEARTBEAT_SECONDS", 0.2)
    service = LocalService(tmp_path / "service")
    engine = with_service(service)
    assert engine.tiers.stats.state is StorageState.READY
    service.crash()
    until(lambda: not engine.has(900), "the session ends")
    until(lambda: engine.tiers.stats.state is StorageState.OFF, "the state says so")
    assert not engine.store(range(8)).moved.any()
    assert engine.loads(range(4)) == [False] * 4
    engine.close()


def test_a_job_ends_at_its_deadline_and_its_rows_are_the_engines(service: LocalService) -> None:
    engine = with_service(service)
    engine.store(range(16))
    until(lambda: engine.has(15), "the service makes them findable")
    engine.tiers.load(77, keys_of(range(16)), np.arange(16, dtype=np.int32))
    engine.clock.now += TIMEOUT
    ended: list[EndedJob] = []

    def has_ended() -> bool:
        ended.extend(engine.tiers.take_ended())
        return bool(ended)

    until(has_ended, "the job ends")
    engine.rows[:] = 0x11
    engine.tiers.drain()
    assert (engine.rows == 0x11).all(), "nothing is written afterwards"
    moved: NDArray[np.bool_] = ended[0].moved
    assert moved.all() or not engine.has(0), "after a deadline nothing is found for a while"
    engine.clock.now += TIMEOUT
    assert engine.loads(range(16)) == [True] * 16
    engine.close()
