"""Speed of a storage: measured by ``fdcache init``, kept in a file, believed until reads are observed."""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fdcache.errors import StorageError
from fdcache.machine.decoding import MALFORMED

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the measurement or its meaning changes; older files are then stale."""

_MIB = 1 << 20
_MOST_BYTES = 256 * _MIB
_LEAST_BYTES = 8 * _MIB
_SHARE_OF_FREE = 10
"""The file of a measurement takes at most a tenth of what is free."""

_WRITE_SECONDS = 2.0
_READ_SECONDS = 2.0
_PIECE = 4096
_FASTEST = 1e15
"""Bytes a second, and seconds of a small read, beyond which a measurement is no measurement."""

_SLOWEST = 3600.0
_PIECES = 17


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """Bytes a second of large reads, and seconds of one small read, from the file system at ``folder``.

    ``folder`` is the address of a bucket, too; ``device`` is 0 then.
    """

    format: int
    folder: str
    device: int
    measured_at: str
    bytes_per_second: float
    latency_seconds: float

    def suits(self, place: Path | str) -> bool:
        """Return True if it was measured at this place, on the file system that is there, by this version."""
        try:
            device = place.stat().st_dev if isinstance(place, Path) else 0
        except OSError:
            return False
        return (self.format, self.folder, self.device) == (FORMAT, _text(place), device)


def _text(place: Path | str) -> str:
    return str(place.resolve()) if isinstance(place, Path) else place


def measure_storage(folder: Path, *, threads: int = 16) -> StorageSpeed:
    """Measure reads of a folder's file system with ``threads`` threads, within a few seconds.

    The file that is written for it has no name, so that it is gone whatever happens. Raises ``StorageError`` if the
    folder cannot be written or has too little room.
    """
    try:
        with _scratch_file(folder) as descriptor:
            size = _fill(descriptor, folder)
            nbytes, seconds = _read_all(descriptor, size, threads)
            latency = statistics.median(_seconds_of_small_reads(descriptor, size))
            device = os.fstat(descriptor).st_dev
    except OSError as error:
        raise StorageError(
            f"{folder}: its speed cannot be measured: {error.strerror}; make the folder and let this user write there, "
            "or set FDCACHE_STORAGE_DIR to another"
        ) from error
    return StorageSpeed(
        format=FORMAT,
        folder=str(folder.resolve()),
        device=device,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        bytes_per_second=nbytes / seconds,
        latency_seconds=latency,
    )


@contextmanager
def _scratch_file(folder: Path) -> Iterator[int]:
    """Yield a descriptor of an empty file without a name, past the page cache if the file system can."""
    for flags in (os.O_DIRECT, 0):
        descriptor, name = tempfile.mkstemp(prefix=".fdcache-speed-", dir=folder)
        try:
            direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
        except OSError as error:
            if not flags or error.errno != errno.EINVAL:
                raise
            continue  # as on tmpfs
        finally:
            Path(name).unlink()
            os.close(descriptor)
        try:
            yield direct
        finally:
            os.close(direct)
        return


def _fill(descriptor: int, folder: Path) -> int:
    """Write until the time or the room for it is over; return the size."""
    free = os.statvfs(folder)
    most = min(_MOST_BYTES, free.f_bavail * free.f_frsize // _SHARE_OF_FREE // _MIB * _MIB)
    if most < _LEAST_BYTES:
        needed = _SHARE_OF_FREE * _LEAST_BYTES
        raise StorageError(f"{folder}: too little room to measure its speed; {needed} bytes have to be free")
    with mmap.mmap(-1, _MIB) as piece:
        piece[:] = os.urandom(_MIB)
        deadline, size = time.monotonic() + _WRITE_SECONDS, 0
        while size < most and (size < _LEAST_BYTES or time.monotonic() < deadline):
            size += os.pwrite(descriptor, piece, size)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return size


def _read_all(descriptor: int, size: int, threads: int) -> tuple[int, float]:
    """Read the file once with all threads, or as much as there is time for; return bytes and seconds."""
    deadline = time.monotonic() + _READ_SECONDS

    def read(first: int) -> int:
        moved = 0
        with mmap.mmap(-1, _MIB) as piece:
            for start in range(first * _MIB, size, threads * _MIB):
                moved += os.preadv(descriptor, [piece], start)
                if time.monotonic() > deadline:
                    break
        return moved

    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        moved = sum(pool.map(read, range(threads)))
        return moved, time.perf_counter() - begin


def _seconds_of_small_reads(descriptor: int, size: int) -> Iterator[float]:
    with mmap.mmap(-1, _PIECE) as piece:
        for number in range(_PIECES):
            begin = time.perf_counter()
            os.preadv(descriptor, [piece], size * number // _PIECES // _PIECE * _PIECE)
            yield time.perf_counter() - begin


# --- the file -----------------------------------------------------------------------------------------------


def _path(place: str, calibration_dir: Path) -> Path:
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    return calibration_dir / "storage" / f"{name}.json"


def save_storage_speed(speed: StorageSpeed, calibration_dir: Path) -> Path:
    """Write a measurement atomically; return its path."""
    path = _path(speed.folder, calibration_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(speed), indent=2))
    draft.replace(path)
    return path


def load_storage_speed(place: Path | str, calibration_dir: Path) -> StorageSpeed | None:
    """Return the measurement of a folder or a bucket; None when it is missing, stale or unreadable."""
    path = _path(_text(place), calibration_dir)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StorageSpeed)
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        logger.warning("the storage's speed in %s cannot be read (%s); run `fdcache init`", path, error)
        return None
    if not found.suits(place):
        logger.warning(
            "the storage's speed in %s is of another file system or version; run `fdcache init`", path
        )
        return None
    if not (1 <= found.bytes_per_second <= _FASTEST and 0 <= found.latency_seconds <= _SLOWEST):
        logger.warning("the storage's speed in %s is impossible; run `fdcache init`", path)
        return None
    return found
