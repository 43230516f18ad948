"""Arenas in a folder: of this service, of living others, and of dead ones whose memory nobody uses."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fdcache.errors import ServiceRunningError
from fdcache.node.address import is_folder
from fdcache.server.arena import Manifest

_FILE = re.compile(r"fdcache-([0-9a-z]+)(?:\.arena|-.+)")


@dataclass(frozen=True, slots=True)
class FoundArena:
    """One arena: its files' bytes; ``pid`` and ``address`` as its manifest has them, 0 and empty without one."""

    name: str
    directory: Path
    nbytes: int
    pid: int
    address: str
    alive: bool

    @property
    def words(self) -> str:
        """Whose it is."""
        owner = f"process {self.pid}" if self.pid else "an unknown process"
        return f"{owner} at {self.address}" if self.address else owner

    @property
    def size(self) -> str:
        """How much it has, in words."""
        return f"{self.nbytes / 2**20:.0f} MiB"

    @property
    def remedy(self) -> str:
        """What to do about a dead one."""
        recover = f"fdcache serve --socket {self.address} takes it over; " if self.address else ""
        return f"{recover}fdcache init --clean-arenas removes it"


@dataclass(frozen=True, slots=True)
class ForeignArena:
    """An arena of another user, who alone can tell whether its service is alive."""

    name: str
    nbytes: int
    uid: int


def find_arenas(directory: Path) -> list[FoundArena]:
    """Return the arenas in a folder that this user may read; empty where it does not exist."""
    return [each for each in _arenas(directory) if isinstance(each, FoundArena)]


def foreign_arenas(directory: Path) -> list[ForeignArena]:
    """Return the arenas in a folder that ``find_arenas`` passes over."""
    return [each for each in _arenas(directory) if isinstance(each, ForeignArena)]


def _arenas(directory: Path) -> Iterator[FoundArena | ForeignArena]:
    if not is_folder(directory):
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
                continue  # it has just been taken away, or the folder may be listed and not entered
            nbytes += status.st_size
            if status.st_uid != os.geteuid() and not os.access(path, os.R_OK | os.W_OK):
                owner = status.st_uid
        yield _look_at(directory, name, nbytes) if owner is None else ForeignArena(name, nbytes, owner)


def _look_at(directory: Path, name: str, nbytes: int) -> FoundArena:
    path = directory / f"fdcache-{name}.arena"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        manifest = Manifest(0, 0, 0, 0)
    with _locked(path) as got:
        return FoundArena(name, directory, nbytes, manifest.pid, manifest.address, alive=not got)


@contextmanager
def _locked(manifest: Path) -> Iterator[bool]:
    """Whether nobody else holds the manifest, which is held meanwhile; one that is not there is nobody's."""
    try:
        fd = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def remove_arena(arena: FoundArena) -> None:
    """Take a dead arena's files away. Raises ``ServiceRunningError`` with the process id when it is alive by now."""
    manifest = arena.directory / f"fdcache-{arena.name}.arena"
    with _locked(manifest) as got:
        if not got:
            raise ServiceRunningError(f"{manifest}: the arena belongs to {arena.words}, which is alive")
        for path in arena.directory.glob(f"fdcache-{arena.name}-*"):
            path.unlink(missing_ok=True)
        manifest.unlink(missing_ok=True)
