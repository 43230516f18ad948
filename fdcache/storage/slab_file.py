"""An open slab file, its lock, and the typed errors of its system calls."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fdcache import _core
from fdcache.errors import (
    StorageBusyError,
    StorageDeviceError,
    StorageError,
    StorageFullError,
    StorageGoneError,
    StorageReadOnlyError,
)
from fdcache.layout import KVLayout
from fdcache.storage.slab_format import PAGE, SUFFIX, Superblock, check_fits, create_file, read_superblock

SCAN_STEP = 65536
"""Slots whose headers are read between two calls of the progress function."""
UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
"""Errors of a file that can be read at most."""
_NO_FOLDER = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a folder that cannot exist: part of its path is a file, or belongs to the kernel."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

ScanProgress = Callable[[int, int], None]
"""Called with the number of slots scanned so far and in all."""


def storage_error(number: int, path: Path) -> StorageError:
    """Return the typed error for an errno."""
    reason = os.strerror(number)
    if number in _FULL:
        return StorageFullError(
            number, f"no room to write ({reason}); free space or lower FDCACHE_STORAGE_SIZE", str(path)
        )
    if number in UNWRITABLE:
        return StorageReadOnlyError(number, f"cannot be written ({reason}); check mount and owner", str(path))
    if number == errno.ENOENT:
        return StorageGoneError(number, "is gone; check the mount", str(path))
    return StorageDeviceError(number, f"the device failed ({reason}); see the kernel log", str(path))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise storage_error(error.errno or errno.EIO, folder) from error
        wrong = "is not a directory" if os.path.lexists(folder) else f"cannot be made ({error.strerror})"
        raise StorageError(f"FDCACHE_STORAGE_DIR: {folder} {wrong}; choose another folder") from error


def is_same_file(fd: int, path: Path) -> bool:
    """Return True when the open file is the one at ``path``. Raises ``OSError`` when either cannot be examined."""
    opened, named = os.fstat(fd), path.stat()
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


class SlabLock:
    """Exclusive lock on a slab file, held on a lock file beside it; the kernel releases it with the process.

    Raises ``StorageBusyError`` when another process holds it.
    """

    def __init__(self, slab: Path) -> None:
        self._path = slab.with_suffix(".lock")
        self._fd = self._acquire()

    def _acquire(self) -> int:
        _make_folder(self._path.parent)
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(error.errno or errno.EIO, self._path.parent) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise StorageBusyError(
                f"{self._path.with_suffix(SUFFIX)}: another process is using it; end that process, or give each its "
                "own FDCACHE_STORAGE_DIR"
            ) from error
        return fd

    def renew(self) -> None:
        """Take the lock again if the lock file was replaced, for example by another mount."""
        with suppress(FileNotFoundError):
            if is_same_file(self._fd, self._path):
                return
        fd = self._acquire()
        os.close(self._fd)
        self._fd = fd

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


class SlabHandle:
    """Open slab file with ``slots`` slots, scanned; created if it does not exist. The caller holds its lock.

    ``found`` and ``corrupt`` count slot headers of the scan. Raises ``StorageFormatError`` for a file of another
    layout, rank or version, and the errors of ``storage_error`` when the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        layout: KVLayout,
        rank: int,
        slots: int,
        threads: int,
        on_progress: ScanProgress | None = None,
    ) -> None:
        self.path = path
        try:
            if not path.exists():
                create_file(path, layout, Superblock.plan(layout, rank, slots))
            self.header_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error.errno or errno.EIO, path) from error
        try:
            self.superblock = self._fit(layout, rank, slots)
            self.record_fd = self._open_direct()
        except OSError as error:
            os.close(self.header_fd)
            if isinstance(error, StorageError):
                raise
            raise storage_error(error.errno or errno.EIO, path) from error
        except BaseException:
            os.close(self.header_fd)
            raise
        self.core = open_core(self.superblock, layout, self.record_fd, self.header_fd, threads)
        self.found = self.corrupt = 0
        for first in range(0, slots, SCAN_STEP):
            last = min(first + SCAN_STEP, slots)
            ready, corrupt, number = self.core.scan(first, last)
            if number:
                self.close()
                raise storage_error(number, path)
            self.found += ready
            self.corrupt += corrupt
            if on_progress is not None:
                on_progress(last, slots)
        # The scan left the slots of a truncated file empty; give them their place in the file back.
        try:
            os.ftruncate(self.header_fd, self.superblock.file_bytes)
        except OSError as error:
            self.close()
            raise storage_error(error.errno or errno.EIO, path) from error

    def _fit(self, layout: KVLayout, rank: int, slots: int) -> Superblock:
        superblock = read_superblock(self.header_fd, self.path)
        check_fits(superblock, layout, rank, self.path)
        if superblock.slots == slots:
            return superblock
        if slots > superblock.header_capacity:
            raise StorageError(
                f"{self.path}: can grow to {superblock.header_capacity} blocks, not to {slots}; "
                "lower FDCACHE_STORAGE_SIZE or start a new file with `fdcache reset storage --all`"
            )
        resized = superblock.resized(slots)
        resized.write(self.header_fd)
        return resized

    def _open_direct(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(self.path, flags)

    def probe(self) -> int:
        """Write the next version of the superblock and read it from the medium. Return an errno or 0."""
        try:
            self._rewrite_superblock()
            with mmap.mmap(-1, PAGE) as page:
                if os.preadv(self.record_fd, [page], self.superblock.offset) < PAGE:
                    return errno.EIO
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _rewrite_superblock(self) -> None:
        newer = self.superblock.resized(self.superblock.slots)
        try:
            newer.write(self.header_fd)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return  # a full disk is not a failing one
        self.superblock = newer

    def close(self) -> None:
        """Close the file. No call may be in progress."""
        os.close(self.record_fd)
        os.close(self.header_fd)


def open_core(
    superblock: Superblock, layout: KVLayout, record_fd: int, header_fd: int, threads: int
) -> _core.SlabFile:
    """Return the native object that moves records of an open file."""
    return _core.SlabFile(
        record_fd,
        header_fd,
        superblock.header_offset,
        superblock.record_offset,
        superblock.record_bytes,
        superblock.slots,
        superblock.fingerprint,
        [(plane.offset, plane.nbytes) for plane in layout.planes],
        threads,
    )
