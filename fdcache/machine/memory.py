"""Host memory: limits of the machine and its control groups, huge pages, NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fdcache.errors import HostMemoryError

SHARE_OF_MEMORY = 4
"""By default a quarter of the memory that is available holds blocks."""

_NODES = Path("/sys/devices/system/node")
_HUGE_PAGE_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGES_ALLOWED = {"always", "within_size", "advise", "force"}


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Total bytes of the machine and of the tightest control group; None where there is no known limit."""

    machine: int | None
    cgroup: int | None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that are still available, and the limit that decides it, in words."""

    nbytes: int
    limit: str


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Folder and file names of one version of control groups."""

    mount: str
    limit: str
    usage: str
    reclaimable: str


_CGROUP_V1 = _Hierarchy(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_CGROUP_V2 = _Hierarchy("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class _ControlGroup:
    """A control group above this process that limits memory."""

    folder: Path
    files: _Hierarchy
    limit: int

    @property
    def budget(self) -> MemoryBudget:
        """Bytes left below the limit, where the inactive file cache counts as free."""
        used = sum(map(int, _lines(self.folder / self.files.usage)))
        cached = _counters(self.folder / "memory.stat").get(self.files.reclaimable, 0)
        return MemoryBudget(max(self.limit - used + cached, 0), f"limit in {self.folder / self.files.limit}")


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """Read the total memory. ``root`` holds proc and sys."""
    total = _counters(root / "proc/meminfo").get("MemTotal:")
    groups = [group.limit for group in _control_groups(root)]
    return MemoryLimits(None if total is None else 1024 * total, min(groups, default=None))


def available_memory(root: Path = Path("/")) -> MemoryBudget:
    """Return the tightest of the machine's available memory and the room in each control group.

    ``root`` holds proc and sys.
    """
    machine = 1024 * _counters(root / "proc/meminfo")["MemAvailable:"]
    budgets = [MemoryBudget(machine, "available memory of the machine")]
    budgets += [group.budget for group in _control_groups(root)]
    return min(budgets, key=lambda budget: budget.nbytes)


def _control_groups(root: Path) -> Iterator[_ControlGroup]:
    """Yield the groups of this process that have a memory limit, from its own up to the mount.

    A container may not see the folder of its own group; its limit is then at the mount.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _CGROUP_V1 if controllers else _CGROUP_V2
        mount = root / files.mount
        own = mount / path.strip("/")
        for folder in (own, *own.parents):
            limit = _lines(folder / files.limit) if folder.is_relative_to(mount) else []
            if limit and limit[0].strip().isdigit():
                yield _ControlGroup(folder, files, int(limit[0]))


def _counters(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def numa_nodes() -> list[int]:
    """Return the numbers of this machine's NUMA nodes; empty where the kernel does not say."""
    return sorted(int(path.name.removeprefix("node")) for path in _NODES.glob("node[0-9]*"))


def node_cores(node: int) -> set[int]:
    """Return the cores of a NUMA node. Raises ``HostMemoryError`` if there is no such node."""
    path = _NODES / f"node{node}/cpulist"
    if not path.exists():
        raise HostMemoryError(f"FDCACHE_NUMA_NODE: this machine has no NUMA node {node}; unset it")
    cores: set[int] = set()
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def huge_page_problem(directory: Path, root: Path = Path("/")) -> str | None:
    """Explain why files in ``directory`` get no huge pages, with the remedy; None if they do.

    ``root`` holds proc and sys.
    """
    kind, options = _mount_of(directory, root / "proc/self/mountinfo")
    if kind == "hugetlbfs":
        return None
    if kind != "tmpfs":
        found = kind or "an unknown file system"
        return f"FDCACHE_HUGE_PAGES: {directory} is on {found}, which has no huge pages; use a tmpfs"
    if any(f"huge={word}" in options for word in _HUGE_PAGES_ALLOWED):
        return None
    switch = root / _HUGE_PAGE_SWITCH.relative_to("/")
    chosen = switch.read_text().partition("[")[2].partition("]")[0] if switch.exists() else "absent"
    if chosen in _HUGE_PAGES_ALLOWED:
        return None
    return (
        f"FDCACHE_HUGE_PAGES: the kernel gives tmpfs no huge pages ({_HUGE_PAGE_SWITCH} is {chosen}); as root: "
        f"echo advise > {_HUGE_PAGE_SWITCH}, or mount -o remount,huge=advise {directory}"
    )


def _mount_of(directory: Path, table: Path) -> tuple[str, list[str]]:
    """Return the file system type and options of the innermost mount that contains ``directory``."""
    target = directory.resolve()
    best, found = -1, ("", [""])
    for line in _lines(table):
        fields, _, tail = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        kind, _, options = tail.split()[:3]
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), (kind, options.split(","))
    return found
