"""Power loss and kill -9: a slab file returns no wrong block afterwards, whatever was torn."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fdcache.storage.connector import Outcome
from fdcache.storage.slab_format import file_name
from tests import preload
from tests.seeds import budget
from tests.service_help import until
from tests.slab_writer import LAYOUT, SIZE
from tests.storage_help import Records, open_store

ROOT = Path(__file__).parent.parent.parent
SECTOR = 512


@dataclass
class Recovered:
    """Blocks that a store found: how many are right and refused, and the places of the right ones."""

    right: int = 0
    refused: int = 0
    places: frozenset[tuple[int, str, int]] = frozenset()


@pytest.fixture(scope="module")
def records() -> Records:
    return Records(LAYOUT)


def recover(folder: Path, records: Records) -> Recovered:
    """Open the store, read every block that it claims to hold, and compare each byte that it returns."""
    store = open_store(folder, LAYOUT, size=SIZE)
    found = Recovered()
    scan = store.scan()
    for slot in range(len(scan.slots)):
        records.wipe(slot)
    batch = records.batch(scan.hashes, slots=scan.slots.tolist(), parents=scan.parents)
    batch.generations[:] = scan.generations  # type: ignore[index]
    result = store.get(batch, 60)
    places = set()
    for i, outcome in enumerate(result.outcomes.tolist()):
        block = scan.hashes[i].tobytes()
        if outcome == Outcome.OK:
            assert records.holds(i, block), "a block came back with other bytes"
            places.add((int(scan.slots[i]), block.hex(), int(scan.generations[i])))
            found.right += 1
        else:
            assert outcome == Outcome.CORRUPT
            found.refused += 1
    store.close()
    found.places = frozenset(places)
    return found


def start_writer(
    folder: Path, fsync: str, batches: int, seed: int, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.slab_writer", str(folder), fsync, str(batches), str(seed)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


# --- power loss: a recorded log of the writes, cut off and torn -----------------------------------------------


@dataclass
class Entry:
    kind: str
    offset: int
    data: bytes


@pytest.fixture(scope="module")
def write_log_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preload.build("write_log", tmp_path_factory.mktemp("write_log"))


@dataclass
class WriteLog:
    """Writes and syncs of a process that stored 25 batches with the policy ``fsync``."""

    fsync: str
    entries: list[Entry]


@pytest.fixture(scope="module", params=["never", "always"])
def log(
    request: pytest.FixtureRequest, write_log_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> WriteLog:
    folder = tmp_path_factory.mktemp("recorded")
    log = folder / "writes"
    preloaded = {"LD_PRELOAD": str(write_log_library), "WRITE_LOG": str(log)}
    writer = start_writer(folder, request.param, 25, 7, **preloaded)
    writer.communicate(timeout=120)
    assert writer.returncode == 0
    return WriteLog(request.param, slot_writes(list(read_log(log.read_bytes()))))


def read_log(data: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(data):
        kind, offset, length = struct.unpack_from("<QQQ", data, at)
        at += 24
        yield Entry(chr(kind), offset, data[at : at + length])
        at += length


class Disk:
    """The file on the medium: synced bytes, and writes since the last sync."""

    def __init__(self, original: bytes) -> None:
        self.synced = bytearray(original)
        self.since: list[Entry] = []

    def apply(self, entry: Entry) -> None:
        if entry.kind == "s":
            for write in self.since:
                put(self.synced, write.offset, write.data)
            self.since.clear()
        elif entry.kind == "w":
            self.since.append(entry)

    def everything(self) -> bytes:
        image = bytearray(self.synced)
        for write in self.since:
            put(image, write.offset, write.data)
        return bytes(image)

    def torn(self, random: np.random.Generator) -> bytes:
        """Return the file with any part of the writes since the sync, in any order, sectors cut anywhere."""
        image = bytearray(self.synced)
        share = random.choice([0.1, 0.5, 0.9])
        for position in random.permutation(len(self.since)).tolist():
            write = self.since[position]
            for start in range(0, len(write.data), SECTOR):
                piece = write.data[start : start + SECTOR]
                if random.random() < 0.05:
                    cut = int(random.integers(0, len(piece)))
                    piece = piece[:cut]
                elif random.random() > share:
                    continue
                put(image, write.offset + start, piece)
        return bytes(image)


def put(image: bytearray, offset: int, data: bytes) -> None:
    image[offset : offset + len(data)] = data


def empty_file(folder: Path) -> bytes:
    folder.mkdir()
    store = open_store(folder, LAYOUT, size=SIZE)
    store.close()
    return store.path.read_bytes()


def lay(folder: Path, image: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / file_name(LAYOUT.fingerprint, 0)).write_bytes(image)
    return folder


def acknowledged(entry: Entry) -> list[tuple[int, str, int]]:
    lines = entry.data.decode().splitlines()
    return [(int(slot), block, int(generation)) for slot, block, generation in map(str.split, lines)]


def slot_writes(entries: list[Entry]) -> list[Entry]:
    """Drop the writes of the superblock, with which the file begins."""
    return [entry for entry in entries if entry.kind != "w" or entry.offset >= 8192]


def test_every_prefix_of_the_writes_holds_only_whole_blocks(
    tmp_path: Path, log: WriteLog, records: Records
) -> None:
    assert sum(entry.kind == "w" for entry in log.entries) > 50
    disk = Disk(empty_file(tmp_path / "empty"))
    stored: dict[int, tuple[int, str, int]] = {}
    recovered = 0
    for entry in log.entries:
        disk.apply(entry)
        found = recover(lay(tmp_path / "prefix", disk.everything()), records)
        assert found.refused == 0, "the process was killed, not the machine: nothing is torn"
        recovered += found.right
        if entry.kind == "a":
            stored.update({place[0]: place for place in acknowledged(entry)})
            assert found.places == frozenset(stored.values()), (
                "the acknowledged blocks are there, and no others"
            )
    assert recovered > 0


def test_torn_writes_return_no_wrong_block(tmp_path: Path, log: WriteLog, records: Records) -> None:
    random = np.random.default_rng(11)
    fsync = log.fsync
    disk = Disk(empty_file(tmp_path / "empty"))
    stored: dict[int, tuple[int, str, int]] = {}
    right = refused = 0
    for position, entry in enumerate(log.entries):
        disk.apply(entry)
        if entry.kind == "a":
            stored.update({place[0]: place for place in acknowledged(entry)})
        for _ in range(budget(10)):
            found = recover(lay(tmp_path / "torn", disk.torn(random)), records)
            right += found.right
            refused += found.refused
            if fsync == "always" and entry.kind == "a":
                assert not disk.since
                assert frozenset(stored.values()) <= found.places, (
                    f"a synced block was lost at entry {position}"
                )
            if fsync == "always":
                assert found.refused == 0, (
                    "with syncs in between no slot claims a block that it does not hold"
                )
    print(f"recovered {right} blocks, refused {refused}")  # noqa: T201
    assert right > 0
    if fsync == "never":
        assert refused > 0, "the test tears nothing"


# --- kill -9 --------------------------------------------------------------------------------------------------


def kill_and_recover(folder: Path, records: Records, moments: int, seed: int) -> tuple[int, int]:
    """Start a writer, kill it at a random moment and verify the file; repeat on the same file."""
    random = np.random.default_rng(seed)
    right = refused = 0
    for moment in range(moments):
        fsync = ["never", "interval", "always"][moment % 3]
        writer = start_writer(folder, fsync, 10**9, seed * 10_000 + moment)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        until(lambda: (folder / "stored.acks").stat().st_size, "a batch was acknowledged")
        time.sleep(float(random.uniform(0, 0.05)))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        found = recover(folder, records)
        right += found.right
        refused += found.refused
    return right, refused


def test_kill_9_under_write_load(tmp_path: Path, records: Records) -> None:
    right, refused = kill_and_recover(tmp_path, records, 3, seed=1)
    assert right > 0
    assert refused == 0


@pytest.mark.slow
def test_kill_9_at_many_moments(tmp_path: Path, records: Records) -> None:
    kills = budget(200)
    right, refused = kill_and_recover(tmp_path, records, kills, seed=2)
    print(f"{kills} kills: recovered {right} blocks in all, refused {refused}")  # noqa: T201
    assert right > 5 * kills
    assert refused == 0
