"""Memory limits and budgets of machine and control groups, huge pages, NUMA nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.errors import HostMemoryError
from fdcache.machine.memory import (
    MemoryLimits,
    available_memory,
    huge_page_problem,
    memory_limits,
    node_cores,
    numa_nodes,
)

GIB = 1 << 30


def test_memory_limit_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert memory_limits(tmp_path) == MemoryLimits(None, None)
    write("proc/meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB\n")
    write("proc/self/cgroup", "0::/pod/container\n")
    write("sys/fs/cgroup/pod/container/memory.max", "max\n")
    assert memory_limits(tmp_path) == MemoryLimits(1 << 20, None)
    write("sys/fs/cgroup/pod/memory.max", "4096\n")
    write("sys/fs/cgroup/memory.max", "8192\n")
    assert memory_limits(tmp_path) == MemoryLimits(1 << 20, 4096)
    write("proc/self/cgroup", "4:cpu,memory:/job\n1:name=systemd:/x\n")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2048\n")
    assert memory_limits(tmp_path) == MemoryLimits(1 << 20, 2048)


def test_memory_of_this_machine_is_known() -> None:
    machine = memory_limits().machine
    assert machine is not None
    assert machine > 1 << 20


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


def test_available_memory_is_the_machines_without_a_group_limit(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/\n")
    assert available_memory(tmp_path).nbytes == 8 * GIB
    group_v2(tmp_path, "", None)
    assert available_memory(tmp_path).nbytes == 8 * GIB


def test_available_memory_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/a/b\n")
    group_v2(tmp_path, "a", 3 * GIB, used=2 * GIB)
    group_v2(tmp_path, "a/b", 4 * GIB, used=2 * GIB)
    budget = available_memory(tmp_path)
    assert budget.nbytes == GIB
    assert budget.limit.endswith("cgroup/a/memory.max")


def test_inactive_file_cache_counts_as_available(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/a\n")
    group_v2(tmp_path, "a", 3 * GIB, used=2 * GIB, files=GIB)
    assert available_memory(tmp_path).nbytes == 2 * GIB


def test_container_reads_its_group_at_the_mount(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "0::/not/visible/here\n")
    group_v2(tmp_path, "", 2 * GIB, used=GIB)
    assert available_memory(tmp_path).nbytes == GIB


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    machine(tmp_path, 8 * GIB, "4:memory:/job\n1:cpu:/\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory/job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\n")
    assert available_memory(tmp_path).nbytes == GIB


@pytest.mark.parametrize(
    ("mount", "switch", "remedy"),
    [
        ("tmpfs tmpfs rw", "always within_size advise [never] deny force", "echo advise > /sys"),
        ("tmpfs tmpfs rw,huge=advise", "[never]", None),
        ("tmpfs tmpfs rw", "[advise] never", None),
        ("hugetlbfs none rw", "[never]", None),
        ("ext4 /dev/sda rw", "[advise]", "on ext4"),
    ],
)
def test_huge_page_problem_names_the_remedy(
    tmp_path: Path, mount: str, switch: str, remedy: str | None
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    table = f"1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 0:2 / /arena rw - {mount}\n"
    (tmp_path / "proc/self/mountinfo").write_text(table)
    place = tmp_path / "sys/kernel/mm/transparent_hugepage"
    place.mkdir(parents=True)
    (place / "shmem_enabled").write_text(switch)
    problem = huge_page_problem(Path("/arena"), tmp_path)
    assert (problem is None) if remedy is None else (problem is not None and remedy in problem)


def test_nodes_have_cores_and_others_are_refused() -> None:
    assert all(node_cores(node) for node in numa_nodes())
    with pytest.raises(HostMemoryError, match="no NUMA node 4095; unset it"):
        node_cores(4095)
