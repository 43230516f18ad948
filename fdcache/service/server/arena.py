"""Arena: the host memory of a service, as files of equal size in a tmpfs."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from fdcache.errors import ConfigurationError, HostMemoryError, ServiceRunningError
from fdcache.machine.memory import available_memory, node_cores
from fdcache.service.wire.address import is_directory

_PAGE = 4096
_MADV_POPULATE_WRITE = 23
_HUGE_PAGE = 2 << 20
_FEWEST_EXTENTS = 16
_SHARE_OF_TABLES = 128  # for presence tables: 32 bytes for each record of 4 KiB or more
_TOUCH_THREADS = 8
_SHARE_OF_MEMORY = 4  # by default the arena takes a quarter of the free memory


class Manifest(msgspec.Struct, frozen=True):
    """Description of an arena, kept in its lock file for the service that recovers it."""

    pid: int
    incarnation: int
    extent_bytes: int
    extents: int
    address: str = ""


class Arena:
    """Extents: files of equal size in ``directory``, all allocated at the start.

    A free extent is named fdcache-NAME-free-INDEX, one of a namespace fdcache-NAME-NAMESPACE-rRANK-INDEX. Renaming a
    file gives its memory to a namespace, or takes it back.
    """

    def __init__(self, directory: Path, name: str, address: str = "") -> None:
        self.directory = directory
        self._address = address
        self.prefix = f"fdcache-{name}"
        self._manifest_path = directory / f"{self.prefix}.arena"
        self._lock_fd = -1
        self.manifest = Manifest(0, 0, 0, 0)
        self._free: list[int] = []
        self._next_index = 0

    # --- life ---------------------------------------------------------------------------------------------

    def lock(self) -> Manifest | None:
        """Take the lock. Return the manifest of an earlier, dead service if there is one.

        Raises ``ServiceRunningError`` with the process id of a live service, and ``ConfigurationError`` if the
        directory cannot be written.
        """
        try:
            self._lock_fd = os.open(self._manifest_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"FDCACHE_ARENA_DIR: {self._manifest_path} cannot be written: {error.strerror}; "
                "choose another directory that this user may write, a tmpfs"
            ) from error
        text = self._manifest_path.read_bytes()
        try:
            found = msgspec.json.decode(text, type=Manifest)
        except msgspec.DecodeError:
            found = None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            self._lock_fd = -1
            pid = f"process {found.pid}" if found else "another process"
            raise ServiceRunningError(
                f"{self._manifest_path}: the arena belongs to {pid}, which is alive; stop it or use another "
                "--socket"
            ) from None
        return found

    def create(
        self,
        wanted: int,
        extent_size: int,
        *,
        numa_node: int | None = None,
        huge_pages: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Create and touch the extents, after removing older files.

        ``wanted`` bytes; 0 for a quarter of the free memory. Raises ``HostMemoryError`` if memory, control group or
        directory have too little, and then leaves nothing behind.
        """
        self.clean()
        total = wanted or self.affordable(wanted=None) // _SHARE_OF_MEMORY
        size = extent_bytes(total, extent_size, huge_pages)
        count = total // size
        self._check_budget(count * size + count * size // _SHARE_OF_TABLES)
        self.manifest = Manifest(os.getpid(), uuid.uuid4().int >> 65, size, count, self._address)
        self._write_manifest()
        try:
            paths = [self._free_path(index) for index in range(count)]
            for done, _ in enumerate(_allocate_all(paths, size, numa_node, huge_pages), 1):
                progress(done, count)
        except OSError as error:
            self.clean()
            raise HostMemoryError(
                f"{self.directory}: the system refused {count * size} bytes: {error}; ask for less with "
                "--host-memory, or enlarge the directory's file system"
            ) from error
        self._free = list(range(count))[::-1]
        self._next_index = count

    def adopt(self, manifest: Manifest) -> list[tuple[str, int, int]]:
        """Take over the files of a dead service. Return namespace, rank and index of each assigned extent."""
        self.manifest = msgspec.structs.replace(manifest, pid=os.getpid(), address=self._address)
        self._write_manifest()
        assigned = []
        for kind in ("table", "ring"):  # each recovered namespace, and each client, gets its own
            for path in self.directory.glob(f"{self.prefix}-*.{kind}"):
                path.unlink()
        for path, match in self._files():
            if path.stat().st_size != manifest.extent_bytes:
                path.unlink()
            elif match["free"] is not None:
                self._free.append(int(match["free"]))
            elif match["namespace"]:
                assigned.append((match["namespace"], int(match["rank"]), int(match["index"])))
        self._free.sort(reverse=True)
        self._next_index = max(self._free, default=-1) + 1
        return sorted(assigned)

    def clean(self) -> None:
        """Remove every file except the manifest."""
        for path in self.directory.glob(f"{self.prefix}-*"):
            path.unlink()
        self._free = []

    def close(self) -> None:
        """Remove every file and release the lock."""
        if self._lock_fd < 0:
            return
        self.clean()
        self._manifest_path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def abandon(self) -> None:
        """Release the lock and leave the memory to the next service, as a killed service does."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- extents ------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Free extents."""
        return len(self._free)

    @property
    def total_bytes(self) -> int:
        """Bytes of all extents."""
        return self.manifest.extents * self.manifest.extent_bytes

    def assign(self, paths: list[str]) -> None:
        """Rename free extents to ``paths``."""
        for path in paths:
            self._free_path(self._free.pop()).rename(path)

    def take_back(self, paths: list[str]) -> None:
        """Make extents free whose headers were cleared."""
        for path in paths:
            Path(path).rename(self._free_path(self._next_index))
            self._free.append(self._next_index)
            self._next_index += 1

    def _free_path(self, index: int) -> Path:
        return self.directory / f"{self.prefix}-free-{index:05d}"

    def _files(self) -> Iterator[tuple[Path, re.Match[str]]]:
        pattern = re.compile(
            re.escape(self.prefix)
            + r"-(?:free-(?P<free>\d+)|(?P<namespace>[0-9a-f]{16})-r(?P<rank>\d+)-(?P<index>\d+))"
        )
        for path in self.directory.glob(f"{self.prefix}-*"):
            if match := pattern.fullmatch(path.name):
                yield path, match

    # --- budget -------------------------------------------------------------------------------------------

    def affordable(self, wanted: int | None = None) -> int:
        """Return the bytes that memory, control groups and the directory can all give now."""
        return min(available_memory().nbytes, self._folder_bytes())

    def _folder_bytes(self) -> int:
        figures = os.statvfs(self.directory)
        return figures.f_bavail * figures.f_frsize

    def _check_budget(self, needed: int) -> None:
        folder = self._folder_bytes()
        if needed > folder:
            raise HostMemoryError(
                f"{self.directory} has room for {folder} bytes, not for {needed}; give the container a larger one "
                "(docker run --shm-size, an emptyDir of medium Memory), set FDCACHE_ARENA_DIR, or ask for less "
                "with --host-memory"
            )
        budget = available_memory()
        if needed > budget.nbytes:
            raise HostMemoryError(
                f"the arena needs {needed} bytes, but only {budget.nbytes} are left ({budget.limit}); ask for "
                "less with --host-memory, or raise that limit"
            )

    def _write_manifest(self) -> None:
        data = msgspec.json.encode(self.manifest)
        os.pwrite(self._lock_fd, data, 0)
        os.ftruncate(self._lock_fd, len(data))


def arena_name(socket: Path) -> str:
    """Return the name of the arena for a socket."""
    return hashlib.sha256(str(socket).encode()).hexdigest()[:8]


def extent_bytes(total: int, most: int, huge_pages: bool) -> int:
    """Return the size of an extent: at most ``most``, a multiple of a page, and at most 1/16 of the arena.

    Raises ``HostMemoryError`` if the arena is smaller than a page.
    """
    page = _HUGE_PAGE if huge_pages else _PAGE
    size = max(min(most, total // _FEWEST_EXTENTS) // page * page, page)
    if total < size:
        raise HostMemoryError(
            f"an arena of {total} bytes is smaller than an extent of {size}; give more --host-memory"
        )
    return size


def _allocate_all(paths: list[Path], size: int, numa_node: int | None, huge_pages: bool) -> Iterator[None]:
    """Create the files, in parallel since the system clears their pages. Yields after each one, in order."""
    cores = None if numa_node is None else node_cores(numa_node)
    pool = ThreadPoolExecutor(min(_TOUCH_THREADS, os.cpu_count() or 1), "fdcache-touch")
    try:
        yield from pool.map(partial(_allocate, size=size, cores=cores, huge_pages=huge_pages), paths)
    finally:
        pool.shutdown(cancel_futures=True)


def _allocate(path: Path, *, size: int, cores: set[int] | None, huge_pages: bool) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)  # of this thread alone: the kernel takes memory near its core
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        (_touch_huge if huge_pages else _touch)(fd, size)
    finally:
        os.close(fd)


def _touch(fd: int, size: int) -> None:
    os.posix_fallocate(fd, 0, size)


def _touch_huge(fd: int, size: int) -> None:
    """Touch the memory through a mapping that asks for huge pages: the first touch decides the size of a page."""
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size, mmap.MAP_SHARED) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)


_FILE = re.compile(r"fdcache-([0-9a-z]+)(?:\.arena|-.+)")


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
        return f"{recover}fdcache init --clean-arenas removes it"


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
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        manifest = Manifest(0, 0, 0, 0)
    with _locked(path) as got:
        return FoundArena(name, directory, nbytes, manifest.pid, manifest.address, alive=not got)


@contextmanager
def _locked(manifest: Path) -> Iterator[bool]:
    """Lock the manifest meanwhile. Yields False if a live service holds it, True otherwise and if there is none."""
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
    """Remove the files of a dead arena. Raises ``ServiceRunningError`` with the process id if it is alive by now."""
    manifest = arena.directory / f"fdcache-{arena.name}.arena"
    with _locked(manifest) as got:
        if not got:
            raise ServiceRunningError(f"{manifest}: the arena belongs to {arena.words}, which is alive")
        for path in arena.directory.glob(f"fdcache-{arena.name}-*"):
            path.unlink(missing_ok=True)
        manifest.unlink(missing_ok=True)
