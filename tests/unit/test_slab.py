"""Slab store: blocks survive a restart, and incomplete ones are never returned."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache import _core
from fdcache.errors import StorageBusyError, StorageError, StorageFormatError
from fdcache.metadata import SLOT_HEADER_BYTES
from fdcache.settings.cache import FsyncPolicy
from fdcache.storage.connector import Outcome, StorageState
from fdcache.storage.slab_format import PAGE, read_superblock
from tests.storage_help import MIB, Records, open_store, path_hashes, storage_layout

LAYOUT = storage_layout()


@pytest.fixture
def records() -> Records:
    return Records(LAYOUT)


def test_a_new_store_returns_the_blocks_of_the_last(tmp_path: Path, records: Records) -> None:
    hashes = path_hashes(20)
    store = open_store(tmp_path, LAYOUT)
    assert store.put(records.full_batch(hashes, slots=range(20)), 10).ok.all()
    store.close()
    for slot in range(20):
        records.wipe(slot)
    store = open_store(tmp_path, LAYOUT)
    scan = store.scan()
    assert scan.slots.tolist() == list(range(20))
    assert (scan.hashes == hashes).all()
    assert (scan.written_ms > 1_600_000_000_000).all()
    result = store.get(records.batch(hashes, slots=range(20)), 10)
    assert result.ok.all()
    assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(20))
    assert (result.checksums == scan.checksums).all()
    store.close()


def test_scattered_slots_and_runs_return_the_same_blocks(tmp_path: Path, records: Records) -> None:
    hashes = path_hashes(30, seed=3)
    slots = np.random.default_rng(1).permutation(100)[:30].tolist()
    store = open_store(tmp_path, LAYOUT)
    assert store.put(records.full_batch(hashes, slots=slots), 10).ok.all()
    for slot in range(30):
        records.wipe(slot)
    order = np.random.default_rng(2).permutation(30)
    batch = records.batch(hashes, slots=slots).select(order)
    assert store.get(batch, 10).ok.all()
    assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(30))
    store.close()


def test_an_absent_block_is_a_miss(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    hashes = path_hashes(4)
    store.put(records.full_batch(hashes, slots=range(4)), 10)
    never = store.get(records.batch(path_hashes(4, seed=9), slots=range(4)), 10)
    other_generation = store.get(records.batch(hashes, slots=range(4), generation=2), 10)
    assert (never.outcomes == Outcome.MISS).all()
    assert (other_generation.outcomes == Outcome.MISS).all()
    assert records.table.header(0).state == 2, "a miss does not change the host record"
    store.close()


@pytest.mark.parametrize("where", ["payload", "padding"])
def test_a_changed_byte_is_refused_and_empties_its_slot(tmp_path: Path, records: Records, where: str) -> None:
    layout = storage_layout(num_layers=1, head_dim=8)
    records = Records(layout)
    store = open_store(tmp_path, layout)
    hashes = path_hashes(3)
    store.put(records.full_batch(hashes, slots=range(3)), 10)
    with store.path.open("r+b") as file:
        block = read_superblock(file.fileno(), store.path)
        inside = layout.planes[0].offset if where == "payload" else layout.record_bytes - 1
        os.pwrite(file.fileno(), b"\x55", block.record_offset + layout.record_bytes + inside)
        os.fsync(file.fileno())
    result = store.get(records.batch(hashes, slots=range(3)), 10)
    assert result.outcomes.tolist() == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert records.table.header(1).state != 2, "the host record must not look ready"
    assert store.stats().corrupt == 1
    assert store.scan().slots.tolist() == [0, 2]
    store.close()
    assert open_store(tmp_path, layout).scan().slots.tolist() == [0, 2]


def test_headers_of_an_earlier_version_are_empty_slots(tmp_path: Path, records: Records) -> None:
    hashes = path_hashes(4)
    store = open_store(tmp_path, LAYOUT)
    store.put(records.full_batch(hashes[:3], slots=range(3)), 10)
    store.close()
    with store.path.open("r+b") as file:
        at = read_superblock(file.fileno(), store.path).header_offset
        for slot in range(2):
            fields = bytearray(os.pread(file.fileno(), 120, at + slot * SLOT_HEADER_BYTES))
            fields[4] = 1
            checksum = _core.record_checksum(np.frombuffer(bytes(fields), np.uint8), [0], [120])
            os.pwrite(file.fileno(), fields + checksum.to_bytes(8, "little"), at + slot * SLOT_HEADER_BYTES)
    store = open_store(tmp_path, LAYOUT)
    assert store.scan().slots.tolist() == [2]
    assert store.stats().corrupt_found_on_start == 0
    assert store.put(records.full_batch(hashes[3:], slots=[0]), 10).ok.all()
    assert store.scan().slots.tolist() == [0, 2]
    store.close()


def test_recovered_blocks_are_checked_with_checks_off(tmp_path: Path, records: Records) -> None:
    hashes = path_hashes(1)
    store = open_store(tmp_path, LAYOUT, verify=False)
    store.put(records.full_batch(hashes, slots=[0]), 10)
    store.close()
    with store.path.open("r+b") as file:
        block = read_superblock(file.fileno(), store.path)
        os.pwrite(file.fileno(), b"\x55\x66", block.record_offset)
    store = open_store(tmp_path, LAYOUT, verify=False)
    assert store.get(records.batch(hashes, slots=[0]), 10).outcomes.tolist() == [Outcome.CORRUPT]
    store.close()


def test_a_host_record_of_another_block_is_not_stored(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    hashes = path_hashes(2)
    batch = records.full_batch(hashes, slots=range(2))
    records.fill(1, b"x" * 32)
    assert store.put(batch, 10).outcomes.tolist() == [Outcome.OK, Outcome.SOURCE_CHANGED]
    assert store.scan().slots.tolist() == [0]
    store.close()


def test_a_passed_deadline_or_a_cancel_changes_nothing(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    hashes = path_hashes(4)
    store.put(records.full_batch(hashes, slots=range(4)), 10)
    late = store.get(records.batch(hashes, slots=range(4)), 0.0)
    assert (late.outcomes == Outcome.TIMEOUT).all()
    cancel = _core.CancelFlag()
    cancel.set()
    cancelled = store.get(records.batch(hashes, slots=range(4)), 10, cancel)
    assert (cancelled.outcomes == Outcome.CANCELLED).all()
    assert store.scan().slots.tolist() == [0, 1, 2, 3]
    store.close()


def test_a_second_store_on_the_same_file_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, LAYOUT)
    with pytest.raises(StorageBusyError, match="another process is using it"):
        open_store(tmp_path, LAYOUT)
    store.close()
    open_store(tmp_path, LAYOUT).close()


def test_layouts_and_ranks_share_a_folder(tmp_path: Path) -> None:
    other = storage_layout(model="other", tp_size=2)
    stores = [open_store(tmp_path, LAYOUT), open_store(tmp_path, other), open_store(tmp_path, other, rank=1)]
    assert len({store.path for store in stores}) == 3
    for store in stores:
        store.close()


def test_a_foreign_file_is_refused_and_unchanged(tmp_path: Path) -> None:
    store = open_store(tmp_path, LAYOUT)
    store.close()
    store.path.write_bytes(b"not ours" * 1000)
    with pytest.raises(StorageFormatError, match="not a slab file"):
        open_store(tmp_path, LAYOUT)
    assert store.path.read_bytes() == b"not ours" * 1000


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, LAYOUT)
    store.close()
    with store.path.open("r+b") as file:
        for page in (0, 1):
            os.pwrite(file.fileno(), b"FDCSLAB\0\x09", page * PAGE)
    with pytest.raises(StorageFormatError, match="format version 9"):
        open_store(tmp_path, LAYOUT)


def test_one_damaged_superblock_is_recovered_two_are_refused(tmp_path: Path) -> None:
    open_store(tmp_path, LAYOUT, size=2 * MIB).close()
    store = open_store(tmp_path, LAYOUT, size=4 * MIB)
    slots = store.num_slots
    store.close()
    with store.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 512, 1 * PAGE + 8)
    store = open_store(tmp_path, LAYOUT, size=4 * MIB)
    assert store.num_slots == slots
    store.close()
    with store.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff" * 64, 0 * PAGE + 100)
        os.pwrite(file.fileno(), b"\xff" * 64, 1 * PAGE + 100)
    with pytest.raises(StorageFormatError, match="both superblocks are damaged"):
        open_store(tmp_path, LAYOUT, size=4 * MIB)


def test_a_truncated_file_loses_only_the_missing_records(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    hashes = path_hashes(10)
    store.put(records.full_batch(hashes, slots=range(10)), 10)
    block = read_superblock(os.open(store.path, os.O_RDONLY), store.path)
    store.close()
    os.truncate(store.path, block.record_offset + 4 * LAYOUT.record_bytes + 100)
    store = open_store(tmp_path, LAYOUT)
    assert store.scan().slots.tolist() == [0, 1, 2, 3]
    assert store.stats().corrupt_found_on_start == 6
    assert store.path.stat().st_size == block.file_bytes
    store.close()


def test_the_file_is_bounded_sparse_and_resized(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT, size=64 * MIB)
    assert 63 * MIB < store.path.stat().st_size <= 64 * MIB
    assert store.path.stat().st_blocks * 512 < MIB
    hashes = path_hashes(10)
    store.put(records.full_batch(hashes, slots=range(10)), 10)
    store.close()
    store = open_store(tmp_path, LAYOUT, size=48 * 1024)
    few = store.num_slots
    assert 1 <= few < 10
    assert store.scan().slots.tolist() == list(range(few))
    store.close()
    store = open_store(tmp_path, LAYOUT, size=MIB)
    assert store.scan().slots.tolist()[:few] == list(range(few))
    store.close()
    with pytest.raises(StorageError, match="cannot hold one block"):
        open_store(tmp_path, LAYOUT, size=1000)
    with pytest.raises(StorageError, match="lower FDCACHE_STORAGE_SIZE"):
        open_store(tmp_path, LAYOUT, size=1 << 40)


def test_a_closed_store_returns_errors(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    store.close()
    store.close()
    result = store.get(records.batch(path_hashes(2), slots=range(2)), 10)
    assert (result.outcomes == Outcome.ERROR).all()


def test_a_moved_file_turns_the_store_off_until_it_is_back(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT, retry_after=0.0)
    hashes = path_hashes(4)
    batch = records.full_batch(hashes, slots=range(4))
    assert store.put(batch, 10).ok.all()
    moved = store.path.rename(tmp_path / "elsewhere")
    first = store.get(batch, 10)
    assert not first.ok.any()
    moved.rename(store.path)
    records.full_batch(hashes)
    again = store.put(batch, 10)
    assert again.ok.all()
    assert store.stats().state is StorageState.READY
    store.close()


class Gate:
    """The native file, in which one call waits until the gate is open."""

    def __init__(self, core: _core.SlabFile, call: str) -> None:
        self._core, self._call = core, call
        self.entered, self.open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        if name != self._call:
            return found

        def wait(*arguments: Any) -> Any:
            self.entered.set()
            assert self.open.wait(60)
            return found(*arguments)

        return wait


@pytest.mark.parametrize("user", ["erase", "clear", "sync"])
def test_no_descriptor_is_closed_while_a_call_uses_it(tmp_path: Path, records: Records, user: str) -> None:
    fsync = FsyncPolicy.INTERVAL if user == "sync" else FsyncPolicy.NEVER
    store = open_store(tmp_path, LAYOUT, fsync=fsync, fsync_interval=0.01)
    batch = records.full_batch(path_hashes(4), slots=range(4))
    handle = store.file
    gate = Gate(handle.core, "sync" if user == "sync" else "erase")
    handle.core = gate  # type: ignore[assignment]
    assert store.put(batch, 10).ok.all()
    work = {"erase": lambda: store.erase(np.array([0], np.int32)), "clear": lambda: store.clear(10)}
    thread = threading.Thread(target=work.get(user, lambda: None))
    thread.start()
    assert gate.entered.wait(60)
    store.health.failed(errno.EIO)
    assert not store.get(batch, 10).ok.any(), "the file cannot be reopened yet"
    assert store.file is handle
    os.fstat(handle.header_fd)
    os.fstat(handle.record_fd)
    gate.open.set()
    thread.join()
    while store.file is handle:  # the syncing thread may use it for a moment
        store.get(batch, 10)
    assert store.stats().state is StorageState.READY
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.erase(np.array([0], np.int32))
    with pytest.raises(StorageError, match="closed"):
        store.clear(10)


@pytest.mark.parametrize(
    ("folder", "wrong"),
    [
        ("/proc/nope", "cannot be made \\(No such file or directory\\)"),
        ("file", "is not a directory"),
        ("file/below", "cannot be made \\(Not a directory\\)"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_variable(
    tmp_path: Path, folder: str, wrong: str
) -> None:
    (tmp_path / "file").touch()
    chosen = tmp_path / folder
    with pytest.raises(StorageError, match=f"^FDCACHE_STORAGE_DIR: {chosen} {wrong}; choose another folder$"):
        open_store(chosen, LAYOUT)
