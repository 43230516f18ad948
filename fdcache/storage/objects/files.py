"""Reads of files into memory that each thread uses again: new pages cost about as much as the bytes in them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import numpy as np

NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Errors of what has a file's name and is none: a folder, a link, a pipe or a device."""

_MOST_KEPT = 4 << 20
"""Bytes that a thread keeps for its next read."""


class _Kept(threading.local):
    memory = np.empty(0, np.uint8)


_KEPT = _Kept()


def read_file(path: Path, offset: int, length: int) -> memoryview:
    """Return bytes of a file, fewer where it ends before; they hold until this thread reads again.

    Raises ``OSError``, also for anything but a regular file: with one of ``NO_FILE``.
    """
    if length > len(_KEPT.memory):
        _KEPT.memory = np.empty(min(length, _MOST_KEPT), np.uint8)
    memory = _KEPT.memory if length <= len(_KEPT.memory) else np.empty(length, np.uint8)
    buffer = memory[:length].data
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "Not a regular file", str(path))
        done = 0
        while done < length and (count := os.preadv(descriptor, [buffer[done:]], offset + done)):
            done += count
        return buffer[:done]
    finally:
        os.close(descriptor)
