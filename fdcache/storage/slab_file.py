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
from fdcache.storage.slab_format import (
    PAGE,
    Superblock,
    check_fits,
    is_blank,
    read_superblock,
    restore_size,
    write_new,
)

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


def device_of(folder: Path) -> int:
    """Return the number of the file system that a folder is, or would be, on."""
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev


def is_same_file(fd: int, path: Path) -> bool:
    """Return True when the open file is the one at ``path``. Raises ``OSError`` when either cannot be examined."""
    opened, named = os.fstat(fd), path.stat()
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)


class SlabLock:
    """Exclusive lock on the slab file at ``path``; the kernel releases it with the process.

    With ``make`` a file that does not exist is made, blank. Raises ``StorageBusyError`` when another process holds the
    lock, and the errors of ``storage_error``.
    """

    def __init__(self, path: Path, *, make: bool = True) -> None:
        self._path = path
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0)
        if make:
            _make_folder(path.parent)
        self._fd = self._acquire()

    def _acquire(self) -> int:
        while True:
            try:
                fd = os.open(self._path, self._flags, 0o600)
            except OSError as error:
                raise storage_error(error.errno or errno.EIO, self._path) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                raise StorageBusyError(
                    f"{self._path}: another process is using it; end that process, or give each its own "
                    "FDCACHE_STORAGE_DIR"
                ) from error
            if self.names(fd):
                return fd
            os.close(fd)  # its holder removed it meanwhile

    def names(self, fd: int) -> bool:
        """Return True if the path still leads to the file that is open as ``fd``."""
        with suppress(OSError):
            return is_same_file(fd, self._path)
        return False

    def renew(self) -> None:
        """Lock the file that is at the path now, if that is another one than before."""
        if not self.names(self._fd):
            _make_folder(self._path.parent)
            fd = self._acquire()
            os.close(self._fd)
            self._fd = fd

    def open(self) -> int:
        """Return a descriptor of the locked file."""
        return os.dup(self._fd)

    def release(self) -> None:
        """Release the lock, once the descriptors from ``open`` are closed too."""
        os.close(self._fd)


class SlabHandle:
    """The locked slab file with ``slots`` slots, scanned; a blank file becomes a slab file.

    ``found`` and ``corrupt`` count slot headers of the scan; corrupt ones are emptied, and a file that was cut off gets
    its size again. Raises ``StorageFormatError`` for a file of another layout, rank or version, and the errors of
    ``storage_error`` when the file cannot be opened.
    """

    def __init__(
        self,
        lock: SlabLock,
        path: Path,
        layout: KVLayout,
        rank: int,
        slots: int,
        threads: int,
        on_progress: ScanProgress | None = None,
    ) -> None:
        self.path = path
        self.header_fd = lock.open()
        try:
            if is_blank(self.header_fd):
                write_new(self.header_fd, path, layout, Superblock.plan(layout, rank, slots))
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
            ready, corrupt, number = self.core.scan(first, last, repair=True)
            if number:
                self.close()
                raise storage_error(number, path)
            self.found += ready
            self.corrupt += corrupt
            if on_progress is not None:
                on_progress(last, slots)
        try:
            restore_size(self.header_fd, layout, self.superblock)
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
            fd = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.open(self.path, flags)
        if not os.path.sameopenfile(fd, self.header_fd):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "replaced while it was opened", str(self.path))
        return fd

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
