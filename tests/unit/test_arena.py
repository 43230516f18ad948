"""Extents as files: created, assigned, taken back, adopted, and checked against the memory there is."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ConfigurationError, HostMemoryError, ServiceRunningError
from fdcache.service.server.arena import Arena, MemoryKind, extent_bytes
from fdcache.service.server.loop import SocketLock


def arena(directory: Path) -> Arena:
    made = Arena(directory, "t")
    assert made.lock() is None
    made.create(1 << 20)
    return made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_file_has_the_prefix_and_only_discarding_removes_any(tmp_path: Path) -> None:
    made = arena(tmp_path)
    assert made.num_free == 16
    assert len(names(tmp_path)) == 17
    assert all(name.startswith("fdcache-t") for name in names(tmp_path))
    made.close()
    assert len(names(tmp_path)) == 17
    again = Arena(tmp_path, "t")
    again.lock()
    again.close(discard=True)
    assert names(tmp_path) == []


def test_a_lock_without_memory_leaves_nothing(tmp_path: Path) -> None:
    made = Arena(tmp_path, "t")
    assert made.lock() is None
    made.close()
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", [b"", b"{", b'{"pid": 1}', b"[" * 100_000, bytes(70_000)])
def test_extents_are_adopted_without_a_sound_manifest(tmp_path: Path, text: bytes) -> None:
    arena(tmp_path).close()
    (tmp_path / "fdcache-t.arena").write_bytes(text)
    again = Arena(tmp_path, "t")
    found = again.lock()
    assert found is not None
    assert (found.extent_bytes, found.extents) == (1 << 16, 16)
    assert again.adopt(found) == []
    assert again.num_free == 16
    again.close(discard=True)


def test_an_adopted_arena_grows_and_shrinks(tmp_path: Path) -> None:
    arena(tmp_path).close()
    again = Arena(tmp_path, "t")
    found = again.lock()
    assert found is not None
    again.adopt(found)
    again.grow(20)
    assert (again.num_free, again.total_bytes, len(names(tmp_path))) == (20, 20 << 16, 21)
    again.shrink(3)
    assert (again.num_free, again.total_bytes, len(names(tmp_path))) == (3, 3 << 16, 4)
    with pytest.raises(HostMemoryError, match="--host-memory"):
        again.grow(1 << 40)
    assert (again.num_free, len(names(tmp_path))) == (3, 4)
    again.close(discard=True)


def test_free_extents_that_vanish_or_are_truncated_are_made_anew(tmp_path: Path) -> None:
    made = arena(tmp_path)
    for path in tmp_path.glob("*-free-0000[0-4]"):
        path.unlink()
    os.truncate(tmp_path / "fdcache-t-free-00007", 100)
    (tmp_path / "fdcache-t.arena").unlink()
    extent = str(tmp_path / "fdcache-t-00112233aabbccdd-r0-00000")
    made.assign([extent])
    assert Path(extent).stat().st_size == 1 << 16
    made.make_lost_files()
    assert {each.stat().st_size for each in tmp_path.glob("*-free-*")} == {1 << 16}
    assert made.num_free == len(list(tmp_path.glob("*-free-*"))) == 15
    with pytest.raises(ServiceRunningError, match=r"process \d+"):
        Arena(tmp_path, "t").lock()
    made.close(discard=True)
    assert names(tmp_path) == []


def test_an_extent_keeps_its_memory_when_it_is_assigned_again(tmp_path: Path) -> None:
    made = arena(tmp_path)
    path = str(tmp_path / "fdcache-t-00112233aabbccdd-r0-00000")
    made.assign([path])
    Path(path).write_bytes(b"x" * (1 << 16))
    assert made.num_free == 15
    made.take_back([path])
    assert made.num_free == 16
    assert not Path(path).exists()
    assert sum(each.read_bytes()[:1] == b"x" for each in tmp_path.glob("*-free-*")) == 1
    made.close(discard=True)


def test_files_of_a_dead_service_are_adopted(tmp_path: Path) -> None:
    made = arena(tmp_path)
    made.assign([str(tmp_path / f"fdcache-t-00112233aabbccdd-r{rank}-00000") for rank in (0, 1)])
    (tmp_path / "fdcache-t-free-00099").write_bytes(b"torn")
    incarnation = made.manifest.incarnation
    made.close()
    again = Arena(tmp_path, "t")
    found = again.lock()
    assert found is not None
    assert again.adopt(found) == [("00112233aabbccdd", 0, 0), ("00112233aabbccdd", 1, 0)]
    assert (again.num_free, again.manifest.incarnation) == (14, incarnation)
    again.close(discard=True)
    assert names(tmp_path) == []


def test_an_arena_of_a_live_service_is_refused_with_its_pid(tmp_path: Path) -> None:
    made = arena(tmp_path)
    with pytest.raises(ServiceRunningError, match=r"process \d+"):
        Arena(tmp_path, "t").lock()
    made.close()


@pytest.mark.parametrize("kind", ["arena", "socket"])
def test_a_lock_file_that_its_owner_removes_meanwhile_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def taken() -> Callable[[], None]:
        if kind == "socket":
            return SocketLock(tmp_path / "s.sock").release
        made = Arena(tmp_path, "t")
        made.lock()
        return made.close

    releases, flock = [taken()], fcntl.flock

    def let_go_first(*arguments: Any) -> None:
        while releases:
            releases.pop()()
        flock(*arguments)

    with monkeypatch.context() as planted:
        planted.setattr(fcntl, "flock", let_go_first)
        release = taken()
    with pytest.raises(ServiceRunningError):
        taken()
    release()


def test_who_looks_if_a_service_is_alive_keeps_no_other_from_starting(tmp_path: Path) -> None:
    arena(tmp_path).close()
    with (tmp_path / "fdcache-t.arena").open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (looks, fcntl.LOCK_UN))
        timer.start()
        again = Arena(tmp_path, "t")
        assert again.lock() is not None
        timer.join()
    again.close(discard=True)


def test_a_manifest_that_another_service_has_made_leaks_no_descriptors(tmp_path: Path) -> None:
    made, other = arena(tmp_path), Arena(tmp_path, "t")
    (tmp_path / "fdcache-t.arena").unlink()
    other.lock()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match="unavailable"):
            made.make_lost_files()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    other.close()
    made.close(discard=True)


def test_a_directory_that_cannot_be_written_is_refused_with_its_variable(tmp_path: Path) -> None:
    made = Arena(tmp_path / "gone", "t")
    with pytest.raises(
        ConfigurationError, match=r"^FDCACHE_ARENA_DIR: .*No such file or directory; choose another"
    ):
        made.lock()
    made.close()


def test_too_much_memory_is_refused_with_the_remedy_and_leaves_nothing(tmp_path: Path) -> None:
    made = Arena(tmp_path, "t")
    made.lock()
    with pytest.raises(HostMemoryError, match="--host-memory"):
        made.create(1 << 60)
    made.close()
    assert names(tmp_path) == []


def test_touching_extents_does_not_rebind_other_threads(tmp_path: Path) -> None:
    node = 0 if Path("/sys/devices/system/node/node0/cpulist").exists() else None
    made = Arena(tmp_path, "t", kind=MemoryKind(node))
    made.lock()
    cores, told = os.sched_getaffinity(0), []
    made.create(1 << 20, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 16) for done in range(1, 17)]
    assert os.sched_getaffinity(0) == cores
    assert not any("fdcache-touch" in thread.name for thread in threading.enumerate())
    assert all(each.stat().st_blocks * 512 >= 1 << 16 for each in tmp_path.glob("*-free-*"))
    made.close()


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (8192, 4096),
        (1 << 20, 1 << 16),
        (1 << 28, 1 << 24),
        (1 << 30, 1 << 26),
        (1 << 35, 1 << 26),
        (1 << 40, 1 << 31),
    ],
)
def test_an_arena_has_at_least_16_extents_and_at_most_512_larger_ones(total: int, expected: int) -> None:
    assert extent_bytes(total, huge_pages=False) == expected
