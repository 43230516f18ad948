"""Memory that a service shares with its clients: extents of records, the table of its blocks, a ring per client."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache._core import PresenceTable, RecordTable, SharedRuns
from fdcache.metadata import SLOT_HEADER_BYTES


class Geometry(msgspec.Struct, frozen=True):
    """Files of a namespace's memory: extents of ``extent_bytes`` in ``directory``, whose names begin with ``prefix``.

    An extent holds ``records_per_extent`` records, then their slot headers. ``incarnation`` changes when files of
    the same names become other memory. ``table_bytes`` is the size of the presence table.
    """

    directory: str
    prefix: str
    incarnation: int
    extent_bytes: int
    record_bytes: int
    table_bytes: int

    @property
    def records_per_extent(self) -> int:
        """Slots of an extent."""
        return self.extent_bytes // self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: its record and its header."""
        return self.record_bytes + SLOT_HEADER_BYTES

    @property
    def headers_offset(self) -> int:
        """Offset of the slot headers in an extent, in bytes."""
        return self.records_per_extent * self.record_bytes

    def path(self, rank: int, index: int) -> str:
        """Return the path of a rank's extent."""
        return f"{self.directory}/{self.prefix}-r{rank}-{index:05d}"

    def free_paths(self) -> list[Path]:
        """Return the paths of extents that no namespace has, in the order in which namespaces get them."""
        arena = self.prefix.rpartition("-")[0]
        return sorted(Path(self.directory).glob(f"{arena}-free-*"))

    @property
    def table_path(self) -> str:
        """Path of the presence table."""
        return f"{self.directory}/{self.prefix}.table"

    def ring_path(self, session: int) -> str:
        """Return the path of the ring in which a client tells which runs it has pinned."""
        return f"{self.directory}/{self.prefix}-{session:x}.ring"


HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("state", "<u2"),
        ("generation", "<u4"),
        ("reserved", "<u4"),
        ("payload_bytes", "<u8"),
        ("payload_checksum", "<u8"),
        ("hash", "u1", 32),
        ("parent", "u1", 32),
        ("fingerprint", "u1", 16),
        ("tail", "<u8"),
        ("header_checksum", "<u8"),
    ]
)
"""A slot header as NumPy sees it; docs/format-record.md explains the fields."""


class Extent:
    """One mapped extent, whose file has the number ``inode``. It is unmapped with the last reference to it."""

    def __init__(self, path: str | Path, nbytes: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self.inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        self.data = np.frombuffer(self._map, np.uint8)
        self.nbytes = nbytes

    def is_still(self, path: str | Path) -> bool:
        """Return True if the file of this name is the mapped memory, not that of another namespace since.

        Raises ``OSError`` when there is no such file.
        """
        return Path(path).stat().st_ino == self.inode

    def is_whole(self, path: str | Path) -> bool:
        """Return True if the file of this name is all of the mapped memory: nobody has removed or truncated it."""
        try:
            status = Path(path).stat()
        except OSError:
            return False
        return status.st_ino == self.inode and status.st_size >= self.nbytes

    @property
    def address(self) -> int:
        """Address in this process."""
        return self.data.ctypes.data

    def records(self, geometry: Geometry) -> NDArray[np.uint8]:
        """Return a view of its records, shape (records, bytes of a record), dtype uint8."""
        return self.data[: geometry.headers_offset].reshape(-1, geometry.record_bytes)

    def headers(self, geometry: Geometry) -> np.ndarray:
        """Return a view of its slot headers, shape (records,), dtype ``HEADER``."""
        start, count = geometry.headers_offset, geometry.records_per_extent
        return self.data[start : start + count * HEADER.itemsize].view(HEADER)


def record_table(geometry: Geometry, extents: list[Extent]) -> RecordTable:
    """Return the records and headers of one rank's extents; the table keeps the extents mapped."""
    per_extent = geometry.records_per_extent
    return RecordTable(
        [extent.address for extent in extents],
        per_extent,
        geometry.record_bytes,
        [extent.address + geometry.headers_offset for extent in extents],
        per_extent * len(extents),
        tuple(extents),
    )


_PAGE = 4096
_BUCKET = 128
BYTES_PER_SLOT = 32
"""Bytes of the presence table for each slot: room for two tags and places, so that it is at most half full."""
RING_BYTES = 1 << 20
"""Size of a ring: 32,000 blocks can be pinned before the service has read it, which takes 50 ms at most."""


def table_bytes(slots: int) -> int:
    """Return the size of the presence table of a tier with at most ``slots`` slots, in whole pages."""
    return -(-(slots * BYTES_PER_SLOT + _BUCKET) // _PAGE) * _PAGE


def create_shared(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """Create the file of a table or a ring and map it. Readers of an older file of this name keep theirs.

    Raises ``OSError`` when the directory has no room.
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
    """Map a service's presence table to read. Raises ``OSError`` when it is missing, or smaller than ``nbytes``."""
    return PresenceTable(_open_shared(path, nbytes, writable=False))


def open_runs(table: PresenceTable, path: Path) -> SharedRuns:
    """Map a client's ring to write. Raises ``OSError`` when it is missing or too small."""
    return SharedRuns(table, _open_shared(path, RING_BYTES, writable=True))


def _open_shared(path: Path, nbytes: int, *, writable: bool) -> NDArray[np.uint8]:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size < nbytes:
            raise OSError(f"{path} is smaller than {nbytes} bytes")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(fd, nbytes, prot=access), np.uint8)
    finally:
        os.close(fd)
