"""The table in shared memory that says which blocks of a layout a service holds."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache._core import PresenceTable

_PAGE = 4096
BYTES_PER_SLOT = 16
"""Two tags of 8 bytes: so the table is at most half full."""


def table_bytes(slots: int) -> int:
    """Bytes of the table of a tier that never has more than ``slots`` slots: whole pages."""
    return -(-slots * BYTES_PER_SLOT // _PAGE) * _PAGE


def create_table(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """Memory for an empty table, in a new file. Readers of an older file of this name keep what they have.

    Raises ``OSError`` when the folder has no room.
    """
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def open_table(path: Path, nbytes: int) -> PresenceTable:
    """A service's table, to be read. Raises ``OSError`` when it is not there, or smaller than ``nbytes``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < nbytes:
            raise OSError(f"{path} is smaller than {nbytes} bytes")
        return PresenceTable(np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8))
    finally:
        os.close(fd)
