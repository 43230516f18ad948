"""Files in shared memory that processes hold locked, so that what killed ones left behind can be removed."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np

from fdcache._core import map_pages
from fdcache.errors import HostMemoryError


def try_lock(fd: int) -> bool:
    """Lock a file that no process holds; return False if one does."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_abandoned(directory: Path, prefix: str) -> None:
    """Remove the files of processes that ended without removing them."""
    for path in directory.glob(f"{prefix}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # removed meanwhile, or another user's
            continue
        try:
            if try_lock(fd):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)


class JoinedMemory:
    """Memory of this size that every process has which names the file, filled with zeros by the first.

    The last process to close it removes the file; what killed processes left is removed by the next that makes any.
    Raises ``HostMemoryError`` if the folder takes no such file, has no room for it, or has one of another size.
    """

    PREFIX = "fdcache-ranks-"

    def __init__(self, path: Path, nbytes: int) -> None:
        remove_abandoned(path.parent, self.PREFIX)
        self.path = path.with_name(f"{self.PREFIX}{path.name}")
        self._fd = self._open(nbytes)
        self._map = mmap.mmap(self._fd, nbytes)
        self.data = np.frombuffer(self._map, np.uint8)
        map_pages(self.address, nbytes)

    @property
    def address(self) -> int:
        """Address in this process."""
        return self.data.ctypes.data

    def close(self) -> None:
        """Remove the file if no other process has it. The memory lasts until its last user is gone. Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
            if try_lock(fd) and os.fstat(fd).st_nlink:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _open(self, nbytes: int) -> int:
        """Open the file, locked, with all its memory."""
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise HostMemoryError(
                    f"{self.path} cannot be made: {error.strerror}; set FDCACHE_ARENA_DIR to a folder on a tmpfs"
                ) from error
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:  # not taken for an abandoned one before it was locked
                break
            os.close(fd)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            if (size := os.fstat(fd).st_size) != nbytes:
                raise HostMemoryError(
                    f"{self.path} has {size} bytes, not {nbytes}; give every rank the same host memory"
                )
        except BaseException as error:
            self._fd = fd
            self.close()
            if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise HostMemoryError(
                f"{self.path.parent} has no room for {nbytes} bytes of host memory that ranks share; use less, give "
                "the container more shared memory (docker --shm-size), or set FDCACHE_ARENA_DIR"
            ) from error
        return fd
