"""What the machine and its service manager tell this process: memory, folders, whom to notify."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the machine and of the tightest cgroup around this process; None where no limit is known."""

    machine: int | None
    cgroup: int | None


def memory(root: Path = Path("/")) -> Memory:
    """Read the limits from ``/proc`` and ``/sys`` below ``root``."""
    return Memory(_machine_memory(root / "proc/meminfo"), _cgroup_memory(root))


def _machine_memory(meminfo: Path) -> int | None:
    for line in _lines(meminfo):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_memory(root: Path) -> int | None:
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Collect the limits from the cgroup up to the mount; a container may not see its own path."""
    folder = mount / path.strip("/")
    folders = [folder, *folder.parents]
    texts = [_lines(place / name) for place in folders if place == mount or mount in place.parents]
    return [int(lines[0]) for lines in texts if lines and lines[0].isdigit()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def runtime_base() -> Path | None:
    """The user's own runtime folder, where the session manager made one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) if base else None


def config_base() -> Path:
    """Where the user's configuration stands."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base) if base else Path.home() / ".config"


def notify_socket() -> str | None:
    """The socket on which a service manager hears of readiness (the protocol of sd_notify)."""
    return os.environ.get("NOTIFY_SOCKET") or None
