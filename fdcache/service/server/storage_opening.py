"""Open the storage of a layout: find, lock and scan its files, on threads other than the service's."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fdcache.errors import StorageError
from fdcache.layout import KVLayout
from fdcache.settings.cache import EvictionPolicy, StorageTierSettings
from fdcache.settings.variable import Group
from fdcache.storage.connector import BlockStorage, ConnectorContext, PlacedStorage
from fdcache.storage.factory import open_lookup, open_storage
from fdcache.storage.slab_format import SUFFIX, file_name, read_layout, read_superblock
from fdcache.tiers.remote_index import RemoteIndex
from fdcache.tiers.storage import make_index
from fdcache.tiers.storage_index import LocalIndex

log = logging.getLogger(__name__)

_MOST_AT_START = 16
_LOG_SECONDS = 5.0

Progress = Callable[[int, int], None]
"""Called with the slots scanned so far and the slots in all."""


@dataclass(slots=True)
class OpenedStorage:
    """Every rank's storage of one layout and their index, which has ``restored`` blocks of the files."""

    layout: KVLayout
    ranks: list[BlockStorage]
    index: LocalIndex | RemoteIndex
    restored: int

    def close(self) -> None:
        """Close everything, before any transfer."""
        for storage in self.ranks:
            storage.close()
        if isinstance(self.index, RemoteIndex):
            self.index.close()


@dataclass(slots=True)
class Scanned:
    """Progress of the scans since the start. Any thread may call ``note``."""

    listener: Progress
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _parts: dict[tuple[bytes, int], tuple[int, int]] = field(default_factory=dict)
    _log_at: float = 0.0

    def note(self, fingerprint: bytes, rank: int, done: int, total: int) -> None:
        """Record how far a rank's file of a layout is scanned."""
        with self._lock:
            self._parts[fingerprint, rank] = (done, total)
        done, total = self.figures
        self.listener(done, total)
        if (now := time.monotonic()) > self._log_at:
            self._log_at = now + _LOG_SECONDS
            log.info("loading the storage index: %d of %d slots", done, total)

    @property
    def figures(self) -> tuple[int, int]:
        """Slots scanned, and slots in all as far as known."""
        with self._lock:
            parts = list(self._parts.values())
        return sum(done for done, _ in parts), sum(total for _, total in parts)


def open_layout(
    layout: KVLayout,
    settings: StorageTierSettings,
    options: Group | None,
    *,
    verify: bool,
    scanned: Scanned,
    eviction: EvictionPolicy,
) -> OpenedStorage:
    """Open every rank's storage and load the index. Raises ``StorageError`` and leaves nothing open."""
    ranks: list[BlockStorage] = []
    try:
        for rank in range(layout.record_ranks):

            def note(done: int, total: int, rank: int = rank) -> None:
                scanned.note(layout.fingerprint, rank, done, total)

            opened = open_storage(ConnectorContext(layout, rank, settings, options, verify, note))
            if opened is None:
                raise StorageError("FDCACHE_STORAGE: none is no storage")
            ranks.append(opened)
        lookup = open_lookup(ConnectorContext(layout, None, settings, options, verify))
        index = make_index(settings, layout, lookup, eviction=eviction)
        restored = 0
        if isinstance(index, LocalIndex):
            restored = index.restore([rank.scan() for rank in ranks if isinstance(rank, PlacedStorage)])
    except BaseException:
        for storage in ranks:
            storage.close()
        raise
    return OpenedStorage(layout, ranks, index, restored)


def stored_layouts(folder: Path) -> list[KVLayout]:
    """Return the newest layouts with a complete set of files in a folder; damaged files are logged and skipped."""
    newest: dict[bytes, tuple[float, KVLayout]] = {}
    for path in folder.glob(f"fdcache-*{SUFFIX}"):
        try:
            layout, written = _layout_of(path)
        except (StorageError, OSError) as error:
            log.warning("%s: skipped, the file is damaged: %s", path.name, error)
            continue
        names = [file_name(layout.fingerprint, rank) for rank in range(layout.record_ranks)]
        if all((folder / name).exists() for name in names):
            newest[layout.fingerprint] = max(
                newest.get(layout.fingerprint, (0.0, layout)), (written, layout), key=lambda each: each[0]
            )
    ordered = sorted(newest.values(), key=lambda each: -each[0])
    return [layout for _, layout in ordered[:_MOST_AT_START]]


def _layout_of(path: Path) -> tuple[KVLayout, float]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_layout(fd, read_superblock(fd, path), path), os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def require_folder(folder: Path) -> None:
    """Create the folder of the local storage. Raises ``StorageError`` unless it can be written."""
    probe = folder / f"fdcache-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(mode=0o600)
    except OSError as error:
        raise StorageError(
            f"FDCACHE_STORAGE_DIR: {folder} cannot be written: {error.strerror}; choose another folder, or mount it "
            "writable"
        ) from error
    finally:
        with suppress(OSError):
            probe.unlink()
