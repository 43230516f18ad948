"""How much host memory may be promised: what the machine has left, and what its control groups allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes that can still be taken, and which limit says so."""

    nbytes: int
    limit: str


def available_memory(root: Path = Path("/")) -> MemoryBudget:
    """The smallest of the machine's available memory and the room in each control group above this process.

    Memory that the kernel can take back from a group's files counts as room. ``root`` holds proc and sys.
    """
    budgets = [_machine(root), *_group_v2(root), *_group_v1(root)]
    return min(budgets, key=lambda budget: budget.nbytes)


def _machine(root: Path) -> MemoryBudget:
    fields = _fields(root / "proc/meminfo")
    return MemoryBudget(1024 * fields["MemAvailable:"], "available memory of the machine")


def _group_v2(root: Path) -> list[MemoryBudget]:
    return _groups(
        root / "sys/fs/cgroup", _group_path(root, ""), "memory.max", "memory.current", "inactive_file"
    )


def _group_v1(root: Path) -> list[MemoryBudget]:
    return _groups(
        root / "sys/fs/cgroup/memory",
        _group_path(root, "memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    )


def _group_path(root: Path, controller: str) -> str:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") and (controller or not controllers):
            return path.strip("/")
    return ""


def _groups(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[MemoryBudget]:
    """The room in the group and in those above it; inside a container its own group is the mount itself."""
    folder = mount / path
    folders = [folder, *folder.parents] if folder != mount else [mount]
    inside = [each for each in folders if each == mount or mount in each.parents]
    return [
        MemoryBudget(room, f"limit in {each / limit}")
        for each in inside
        if (room := _room(each, limit, usage, reclaimable)) is not None
    ]


def _room(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        text = (folder / limit).read_text().strip()
        if text == "max":
            return None
        used = int((folder / usage).read_text())
        files = _fields(folder / "memory.stat").get(reclaimable, 0)
    except FileNotFoundError:
        return None
    return max(int(text) - used + files, 0)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}
