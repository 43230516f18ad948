"""NotesFile: what routers are told of blocks, kept beside the blocks. docs/format-storage.md has the bytes."""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger("fdcache.service.server")

MAGIC = b"fdcnotes"
VERSION = 1
HEAD = struct.Struct("<8sI")
ROW = struct.Struct("<II")
"""Length of a row's rest, and its CRC32."""
HASH_BYTES = 32
_MOST_ROW = 1 << 20

Row = tuple[bytes, bytes]
"""Hash of a block, and its note."""


class NotesFile:
    """Rows of hash and note, added at the end by a thread of its own. The last row of a block counts.

    What cannot be written is logged once; the blocks concerned are not told after a restart.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        """Rows in the file, and those that wait to be written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fdcache-notes")
        self._fd = -1
        self._has_failed = False

    def load(self) -> Future[dict[bytes, bytes]]:
        """Begin to read the file; a torn or damaged row ends it, and what follows is cut off."""
        return self._thread.submit(self._load)

    def add(self, rows: list[Row]) -> None:
        """Append rows, in a thread: the caller waits for no disk."""
        if rows:
            self.rows += len(rows)
            self._thread.submit(self._guarded, lambda: self._append(rows))

    def rewrite(self, rows: list[Row]) -> None:
        """Replace the contents by rows, in the same thread."""
        self.rows = len(rows)
        self._thread.submit(self._guarded, lambda: self._rewrite(rows))

    def close(self) -> None:
        """Write what waits and close the file, which stays."""
        self._thread.shutdown(wait=True)
        self._close()

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                log.warning("%s: what routers are told of some blocks is not kept: %s", self.path, error)
            self._has_failed = True
            self._close()

    def _load(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        try:
            data = self.path.read_bytes()
        except OSError:
            return found
        if data[: HEAD.size] != HEAD.pack(MAGIC, VERSION):
            return found
        at = HEAD.size
        while at + ROW.size <= len(data):
            length, checksum = ROW.unpack_from(data, at)
            body = data[at + ROW.size : at + ROW.size + length]
            if not HASH_BYTES < length <= _MOST_ROW or len(body) < length or zlib.crc32(body) != checksum:
                log.warning("%s: cut off at byte %d, where a row is torn", self.path, at)
                break
            found[body[:HASH_BYTES]] = body[HASH_BYTES:]
            self.rows += 1
            at += ROW.size + length
        if at < len(data):
            self._guarded(lambda: os.truncate(self.path, at))
        return found

    def _append(self, rows: Iterable[Row]) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not os.fstat(self._fd).st_size:
                _write(self._fd, HEAD.pack(MAGIC, VERSION))
        _write(self._fd, b"".join(map(_packed, rows)))

    def _rewrite(self, rows: Iterable[Row]) -> None:
        self._close()
        fresh = self.path.with_name(self.path.name + ".new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, HEAD.pack(MAGIC, VERSION) + b"".join(map(_packed, rows)))
        finally:
            os.close(fd)
        fresh.rename(self.path)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _packed(row: Row) -> bytes:
    body = row[0] + row[1]
    return ROW.pack(len(body), zlib.crc32(body)) + body


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
