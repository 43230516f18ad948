"""Presence table of a tier, in memory that other processes read."""

from __future__ import annotations

import hashlib
import mmap
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fdcache._core import MemoryGuard, PresenceTable, Tier, map_pages
from fdcache.service.wire.shared_memory import BYTES_PER_SLOT, Extent, create_shared, open_table, table_bytes

ROOT = bytes(32)
KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])


def digest(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def rows(*keys: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def memory(slots: int) -> np.ndarray:
    return np.zeros(table_bytes(slots), np.uint8)


def store(tier: Tier, lease: int, parent: bytes, hashes: list[bytes]) -> None:
    slots = tier.reserve(lease, len(hashes)).slots
    tier.commit(lease, parent, rows(*hashes), slots)


def path(name: str, length: int) -> list[bytes]:
    return [digest((name, i)) for i in range(length)]


class TestMirror:
    def test_stored_blocks_are_listed_and_evicted_ones_are_not(self) -> None:
        tier, shared = Tier(8), memory(8)
        tier.mirror(shared)
        table = PresenceTable(shared)
        a, b = path("a", 8), path("b", 6)
        lease = tier.open_lease()
        store(tier, lease, ROOT, a)
        assert (table.contains(rows(*a)).tolist(), table.run(rows(*a))) == ([1] * 8, 8)
        tier.release(lease)
        store(tier, tier.open_lease(), ROOT, b)
        assert table.contains(rows(*a, *b)).tolist() == [1] * 2 + [0] * 6 + [1] * 6
        assert [table.run(rows(*a), start) for start in (0, 1, 2, 8)] == [2, 1, 0, 0]
        assert tier.check_integrity() == []

    def test_it_starts_with_the_blocks_of_the_tier(self) -> None:
        tier = Tier(8)
        store(tier, tier.open_lease(), ROOT, path("a", 5))
        shared = memory(8)
        shared[:] = 255
        tier.mirror(shared)
        assert PresenceTable(shared).contains(rows(*path("a", 6))).tolist() == [1] * 5 + [0]
        assert tier.check_integrity() == []

    def test_a_pending_block_is_not_listed(self) -> None:
        tier, shared = Tier(8), memory(8)
        tier.mirror(shared)
        taken = tier.reserve_copies(0, rows(ROOT), rows(digest("a")))
        table = PresenceTable(shared)
        assert table.contains(rows(digest("a"))).tolist() == [0]
        tier.complete(taken.slots, np.ones(1, np.uint8), np.zeros(1, np.uint64))
        assert table.contains(rows(digest("a"))).tolist() == [1]

    @pytest.mark.parametrize("end", ["reset", "drop", "discard", "shrink"])
    def test_every_way_to_drop_blocks_drops_them_from_the_table(self, end: str) -> None:
        tier, shared = Tier(8), memory(8)
        tier.mirror(shared)
        keys = path("a", 8)
        lease = tier.open_lease()
        store(tier, lease, ROOT, keys)
        slots = tier.match(tier.open_lease(), rows(*keys)).slots
        if end == "reset":
            tier.reset()
        elif end == "drop":
            tier.drop(rows(keys[0]))
        elif end == "discard":
            tier.discard(slots[:1])
        else:
            for each in (lease, lease + 1):
                tier.release(each)
            assert tier.resize(1) == 0
        left = 1 if end == "shrink" and slots[0] == 0 else 0
        assert PresenceTable(shared).contains(rows(*keys)).sum() == left
        assert tier.check_integrity() == []

    def test_table_and_tier_agree_after_random_calls(self) -> None:
        rng = random.Random(3)
        tier, shared = Tier(300), memory(300)
        tier.mirror(shared)
        table = PresenceTable(shared)
        paths = [path(str(i), 40) for i in range(30)]
        leases: list[int] = []
        for _ in range(3000):
            keys = rng.choice(paths)
            choice = rng.randrange(40)
            if choice == 0:
                tier.reset()
            elif choice == 1:
                tier.drop(rows(rng.choice(keys)))
            elif choice < 20 and leases:
                tier.release(leases.pop(rng.randrange(len(leases))))
            else:
                lease = tier.open_lease()
                found = len(tier.match(lease, rows(*keys)))
                count = min(rng.randrange(20), len(keys) - found, tier.available)
                parent = keys[found - 1] if found else ROOT
                if count:
                    store(tier, lease, parent, keys[found : found + count])
                leases.append(lease)
            everything = rows(*rng.choice(paths), *rng.choice(paths))
            assert (table.contains(everything) == (tier.contains(everything) == 1)).all()
        assert tier.check_integrity() == []


class TestTable:
    def test_it_has_room_for_every_block(self) -> None:
        slots = 20000
        shared = memory(slots)
        tier = Tier(slots)
        tier.mirror(shared)
        keys = rows(*path("a", slots))
        store_lease = tier.open_lease()
        tier.commit(store_lease, ROOT, keys, tier.reserve(store_lease, slots).slots)
        table = PresenceTable(shared)
        assert table.contains(keys).all()
        assert not table.contains(rows(*path("b", slots))).any()
        assert shared.nbytes <= slots * BYTES_PER_SLOT + 4096
        assert tier.check_integrity() == []

    def test_a_full_bucket_omits_blocks_until_it_is_emptied(self) -> None:
        shared = np.zeros(256, np.uint8)
        tier = Tier(16)
        tier.mirror(shared)
        keys = path("a", 12)
        lease = tier.open_lease()
        store(tier, lease, ROOT, keys)
        table = PresenceTable(shared)
        assert table.contains(rows(*keys)).tolist() == [1] * 8 + [0] * 4
        tier.reset()
        assert not table.contains(rows(*keys)).any()

    @pytest.mark.parametrize("size", [0, 8, 128, 255, 257])
    def test_memory_of_a_wrong_size_is_refused(self, size: int) -> None:
        with pytest.raises(ValueError, match="bucket"):
            PresenceTable(np.zeros(size, np.uint8))

    def test_a_tier_refuses_read_only_memory(self) -> None:
        shared = memory(8)
        shared.flags.writeable = False
        PresenceTable(shared)
        with pytest.raises(TypeError):
            Tier(8).mirror(shared)


class TestFile:
    def test_another_mapping_sees_what_the_tier_writes(self, tmp_path: Path) -> None:
        file = tmp_path / "x.table"
        tier = Tier(8)
        tier.mirror(create_shared(file, table_bytes(8)))
        table = open_table(file, table_bytes(8))
        keys = path("a", 4)
        store(tier, tier.open_lease(), ROOT, keys)
        assert table.run(rows(*keys)) == 4

    def test_readers_of_an_older_table_keep_it(self, tmp_path: Path) -> None:
        file = tmp_path / "x.table"
        size = table_bytes(8)
        first, second = Tier(8), Tier(8)
        first.mirror(create_shared(file, size))
        old = open_table(file, size)
        store(first, first.open_lease(), ROOT, path("a", 4))
        second.mirror(create_shared(file, size))
        assert old.run(rows(*path("a", 4))) == 4
        assert open_table(file, size).run(rows(*path("a", 4))) == 0

    def test_a_file_that_is_too_small_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "x.table"
        create_shared(file, 4096)
        with pytest.raises(OSError, match="smaller than 8192"):
            open_table(file, 8192)

    def test_a_full_directory_leaves_no_file(self, tmp_path: Path) -> None:
        file = tmp_path / "x.table"
        room = os.statvfs(tmp_path)
        with pytest.raises(OSError):
            create_shared(file, (room.f_blocks * room.f_frsize + (1 << 30)) // 4096 * 4096)
        assert not file.exists()


@pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel is older than the advice that maps pages")
def test_pages_of_an_extent_are_mapped_ahead_with_their_contents() -> None:
    contents = random.Random(1).randbytes(1 << 24)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(contents)
        file.flush()
        extent = Extent(file.name, len(contents))
    map_pages(extent.address, extent.nbytes)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    total = int(extent.data.sum())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100
    assert total == sum(contents)


class TestMemoryGuard:
    """A mapping whose file another process truncates."""

    def mapped(self, path: Path, pages: int) -> np.ndarray:
        memory = create_shared(path, pages * mmap.PAGESIZE)
        memory[:] = 7
        return memory

    def test_lost_pages_are_zeros_and_the_others_stay(self, tmp_path: Path) -> None:
        memory, other = self.mapped(tmp_path / "a", 4), self.mapped(tmp_path / "b", 4)
        guard, guard_of_other = MemoryGuard(memory), MemoryGuard(other)
        assert [guard.has_lost] == [False]
        os.truncate(tmp_path / "a", mmap.PAGESIZE)
        assert memory.reshape(4, -1)[:, [0, -1]].tolist() == [[7, 7], [0, 0], [0, 0], [0, 0]]
        memory[-1] = 5
        assert memory[-1] == 5
        assert [guard.has_lost, guard_of_other.has_lost] == [True, False]
        assert (other == 7).all()
        assert (tmp_path / "a").stat().st_size == mmap.PAGESIZE

    def test_a_new_guard_of_a_used_place_has_lost_nothing(self, tmp_path: Path) -> None:
        for number in range(3):
            memory = self.mapped(tmp_path / str(number), 2)
            guard = MemoryGuard(memory)
            assert [guard.has_lost] == [False]
            os.truncate(tmp_path / str(number), 0)
            assert not memory.any()
            assert [guard.has_lost] == [True]
            del guard, memory

    def test_only_guarded_memory_is_replaced(self, tmp_path: Path) -> None:
        script = """
import mmap, os, sys
from pathlib import Path
from fdcache._core import MemoryGuard
from fdcache.service.wire.shared_memory import create_shared
folder = Path(sys.argv[1])
guarded, bare = (create_shared(folder / name, mmap.PAGESIZE) for name in ("guarded", "bare"))
guard = MemoryGuard(guarded)
for name in ("guarded", "bare"):
    os.truncate(folder / name, 0)
print(int(guarded[0]), guard.has_lost, flush=True)
print(int(bare[0]))
"""
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.stdout == "0 True\n"
        assert done.returncode == -signal.SIGBUS

    def test_memory_that_begins_inside_a_page_is_refused(self, tmp_path: Path) -> None:
        memory = self.mapped(tmp_path / "a", 2)
        for part in (memory[1:], memory[:0]):
            with pytest.raises(ValueError, match="begins at a page"):
                MemoryGuard(part)
