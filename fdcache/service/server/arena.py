"""Arena: the host memory of a service, as files of equal size in a tmpfs."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fdcache.errors import ConfigurationError, HostMemoryError, ServiceRunningError
from fdcache.machine.decoding import MALFORMED
from fdcache.machine.memory import SHARE_OF_MEMORY, available_memory, node_cores
from fdcache.service.server.lock_file import open_locked

log = logging.getLogger("fdcache.service.server")

_PAGE = 4096
_MANIFEST_BYTES = 1024
_MOST_MANIFEST_BYTES = 65536
_MADV_POPULATE_WRITE = 23
_HUGE_PAGE = 2 << 20
_EXTENT_BYTES = 64 << 20
_FEWEST_EXTENTS = 16
MOST_EXTENTS = 512
"""Of a new arena; more memory gives larger extents, and so room for larger records."""

_SHARE_OF_TABLES = 128  # for presence tables: 32 bytes for each record of 4 KiB or more
_TOUCH_THREADS = 8


class Manifest(msgspec.Struct, frozen=True):
    """Description of an arena, kept in its lock file for the service that recovers it."""

    pid: int
    incarnation: Annotated[int, Meta(ge=0)]
    extent_bytes: Annotated[int, Meta(ge=_PAGE, multiple_of=_PAGE)]
    extents: Annotated[int, Meta(ge=1)]
    address: str = ""


NO_MANIFEST = Manifest(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Kind of memory that new extents have."""

    numa_node: int | None = None
    huge_pages: bool = False


class Arena:
    """Extents: files of equal size in ``directory``, all allocated at the start.

    A free extent is named fdcache-NAME-free-INDEX, one of a namespace fdcache-NAME-NAMESPACE-rRANK-INDEX. Renaming a
    file gives its memory to a namespace, or takes it back.
    """

    def __init__(
        self, directory: Path, name: str, address: str = "", kind: MemoryKind = MemoryKind()
    ) -> None:
        self.directory = directory
        self._address = address
        self._kind = kind
        self.prefix = f"fdcache-{name}"
        self._manifest_path = directory / f"{self.prefix}.arena"
        self._lock_fd = -1
        self.manifest = NO_MANIFEST
        self._free: list[int] = []
        self._next_index = 0
        self.is_new = False
        """True for memory that this arena has created, so that no earlier service left blocks in it."""

    # --- life ---------------------------------------------------------------------------------------------

    def lock(self) -> Manifest | None:
        """Take the lock. Return the manifest of an earlier service if it left memory.

        Raises ``ServiceRunningError`` with the process id of a live service, and ``ConfigurationError`` if the
        directory cannot be written.
        """
        try:
            self._lock_fd = open_locked(self._manifest_path)
        except BlockingIOError:
            found = read_manifest(self._manifest_path)
            pid = f"process {found.pid}" if found else "another process"
            raise ServiceRunningError(
                f"{self._manifest_path}: the arena belongs to {pid}, which is alive; stop it or use another "
                "--socket"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"FDCACHE_ARENA_DIR: {self._manifest_path} cannot be written: {error.strerror}; "
                "choose another directory that this user may write, a tmpfs"
            ) from error
        return read_manifest(self._manifest_path) or self._infer_manifest()

    def _infer_manifest(self) -> Manifest | None:
        """Return the manifest that the extents of an earlier service need; None if it left none."""
        sizes = Counter(path.stat().st_size for path, _ in self._files())
        sizes.pop(0, None)
        if not sizes:
            return None
        size, count = sizes.most_common(1)[0]
        log.warning(
            "%s is missing or damaged: %d extents are recovered without it", self._manifest_path, count
        )
        return decode_manifest(msgspec.json.encode(Manifest(0, _new_incarnation(), size, count)))

    def create(self, wanted: int, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Create and touch the extents, after removing older files.

        ``wanted`` bytes; 0 for a quarter of the free memory. Raises ``HostMemoryError`` if memory, control group or
        directory have too little; older files stay then, unless the system refuses what it has promised.
        """
        held = sum(path.stat().st_size for path, _ in self._files())
        total = wanted or (self.affordable() + held) // SHARE_OF_MEMORY
        size = extent_bytes(total, self._kind.huge_pages)
        count = total // size
        self._check_budget(count * size, held)
        self._remove_files()
        self.is_new = True
        self.manifest = Manifest(os.getpid(), _new_incarnation(), size, count, self._address)
        self._write_manifest()
        self._allocate(range(count), progress)
        self._free = list(range(count))[::-1]
        self._next_index = count

    def adopt(self, manifest: Manifest) -> list[tuple[str, int, int]]:
        """Take over the files of an earlier service. Return namespace, rank and index of each assigned extent."""
        assigned = []
        for kind in ("table", "ring", "new"):  # each recovered namespace, and each client, gets its own
            for path in self.directory.glob(f"{self.prefix}-*.{kind}"):
                path.unlink()
        for path, match in self._files():
            if path.stat().st_size != manifest.extent_bytes:
                path.unlink()
            elif match["free"] is not None:
                self._free.append(int(match["free"]))
            else:
                assigned.append((match["namespace"], int(match["rank"]), int(match["index"])))
        self._free.sort(reverse=True)
        self._next_index = max(self._free, default=-1) + 1
        self.manifest = msgspec.structs.replace(
            manifest, pid=os.getpid(), address=self._address, extents=len(self._free) + len(assigned)
        )
        self._write_manifest()
        return sorted(assigned)

    def grow(self, extents: int, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Add free extents until there are ``extents`` in all. Raises ``HostMemoryError``, and then adds none."""
        count = extents - self.manifest.extents
        self._check_budget(count * self.manifest.extent_bytes, 0)
        new = range(self._next_index, self._next_index + count)
        self._allocate(new, progress)
        self._free = sorted([*self._free, *new], reverse=True)
        self._next_index += count
        self._set_extents(extents)

    def shrink(self, extents: int) -> None:
        """Remove free extents until there are ``extents`` in all, or no free one is left."""
        while self._free and self.manifest.extents > extents:
            self._free_path(self._free.pop(0)).unlink(missing_ok=True)
            self._set_extents(self.manifest.extents - 1)

    def _set_extents(self, extents: int) -> None:
        self.manifest = msgspec.structs.replace(self.manifest, extents=extents)
        self._write_manifest()

    def close(self, *, discard: bool = False) -> None:
        """Release the lock. The memory stays for the next service, unless ``discard`` asks to remove it."""
        if self._lock_fd < 0:
            return
        if discard:
            self._remove_files()
        if not os.fstat(self._lock_fd).st_size or discard:
            self._manifest_path.unlink(missing_ok=True)  # nobody needs it to find memory
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_files(self) -> None:
        """Remove every file except the manifest."""
        for path in self.directory.glob(f"{self.prefix}-*"):
            if path.is_file():
                path.unlink(missing_ok=True)
        self._free = []

    def _allocate(self, indices: Sequence[int], progress: Callable[[int, int], None]) -> None:
        """Create and touch free extents. Raises ``HostMemoryError``, and then creates none."""
        paths = [self._free_path(index) for index in indices]
        try:
            for done, _ in enumerate(_allocate_all(paths, self.manifest.extent_bytes, self._kind), 1):
                progress(done, len(paths))
        except OSError as error:
            for path in paths:
                path.unlink(missing_ok=True)
            raise HostMemoryError(
                f"{self.directory}: the system refused {len(paths) * self.manifest.extent_bytes} bytes: {error}; "
                "ask for less with --host-memory, or enlarge the directory's file system"
            ) from error

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
        """Rename free extents to ``paths``. Raises ``HostMemoryError`` if one vanished and cannot be made anew."""
        chosen = self._free[-len(paths) :][::-1]
        self._make_lost(chosen)
        for index, path in zip(chosen, paths, strict=True):
            self._free_path(index).rename(path)
            self._free.pop()

    def take_back(self, paths: list[str]) -> None:
        """Make extents free whose headers were cleared."""
        for path in paths:
            with suppress(FileNotFoundError):  # it vanished: the free extent is made anew when it is needed
                Path(path).rename(self._free_path(self._next_index))
            self._free.append(self._next_index)
            self._next_index += 1

    def make_lost_files(self) -> None:
        """Make the manifest and the free extents anew that others removed or truncated.

        Raises ``HostMemoryError`` if there is no room for them.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        if not os.fstat(self._lock_fd).st_nlink:
            fd = open_locked(self._manifest_path, patience=0)
            self._unlock()
            self._lock_fd = fd
            self._write_manifest()
            log.warning("%s vanished and was written again", self._manifest_path)
        self._make_lost(self._free)

    def _make_lost(self, indices: Sequence[int]) -> None:
        lost = [index for index in indices if not self._is_whole(self._free_path(index))]
        if not lost:
            return
        for index in lost:
            self._free_path(index).unlink(missing_ok=True)
        self._allocate(lost, lambda done, total: None)
        log.warning("%d free extents vanished from %s and were made anew", len(lost), self.directory)

    def _is_whole(self, path: Path) -> bool:
        try:
            return path.stat().st_size == self.manifest.extent_bytes
        except OSError:
            return False

    def _free_path(self, index: int) -> Path:
        return self.directory / f"{self.prefix}-free-{index:05d}"

    def _files(self) -> Iterator[tuple[Path, re.Match[str]]]:
        """Yield the extents of this user, and the parts of their names."""
        pattern = re.compile(
            re.escape(self.prefix)
            + r"-(?:free-(?P<free>\d+)|(?P<namespace>[0-9a-f]{16})-r(?P<rank>\d+)-(?P<index>\d+))"
        )
        for path in self.directory.glob(f"{self.prefix}-*"):
            if (match := pattern.fullmatch(path.name)) and _is_own_file(path):
                yield path, match

    # --- budget -------------------------------------------------------------------------------------------

    def affordable(self) -> int:
        """Return the bytes that memory, control groups and the directory can all give now."""
        return min(available_memory().nbytes, self._folder_bytes())

    def _folder_bytes(self) -> int:
        figures = os.statvfs(self.directory)
        return figures.f_bavail * figures.f_frsize

    def _check_budget(self, extents: int, held: int) -> None:
        """Raise ``HostMemoryError`` without room for the bytes of ``extents`` and their tables, ``held`` given back."""
        needed = max(extents + extents // _SHARE_OF_TABLES - held, 0)
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
        # In one page and padded, so that one call replaces it as a whole.
        os.pwrite(self._lock_fd, msgspec.json.encode(self.manifest).ljust(_MANIFEST_BYTES), 0)


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file; None if there is none."""
    try:
        with path.open("rb") as file:
            return decode_manifest(file.read(_MOST_MANIFEST_BYTES))
    except OSError:
        return None


def decode_manifest(text: bytes) -> Manifest | None:
    """Return a manifest; None for anything else."""
    try:
        return msgspec.json.decode(text, type=Manifest)
    except MALFORMED:
        return None


def _new_incarnation() -> int:
    return uuid.uuid4().int >> 65


def _is_own_file(path: Path) -> bool:
    """Return True for a file that this user owns."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def arena_name(socket: Path) -> str:
    """Return the part of the files' names that services at other sockets do not have."""
    return hashlib.sha256(str(socket).encode()).hexdigest()[:8]


def extent_bytes(total: int, huge_pages: bool) -> int:
    """Return the size of an extent of an arena, a multiple of a page: 64 MiB, but 1/16 to 1/512 of the arena.

    Raises ``HostMemoryError`` if the arena is smaller than a page.
    """
    page = _HUGE_PAGE if huge_pages else _PAGE
    size = min(max(_EXTENT_BYTES, total // MOST_EXTENTS), total // _FEWEST_EXTENTS)
    size = max(size // page * page, page)
    if total < size:
        raise HostMemoryError(
            f"an arena of {total} bytes is smaller than an extent of {size}; give more --host-memory"
        )
    return size


def _allocate_all(paths: list[Path], size: int, kind: MemoryKind) -> Iterator[None]:
    """Create the files, in parallel since the system clears their pages. Yields after each one, in order."""
    cores = None if kind.numa_node is None else node_cores(kind.numa_node)
    pool = ThreadPoolExecutor(min(_TOUCH_THREADS, os.cpu_count() or 1), "fdcache-touch")
    try:
        yield from pool.map(partial(_allocate, size=size, cores=cores, huge_pages=kind.huge_pages), paths)
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
