"""Arenas on this machine, of running services and of those that have ended."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fdcache.errors import ServiceRunningError
from fdcache.service.server.arena import NO_MANIFEST, read_manifest
from fdcache.service.server.lock_file import open_locked
from fdcache.service.wire.address import is_directory

_FILE = re.compile(r"fdcache-([0-9a-f]{8})(?:\.arena|-(?:free-\d+|[0-9a-f]{16}[-.].+))")
"""The folder may also have the live files of clients, files of a storage tier, and those of other programs."""


@dataclass(frozen=True, slots=True)
class FoundArena:
    """An arena on this machine. ``pid`` and ``address`` are those of its manifest; 0 and empty without one."""

    name: str
    directory: Path
    nbytes: int
    pid: int
    address: str
    alive: bool

    @property
    def words(self) -> str:
        """Owner, for messages."""
        owner = f"process {self.pid}" if self.pid else "an unknown process"
        return f"{owner} at {self.address}" if self.address else owner

    @property
    def size(self) -> str:
        """Size, for messages."""
        return f"{self.nbytes / 2**20:.0f} MiB"

    @property
    def remedy(self) -> str:
        """Remedy for a dead one."""
        recover = f"fdcache serve --socket {self.address} takes it over; " if self.address else ""
        return f"{recover}fdcache reset arena removes it"


@dataclass(frozen=True, slots=True)
class ForeignArena:
    """An arena of another user. This user cannot find out if its service is alive."""

    name: str
    nbytes: int
    uid: int


def find_arenas(directory: Path) -> list[FoundArena]:
    """Return the arenas in a directory that this user may read; none if it does not exist."""
    return [each for each in _arenas(directory) if isinstance(each, FoundArena)]


def foreign_arenas(directory: Path) -> list[ForeignArena]:
    """Return the arenas in a directory that this user may not read."""
    return [each for each in _arenas(directory) if isinstance(each, ForeignArena)]


def _arenas(directory: Path) -> Iterator[FoundArena | ForeignArena]:
    if not is_directory(directory):
        return
    files: dict[str, list[Path]] = {}
    for path in directory.glob("fdcache-*"):
        if match := _FILE.fullmatch(path.name):
            files.setdefault(match[1], []).append(path)
    for name, paths in sorted(files.items()):
        nbytes, owner = 0, None
        for path in paths:
            try:
                status = path.stat()
            except (FileNotFoundError, PermissionError):
                continue  # removed meanwhile, or the directory may be listed and not entered
            nbytes += status.st_size
            if status.st_uid != os.geteuid() and not os.access(path, os.R_OK | os.W_OK):
                owner = status.st_uid
        yield _look_at(directory, name, nbytes) if owner is None else ForeignArena(name, nbytes, owner)


def _look_at(directory: Path, name: str, nbytes: int) -> FoundArena:
    path = directory / f"fdcache-{name}.arena"
    manifest = read_manifest(path) or NO_MANIFEST
    alive = _is_locked(path)
    return FoundArena(name, directory, nbytes, manifest.pid, manifest.address, alive)


def _is_locked(manifest: Path) -> bool:
    """Return True if a live service holds the manifest."""
    try:
        fd = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: several may look at once
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_arena(arena: FoundArena) -> None:
    """Remove the files of a dead arena. Raises ``ServiceRunningError`` with the process id if it is alive by now."""
    manifest = arena.directory / f"fdcache-{arena.name}.arena"
    try:
        fd = open_locked(manifest)  # made if it is missing: no service begins meanwhile
    except BlockingIOError:
        raise ServiceRunningError(f"{manifest}: the arena belongs to {arena.words}, which is alive") from None
    try:
        for path in arena.directory.glob(f"fdcache-{arena.name}-*"):
            if path.is_file():
                path.unlink(missing_ok=True)
        manifest.unlink(missing_ok=True)
    finally:
        os.close(fd)
