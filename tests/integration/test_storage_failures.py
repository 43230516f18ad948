"""Failing file systems: the store reports the error, blocks nothing, and recovers without a restart."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import StorageReadOnlyError
from fdcache.replay.report import Report
from fdcache.settings.cache import StorageTierSettings, WritePolicy
from fdcache.storage.connector import Outcome, StorageState
from tests.mounts import file_system, mount, unmount
from tests.replay_help import assert_clean, run_chat, small_config
from tests.storage_engine import Engine, tokens_of
from tests.storage_help import MIB, Records, open_store, path_hashes, storage_layout

LAYOUT = storage_layout()
COUNT = 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    yield from file_system(tmp_path / "small", "256k")


@pytest.fixture
def records() -> Records:
    return Records(LAYOUT, COUNT)


def test_a_full_disk_limits_the_store_until_there_is_room(small_disk: Path, records: Records) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(100 << 10))
    store = open_store(small_disk, LAYOUT)
    hashes = path_hashes(COUNT)
    batch = records.full_batch(hashes, slots=range(COUNT))
    stored = store.put(batch, 10)
    assert 0 < stored.ok.sum() < COUNT
    assert set(stored.outcomes.tolist()) == {Outcome.OK, Outcome.NO_ROOM}
    assert store.stats().state is StorageState.FULL
    assert "StorageFullError" in str(store.stats().error)
    assert "FDCACHE_STORAGE_SIZE" in str(store.stats().error)
    assert store.stats().no_room == (~stored.ok).sum()
    kept = batch.select(stored.ok)
    assert store.get(kept, 10).ok.all()
    records.full_batch(hashes)
    assert store.put(kept, 10).ok.all(), "what has its room is written over"
    assert store.stats().state is StorageState.FULL
    ballast.unlink()
    records.full_batch(hashes)
    assert store.put(batch.select(~stored.ok).select(slice(0, 5)), 10).ok.all()
    assert store.stats().state is StorageState.READY
    store.close()


def test_a_limit_on_file_sizes_is_a_full_disk(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from fdcache.storage.slab_format import read_superblock
from tests.integration.test_storage_failures import COUNT, LAYOUT
from tests.storage_help import Records, open_store, path_hashes
store = open_store(Path(sys.argv[1]), LAYOUT)
limit = store.file.superblock.record_offset + 10 * LAYOUT.record_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
stored = store.put(Records(LAYOUT, COUNT).full_batch(path_hashes(COUNT), slots=range(COUNT)), 10)
print(int(stored.ok.sum()), store.stats().state.value, store.stats().error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.stdout.startswith("10 full StorageFullError")


def test_a_replay_continues_on_a_full_disk(small_disk: Path) -> None:
    tier = StorageTierSettings(connector="local", directory=small_disk, size=64 * MIB, retry_after=0.05)
    report = run_chat(
        small_config(
            device_blocks=150, host_memory=2 * MIB, storage=tier, cache={"write_policy": "write_through"}
        )
    )
    assert_clean(report)
    assert storage(report)["states"] == ["full"]
    assert storage(report)["errors"] == 0
    assert storage(report)["no_room"] > 0
    assert storage(report)["stored"] > 4 * ((256 << 10) // small_config().layout.record_bytes), "it evicts"


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_an_engine_on_a_full_disk_uses_the_room_there_is_and_grows_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    for folder in file_system(tmp_path / "small", "1m"):
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(600 << 10))
        with caplog.at_level("WARNING", "fdcache.storage"):
            engine = Engine(folder, write_policy=WritePolicy(policy), clean_reserve=20)
            (promise,) = [record.getMessage() for record in caplog.records]
            for first in range(1, 40):
                engine.run(f"r{first}", tokens_of(first, 8))
            warnings = [record.getMessage() for record in caplog.records][1:]
        assert "FDCACHE_STORAGE_SIZE promises" in promise
        assert "the disk has 4" in promise
        (full,) = warnings
        assert "no room" in full
        assert "free)" in full
        tier = engine.manager.get_stats().storage
        assert tier is not None
        assert tier.withheld > 0
        assert tier.evictions > 0
        assert engine.store.stats().state is StorageState.FULL
        newest = engine.manager._tiers.storage.pool.nodes(range(tier.blocks))  # type: ignore[union-attr]
        assert len(newest) == tier.ready > 0
        ballast.unlink()
        for first in range(40, 80):
            engine.run(f"r{first}", tokens_of(first, 8))
        after = engine.manager.get_stats().storage
        assert after is not None
        assert after.ready > tier.ready
        assert after.withheld < tier.withheld
        engine.close()


def storage(report: Report) -> dict[str, Any]:
    found = report.to_dict()["storage"]
    assert isinstance(found, dict)
    return found


def test_a_vanished_mount_turns_the_store_off_until_it_is_back(tmp_path: Path, records: Records) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "mount"
    disk.mkdir()
    folder.mkdir()
    # A file system of its own below the mount point, so that its absence can be told.
    if not mount(disk, "1m"):
        pytest.skip("mounting a tmpfs is not allowed here")
    subprocess.run(["mount", "--bind", disk, folder], check=True)
    store = open_store(folder, LAYOUT)
    hashes = path_hashes(8)
    batch = records.full_batch(hashes, slots=range(8))
    assert store.put(batch, 10).ok.all()
    unmount(folder, "-l")
    for _ in range(2):
        gone = store.get(batch, 10)
        assert (gone.outcomes == Outcome.ERROR).all()
        assert "StorageGoneError" in str(store.stats().error)
        assert store.stats().state is StorageState.OFF
        assert not any(folder.iterdir()), "nothing is written into the empty mount point"
    subprocess.run(["mount", "--bind", disk, folder], check=True)
    assert store.get(batch, 10).ok.all()
    assert store.stats().state is StorageState.READY
    assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(8))
    store.close()
    unmount(folder)
    unmount(disk)


def test_a_failing_device_is_an_error_and_the_file_is_reopened(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT)
    hashes = path_hashes(8)
    batch = records.full_batch(hashes, slots=range(8))
    assert store.put(batch, 10).ok.all()
    # Reads of a pipe fail as those of a broken device do, through the same calls.
    reading, writing = os.pipe()
    os.dup2(reading, store.file.record_fd)
    failed = store.get(batch, 10)
    assert (failed.outcomes == Outcome.ERROR).all()
    assert store.stats().state is StorageState.OFF
    assert "StorageDeviceError" in str(store.stats().error)
    assert all(records.table.header(slot).state != 2 for slot in range(8))
    assert store.get(batch, 10).ok.all(), "retry_after is 0: the next call opens the file anew"
    assert store.stats().state is StorageState.READY
    assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(8))
    os.close(reading)
    os.close(writing)
    store.close()


def test_a_failed_store_makes_no_call_before_its_retry(tmp_path: Path, records: Records) -> None:
    store = open_store(tmp_path, LAYOUT, retry_after=3600.0)
    batch = records.full_batch(path_hashes(4), slots=range(4))
    assert store.put(batch, 10).ok.all()
    reading, writing = os.pipe()
    saved = os.dup(store.file.record_fd)
    os.dup2(reading, store.file.record_fd)
    assert not store.get(batch, 10).ok.any()
    os.dup2(saved, store.file.record_fd)
    assert (store.get(batch, 10).outcomes == Outcome.ERROR).all()
    for fd in (reading, writing, saved):
        os.close(fd)
    store.close()


def test_a_read_only_file_system_is_refused_with_the_reason(small_disk: Path) -> None:
    open_store(small_disk, LAYOUT).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageReadOnlyError, match="check mount and owner"):
        open_store(small_disk, LAYOUT)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    open_store(small_disk, LAYOUT).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    program = """
import os, sys
from pathlib import Path
from fdcache.errors import StorageReadOnlyError
from tests.integration.test_storage_failures import LAYOUT
from tests.storage_help import open_store
os.setresuid(65534, 65534, 65534)
try:
    open_store(Path(sys.argv[1]), LAYOUT)
except StorageReadOnlyError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert done.stdout.startswith("refused:")
    assert "check mount and owner" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_store_survives_a_permission_that_is_lost_and_restored() -> None:
    folder = Path(tempfile.mkdtemp(prefix="fdcache-test"))  # the folders of a test are its owner's alone
    os.chown(folder, 65534, 65534)
    program = """
import os, sys
from pathlib import Path
from tests.integration.test_storage_failures import LAYOUT
from tests.storage_help import Records, open_store, path_hashes
records, hashes = Records(LAYOUT, 8), path_hashes(8)
batch = records.full_batch(hashes, slots=range(8))  # imports what it needs: the checkout may be its owner's alone
os.setresuid(65534, 65534, 65534)
store = open_store(Path(sys.argv[1]), LAYOUT)
assert store.put(batch, 10).ok.all()
reading, writing = os.pipe()
os.dup2(reading, store.file.record_fd)
store.path.chmod(0)
for _ in range(3):
    assert not store.get(batch, 10).ok.any()
print(store.stats().state.value, store.stats().error)
store.path.chmod(0o600)
assert store.get(batch, 10).ok.all()
assert all(records.holds(slot, hashes[slot].tobytes()) for slot in range(8))
print(store.stats().state.value, store.stats().error)
store.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
    )
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    lost, back = done.stdout.splitlines()
    assert lost.startswith("off StorageReadOnlyError")
    assert "check mount and owner" in lost
    assert back == "ready None"


def test_limits_of_this_process_are_unchanged() -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
