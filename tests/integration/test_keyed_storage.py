"""Storage under keys, of an engine that keeps host records itself: bytes, bounds, deadlines, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fdcache.errors import ConfigurationError
from fdcache.integrations.vllm.keyed_storage import EndedJob, KeyedStorage
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.settings.cache import StorageTierSettings
from tests import preload
from tests.service_help import until

ROW_BYTES = 8192
LAYOUT = KVLayout.build(
    [PlaneSpec(PlaneKind.KEY, "uint8", (ROW_BYTES,))], model="m", revision="1", block_size=16, num_layers=1
)
ROWS = 32


def keys_of(numbers: list[int] | range) -> NDArray[np.uint8]:
    return np.array([np.random.default_rng(number).integers(0, 256, 32, np.uint8) for number in numbers])


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1000 + number).integers(0, 256, ROW_BYTES, np.uint8)


class Engine:
    """Rows of an engine above a storage, whose jobs are waited for."""

    def __init__(self, folder: Path, slots: int = 16, rows: int = ROWS, **changes: Any) -> None:
        size = slots * (ROW_BYTES + 128) + 65536
        tier = StorageTierSettings(connector="local", directory=folder, size=size, **changes)
        self.rows = np.zeros((rows, ROW_BYTES), np.uint8)
        self.storage = KeyedStorage(LAYOUT, tier, self.rows)
        self._number = 0

    def close(self) -> None:
        self.storage.close()

    def store(self, numbers: list[int] | range, first: int = 0) -> EndedJob:
        rows = np.arange(first, first + len(numbers), dtype=np.int32)
        for row, number in zip(rows, numbers, strict=True):
            self.rows[row] = content(number)
        self._number += 1
        self.storage.store(self._number, keys_of(numbers), rows)
        return self.ended(self._number)

    def load(self, numbers: list[int] | range, first: int = 0) -> EndedJob:
        rows = np.arange(first, first + len(numbers), dtype=np.int32)
        self.rows[rows] = 0xEE
        self._number += 1
        self.storage.load(self._number, keys_of(numbers), rows)
        return self.ended(self._number)

    def ended(self, number: int) -> EndedJob:
        found: list[EndedJob] = []

        def has_ended() -> bool:
            found.extend(self.storage.take_ended())
            return bool(found)

        until(has_ended, "the job ends")
        assert [each.number for each in found] == [number]
        return found[0]

    def has(self, number: int) -> bool:
        return self.storage.contains(keys_of([number])[0].tobytes())

    def check(self, numbers: list[int] | range, moved: NDArray[np.bool_], first: int = 0) -> None:
        for i, number in enumerate(numbers):
            expected = content(number) if moved[i] else np.full(ROW_BYTES, 0xEE, np.uint8)
            assert (self.rows[first + i] == expected).all(), f"block {number}"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.close()


def test_blocks_come_back_into_other_rows(engine: Engine) -> None:
    assert engine.store(range(8)).moved.all()
    ended = engine.load([5, 2, 7], first=20)
    assert ended.moved.all() and ended.nbytes == 3 * ROW_BYTES
    engine.check([5, 2, 7], ended.moved, first=20)


def test_what_is_missing_leaves_its_row_alone(engine: Engine) -> None:
    engine.store([1, 3])
    ended = engine.load([0, 1, 2, 3])
    assert ended.moved.tolist() == [False, True, False, True]
    engine.check([0, 1, 2, 3], ended.moved)
    assert engine.load([8, 9]).moved.tolist() == [False, False]


def test_what_is_stored_is_not_written_again(engine: Engine) -> None:
    engine.store(range(4))
    ended = engine.store(range(6))
    assert ended.moved.all() and ended.nbytes == 2 * ROW_BYTES


def test_the_file_keeps_its_size_and_the_last_used(engine: Engine) -> None:
    slots = engine.storage.usage.blocks
    for first in range(0, slots, 8):
        engine.store(range(first, min(first + 8, slots)))
    assert all(engine.has(number) for number in range(4))
    engine.store(range(100, 104))
    assert engine.storage.usage.ready == slots
    assert all(engine.has(number) for number in [*range(4), *range(100, 104)])
    assert sum(engine.has(number) for number in range(slots)) == slots - 4


def test_a_new_process_finds_them(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.store(range(8))
    first.close()
    second = Engine(tmp_path)
    ended = second.load(range(8))
    assert ended.moved.all()
    second.check(range(8), ended.moved)
    second.close()


STORES = """
import os, signal, sys
from pathlib import Path
from tests.integration.test_keyed_storage import Engine
engine = Engine(Path(sys.argv[1]))
engine.store(range(8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_none(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", STORES, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    engine = Engine(tmp_path)
    ended = engine.load(range(8))
    assert ended.moved.all()
    engine.check(range(8), ended.moved)
    engine.close()


def test_changed_bytes_are_never_served(tmp_path: Path) -> None:
    engine = Engine(tmp_path, slots=300, rows=256)
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
    engine = Engine(tmp_path, slots=300, rows=256)
    for first in range(0, 256, 64):
        ended = engine.load(range(first, first + 64), first)
        assert ended.moved.tolist() == [number not in flipped for number in range(first, first + 64)]
        engine.check(range(first, first + 64), ended.moved, first)
    assert engine.storage.stats.corrupt == 200
    assert not engine.has(7), "it is not offered again"
    engine.close()


def test_rows_in_flight_are_at_most_half(engine: Engine) -> None:
    assert not engine.store(range(ROWS)).moved.any()
    assert engine.store(range(ROWS // 2)).moved.any()


def test_jobs_end_in_drain(engine: Engine) -> None:
    for number in range(4):
        engine.rows[number] = content(number)
    for number in range(4):
        engine.storage.store(number, keys_of([number]), np.array([number], np.int32))
    engine.storage.drain()
    assert {each.number for each in engine.storage.take_ended()} == set(range(4))
    assert engine.storage.is_idle


SLOW = """
import os, sys, time
from pathlib import Path
import numpy as np
from tests.integration.test_keyed_storage import Engine, keys_of
from tests.service_help import until
engine = Engine(Path(sys.argv[1]), timeout=1.0)
engine.store(range(8))
os.environ["SLOW_DISK_MS"] = "4000"
import ctypes; ctypes.CDLL(None).setenv(b"SLOW_DISK_MS", b"4000", 1)
ended = engine.load(range(8))
assert not ended.moved.any(), ended
assert not engine.has(0), "nothing is found while the read is in flight"
rejected = engine.store([50], first=30)
assert not rejected.moved.any()
engine.rows[:8] = 0x11
ctypes.CDLL(None).setenv(b"SLOW_DISK_MS", b"0", 1)
until(lambda: not engine.storage.take_ended() and engine.has(0), "the disk answers again")
assert (engine.rows[:8] == 0x11).all(), "a late read wrote into a row"
ended = engine.load(range(8))
assert ended.moved.all()
engine.check(range(8), ended.moved)
engine.close()
print("right")
"""


def test_a_disk_that_hangs_costs_the_deadline(tmp_path: Path) -> None:
    library = preload.build("slow_disk", tmp_path)
    environment = {**os.environ, "LD_PRELOAD": str(library), "SLOW_DISK_MS": "0"}
    (tmp_path / "files").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SLOW, str(tmp_path / "files")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("connector", ["none", "mooncake"])
def test_a_storage_without_slots_is_refused(tmp_path: Path, connector: str) -> None:
    tier = StorageTierSettings(connector=connector, directory=tmp_path)
    with pytest.raises(ConfigurationError, match="FDCACHE_STORAGE=local"):
        KeyedStorage(LAYOUT, tier, np.zeros((4, ROW_BYTES), np.uint8))


Operation = tuple[bool, list[int]]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 20), min_size=1, max_size=10, unique=True)),
        max_size=12,
    )
)
def test_every_history_serves_right_bytes(
    tmp_path_factory: pytest.TempPathFactory, history: list[Operation]
) -> None:
    engine = Engine(tmp_path_factory.mktemp("history"))
    stored: set[int] = set()
    for is_store, numbers in history:
        found = {number for number in range(21) if engine.has(number)}
        assert found <= stored
        if is_store:
            ended = engine.store(numbers)
            stored |= {number for number, moved in zip(numbers, ended.moved, strict=True) if moved}
        else:
            ended = engine.load(numbers)
            engine.check(numbers, ended.moved)
            assert ended.moved.tolist() == [number in found for number in numbers]
        assert not engine.storage.usage.holds and not engine.storage.usage.writing
    engine.close()
