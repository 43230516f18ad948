"""Lock files: files that one process at a time locks, and that their owner may remove at its end."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

_PATIENCE_SECONDS = 0.5
"""Others lock such a file for a moment, to find out if its owner is alive."""


def open_locked(path: Path, patience: float = _PATIENCE_SECONDS) -> int:
    """Open a file, lock it, and return its descriptor. A missing file is created, for this user only.

    Raises ``BlockingIOError`` if another process keeps it locked, and ``OSError`` if it cannot be opened.
    """
    deadline = time.monotonic() + patience
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        is_kept = False
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_kept = _is_at(path, fd)  # else its owner removed it before it let go: the lock excludes nobody
            if is_kept:
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.005)
        finally:
            if not is_kept:
                os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False
