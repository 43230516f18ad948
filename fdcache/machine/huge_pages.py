"""Whether the arena's folder can have huge pages."""

from __future__ import annotations

from pathlib import Path

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_WILLING = {"always", "within_size", "advise", "force"}
_TMPFS, _HUGETLBFS = "tmpfs", "hugetlbfs"


def huge_page_problem(directory: Path, root: Path = Path("/")) -> str | None:
    """Why files of this folder get no huge pages, and the remedy; None when they may. ``root``: of /sys, /proc."""
    kind, options = _mount_of(directory, root / "proc/self/mountinfo")
    if kind == _HUGETLBFS:
        return None
    if kind != _TMPFS:
        return f"FDCACHE_HUGE_PAGES: {directory} is on {kind or 'an unknown file system'}, which has none; use a tmpfs"
    if any(f"huge={word}" in options for word in _WILLING):
        return None
    switch = root / _SWITCH.relative_to("/")
    chosen = switch.read_text().partition("[")[2].partition("]")[0] if switch.exists() else "absent"
    if chosen in _WILLING:
        return None
    return (
        f"FDCACHE_HUGE_PAGES: the kernel gives tmpfs no huge pages ({_SWITCH} is {chosen}); as root: "
        f"echo advise > {_SWITCH}, or mount -o remount,huge=advise {directory}"
    )


def _mount_of(directory: Path, table: Path) -> tuple[str, list[str]]:
    """File system and options of the innermost mount that a folder is in."""
    target = directory.resolve()
    best, found = -1, ("", [""])
    for line in table.read_text().splitlines() if table.exists() else ():
        fields, _, tail = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        kind, _, options = tail.split()[:3]
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), (kind, options.split(","))
    return found
