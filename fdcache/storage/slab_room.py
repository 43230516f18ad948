"""SlabRoom: what a slab file takes of its disk, and what is said when the disk has less than was promised."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from fdcache.metadata import Int32Array
from fdcache.settings.kinds import readable_size
from fdcache.storage.slab_format import SUFFIX

logger = logging.getLogger("fdcache.storage")

_TELL_AGAIN = 10
"""A disk that fills up again is told of once the file has grown by one part in so many."""


class SlabRoom:
    """Which slots of a file have had their room on the disk. Slab files are sparse: room is taken as they fill."""

    def __init__(self, path: Path, slots: int) -> None:
        self._path = path
        self._placed = np.zeros(slots, np.bool_)
        self._told_at: int | None = None

    def found(self, slots: Int32Array) -> None:
        """These hold a record already."""
        self._placed[slots] = True

    def placed(self, slots: Int32Array) -> bool:
        """Count records that were written; whether the file has grown by one of them."""
        grew = not self._placed[slots].all()
        self._placed[slots] = True
        return bool(grew)

    def ran_out(self, refused: int) -> None:
        """Say once that the disk had no room for records."""
        placed = int(self._placed.sum())
        if self._told_at is not None and placed - self._told_at <= len(self._placed) // _TELL_AGAIN:
            return
        self._told_at = placed
        logger.warning(
            "%s: the disk has no room for %d more blocks (%s free); storage goes on in the %d of %d slots that have "
            "theirs, and grows when there is room; free space or lower FDCACHE_STORAGE_SIZE",
            self._path,
            refused,
            self._free_in_words(),
            placed,
            len(self._placed),
        )

    def _free_in_words(self) -> str:
        try:
            return readable_size(free_bytes(self._path.parent))
        except OSError as error:
            return f"an unknown amount ({error.strerror})"

    def check_promise(self) -> None:
        """Warn when the files of this layout may grow to more than the disk has free. Raises ``OSError``."""
        prefix = self._path.name.rsplit("-", 1)[0]
        missing, count = 0, 0
        for file in self._path.parent.glob(f"{prefix}-rank*{SUFFIX}"):
            status = file.stat()
            missing += max(0, status.st_size - status.st_blocks * 512)
            count += 1
        free = free_bytes(self._path.parent)
        if missing > free:
            logger.warning(
                "%s: FDCACHE_STORAGE_SIZE promises %s more than the %d file%s of this layout take%s now, and the disk "
                "has %s free; storage will be as large as the disk allows; free space or lower FDCACHE_STORAGE_SIZE",
                self._path,
                readable_size(missing),
                count,
                "" if count == 1 else "s",
                "s" if count == 1 else "",
                readable_size(free),
            )


def free_bytes(folder: Path) -> int:
    """Bytes that may be written to the folder's file system. Raises ``OSError`` when that cannot be told."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
