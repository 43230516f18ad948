"""The host arena and the memory it may promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fdcache.controller import host_arena
from fdcache.controller.host_arena import HostArena
from fdcache.controller.memory_budget import available_memory
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import HostMemoryError
from tests.swaps import uniform_layout

GIB = 1 << 30


def test_records_are_page_aligned_apart_and_within_one_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = uniform_layout()
    monkeypatch.setattr(host_arena, "EXTENT_BYTES", 3 * layout.record_bytes + 1)
    arena = HostArena(layout, 10, CpuDevice())
    assert {extent.nbytes for extent in arena.extents} == {3 * layout.record_bytes}
    starts = [arena.table.record(slot).ctypes.data for slot in range(10)]
    assert all(start % 4096 == 0 for start in starts)
    for slot, start in enumerate(starts):
        extent = arena.extents[slot // 3]
        assert extent.address <= start
        assert start + layout.record_bytes <= extent.address + extent.nbytes
        arena.table.record(slot)[:] = slot
    assert all((arena.table.record(slot) == slot).all() for slot in range(10))
    for slot in (-1, 10):
        with pytest.raises(IndexError):
            arena.table.record(slot)


def test_a_record_view_keeps_the_arena_alive() -> None:
    view = HostArena(uniform_layout(), 2, CpuDevice()).table.record(1)
    view[:] = 7
    assert int(np.sum(view)) == 7 * len(view)


def test_refuses_no_blocks() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        HostArena(uniform_layout(), 0, CpuDevice())


def test_says_how_many_blocks_would_fit() -> None:
    with pytest.raises(HostMemoryError, match=r"ask for at most \d+ blocks"):
        HostArena(uniform_layout(), 1 << 40, CpuDevice())


def machine(root: Path, available: int, groups: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)


def group_v2(root: Path, path: str, limit: int | None, used: int = 0, files: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")


def test_the_machine_limits_when_no_group_does(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/\n")
    assert available_memory(tmp_path).nbytes == 8 * GIB
    group_v2(tmp_path, "", None)
    assert available_memory(tmp_path).nbytes == 8 * GIB


def test_the_tightest_group_above_the_process_limits(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/a/b\n")
    group_v2(tmp_path, "a", 3 * GIB, used=2 * GIB)
    group_v2(tmp_path, "a/b", 4 * GIB, used=2 * GIB)
    budget = available_memory(tmp_path)
    assert budget.nbytes == GIB
    assert budget.limit.endswith("cgroup/a/memory.max")


def test_files_that_the_kernel_can_drop_count_as_room(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/a\n")
    group_v2(tmp_path, "a", 3 * GIB, used=2 * GIB, files=GIB)
    assert available_memory(tmp_path).nbytes == 2 * GIB


def test_inside_a_container_the_group_is_the_mount(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/not/visible/here\n")
    group_v2(tmp_path, "", 2 * GIB, used=GIB)
    assert available_memory(tmp_path).nbytes == GIB


def test_version_1_groups(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "4:memory:/job\n1:cpu:/\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert available_memory(tmp_path).nbytes == GIB
