"""A slab file that is removed, replaced, cut off or damaged by others: the store comes back, and keeps what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fdcache.errors import StorageBusyError
from fdcache.storage.connector import Outcome, StorageState
from fdcache_cli.slab_files import SlabContents, read_file
from tests.service_help import until
from tests.storage_help import Records, open_store, path_hashes, storage_layout

LAYOUT = storage_layout()
COUNT = 150
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def records() -> Records:
    return Records(LAYOUT, COUNT)


def fill(folder: Path, records: Records) -> Path:
    """Leave a slab file of ``COUNT`` blocks."""
    store = open_store(folder, LAYOUT)
    assert store.put(records.full_batch(path_hashes(COUNT), slots=range(COUNT)), 10).ok.all()
    store.close()
    return store.path


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_store_whose_file_is_removed_makes_a_new_one_although_it_is_asked_all_the_time(
    tmp_path: Path, records: Records, gone: str
) -> None:
    folder = tmp_path / "files"
    store = open_store(folder, LAYOUT, retry_after=0.2)
    batch = records.full_batch(path_hashes(8), slots=range(8))
    assert store.put(batch, 10).ok.all()
    if gone == "file":
        store.path.unlink()
    else:
        shutil.rmtree(folder)
    until(lambda: not store.put(batch, 10).ok.any(), "the store sees that its file is gone")
    assert store.stats().state is StorageState.OFF
    assert "StorageGoneError" in str(store.stats().error)
    until(lambda: bool(store.put(batch, 10).ok.all()), "the store uses a new file")
    assert store.stats().state is StorageState.READY
    assert store.get(batch, 10).ok.all()
    store.close()
    assert open_store(folder, LAYOUT).scan().slots.tolist() == list(range(8))


def test_a_store_whose_file_is_replaced_opens_and_locks_the_other(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT, retry_after=0.2)
    hashes = path_hashes(8)
    batch = records.full_batch(hashes, slots=range(8))
    assert store.put(batch.select(slice(0, 5)), 10).ok.all()
    copy = tmp_path / "copy"
    shutil.copy(store.path, copy)
    assert store.put(batch.select(slice(5, 8)), 10).ok.all()
    copy.replace(store.path)
    until(lambda: not store.get(batch, 10).ok.any(), "the store sees another file")
    until(lambda: bool(store.get(batch, 10).ok.any()), "the store uses the other file")
    assert store.get(batch, 10).outcomes.tolist() == [Outcome.OK] * 5 + [Outcome.MISS] * 3
    assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(5))
    with pytest.raises(StorageBusyError):
        open_store(tmp_path, LAYOUT)
    store.close()


def test_only_one_process_opens_a_slab_whatever_else_is_removed(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    for other in tmp_path.iterdir():
        if other != store.path:
            other.unlink()
    program = """
import sys
from pathlib import Path
from fdcache.errors import StorageBusyError
from tests.integration.test_storage_file_faults import LAYOUT
from tests.storage_help import open_store
try:
    open_store(Path(sys.argv[1]), LAYOUT)
except StorageBusyError as error:
    print("refused:", error)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    opened = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert opened.stdout.startswith("refused:")
    assert str(store.path) in opened.stdout
    store.close()
    again = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert again.stdout == "", "the lock ends with its store"


def test_damaged_headers_are_found_once(tmp_path: Path, records: Records) -> None:
    path = fill(tmp_path, records)
    superblock = read(path).superblock
    with path.open("r+b") as file:
        for slot in range(100):
            os.pwrite(file.fileno(), b"\xee" * 40, superblock.header_offset + 128 * slot + 30)
    for expected in (100, 0):
        store = open_store(tmp_path, LAYOUT)
        assert store.stats().corrupt_found_on_start == expected
        assert store.scan().slots.tolist() == list(range(100, COUNT))
        store.close()
    assert read(path).num_corrupt == 0


def test_inspecting_a_file_changes_nothing(tmp_path: Path, records: Records) -> None:
    path = fill(tmp_path, records)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xee" * 128, read(path).superblock.header_offset)
    before = path.read_bytes()
    assert read(path).num_corrupt == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize("place", ["nothing", "superblock", "layout", "headers", "records", "end"])
def test_a_file_that_was_cut_off_heals(tmp_path: Path, records: Records, place: str) -> None:
    path = fill(tmp_path, records)
    superblock = read(path).superblock
    kept = {"records": COUNT // 2, "end": superblock.slots - 1}.get(place, 0)
    size = {
        "nothing": 0,
        "superblock": 4096 + 600,
        "layout": superblock.layout_offset + 10,
        "headers": superblock.header_offset + 128 * 10,
    }.get(place, superblock.record_offset + kept * superblock.record_bytes + 7)
    os.truncate(path, size)
    kept = min(kept, COUNT)
    store = open_store(tmp_path, LAYOUT)
    assert store.scan().slots.tolist() == list(range(kept))
    assert path.stat().st_size == superblock.file_bytes
    store.close()
    store = open_store(tmp_path, LAYOUT)
    assert store.stats().corrupt_found_on_start == 0, "what was lost is not found again"
    assert store.scan().slots.tolist() == list(range(kept))
    hashes = path_hashes(COUNT)
    batch = records.full_batch(hashes, slots=range(COUNT))
    assert store.put(batch.select(slice(kept, COUNT)), 10).ok.all()
    for slot in range(COUNT):
        records.wipe(slot)
    assert store.get(batch, 10).ok.all()
    assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(COUNT))
    store.close()
    assert read(path, verify=True).num_corrupt == 0


def test_a_file_cut_off_below_an_open_store_loses_only_what_it_lacks(
    tmp_path: Path, records: Records
) -> None:
    store = open_store(tmp_path, LAYOUT)
    batch = records.full_batch(path_hashes(20), slots=range(20))
    assert store.put(batch, 10).ok.all()
    superblock = store.file.superblock
    os.truncate(store.path, superblock.record_offset + 12 * superblock.record_bytes)
    assert store.get(batch, 10).outcomes.tolist() == [Outcome.OK] * 12 + [Outcome.MISS] * 8
    assert store.stats().state is StorageState.READY
    assert store.stats().bad_slots == 0
    records.full_batch(path_hashes(20))
    assert store.put(batch, 10).ok.all(), "the slots are used again"
    assert store.get(batch, 10).ok.all()
    store.close()


def read(path: Path, *, verify: bool = False) -> SlabContents:
    found = read_file(path, verify=verify)
    assert isinstance(found, SlabContents), found
    return found
