"""Inspect slab files, and remove blocks from them, without a server or an engine."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache.errors import StorageBusyError, StorageError, StorageFormatError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt64Array
from fdcache.storage.connector import Outcome
from fdcache.storage.slab_file import SCAN_STEP, SlabLock, open_core, storage_error
from fdcache.storage.slab_format import (
    SUFFIX,
    Superblock,
    has_magic,
    is_file_name,
    read_layout,
    read_superblock,
)
from fdcache.storage.slab_health import IN_A_ROW

GIVE_FOLDER = "give the FDCACHE_STORAGE_DIR of the engine"
"""The remedy for a folder without storage files."""

_CHECK_STEP = 512
_THREADS = 4

Progress = Callable[[str, int, int], None]
"""Called with a step of the work on a file, how much of it is done, and how much there is."""


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlabContents:
    """Contents of one file. Arrays are parallel; ``depths`` is -1 for blocks with a missing ancestor."""

    path: Path
    superblock: Superblock
    layout: KVLayout
    slots: Int32Array
    hashes: HashArray
    parents: HashArray
    written_ms: UInt64Array
    depths: Int32Array
    bad_headers: int
    corrupt: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Slots whose record is unreadable or differs from its header; filled by a check only."""

    @property
    def namespace(self) -> str:
        """Fingerprint of model and layout, in hexadecimal."""
        return self.superblock.fingerprint.hex()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored records."""
        return len(self.slots) * self.superblock.record_bytes

    @property
    def num_corrupt(self) -> int:
        """Corrupt records and damaged headers."""
        return len(self.corrupt) + self.bad_headers


@dataclass(frozen=True, slots=True)
class Damaged:
    """A slab file that cannot be read at all."""

    path: Path
    reason: str


def slab_files(path: Path) -> list[Path]:
    """Return the slab files in a folder, or the one file at ``path``. Raises ``StorageError`` when there is neither."""
    if os.path.isfile(path):  # noqa: PTH113 (a name that is too long is no error)
        return [path]
    if not os.path.isdir(path):  # noqa: PTH112
        raise StorageError(f"{path}: no such folder or file; {GIVE_FOLDER}")
    return sorted(path.glob(f"fdcache-*{SUFFIX}"))


def read_file(
    path: Path, *, verify: bool = False, on_progress: Progress | None = None
) -> SlabContents | Damaged:
    """Read a file's contents, without changing it; with ``verify`` read and check every record."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error.errno or errno.EIO, path) from error
    try:
        with _open_direct(path) as record_fd:
            superblock = read_superblock(fd, path)
            layout = read_layout(fd, superblock, path)
            slab = open_core(superblock, layout, record_fd, fd, _THREADS)
            bad_headers = _scan(slab, path, superblock.slots, on_progress)
            slots, _, hashes, parents, _, written_ms = slab.entries()
            corrupt = _check(slab, path, slots, on_progress) if verify else np.empty(0, np.int32)
    except StorageFormatError as error:
        return Damaged(path, str(error))
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error.errno or errno.EIO, path) from error
    finally:
        os.close(fd)
    depths = _depths(hashes, parents)
    return SlabContents(
        path, superblock, layout, slots, hashes, parents, written_ms, depths, bad_headers, corrupt
    )


@contextmanager
def _open_direct(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _scan(slab: _core.SlabFile, path: Path, slots: int, on_progress: Progress | None) -> int:
    """Read the headers; return how many are damaged."""
    bad_headers = 0
    for first in range(0, slots, SCAN_STEP):
        last = min(first + SCAN_STEP, slots)
        _, bad, number = slab.scan(first, last)
        if number:
            raise storage_error(number, path)
        bad_headers += bad
        if on_progress is not None:
            on_progress(f"scanning {path.name}", last, slots)
    return bad_headers


def _check(slab: _core.SlabFile, path: Path, slots: Int32Array, on_progress: Progress | None) -> Int32Array:
    """Read the records; return the slots of corrupt and unreadable ones."""
    bad = [np.empty(0, np.int32)]
    for first in range(0, len(slots), _CHECK_STEP):
        part = slots[first : first + _CHECK_STEP]
        outcomes, _, errors, _, _ = slab.verify(part)
        unreadable = outcomes == Outcome.ERROR
        if unreadable.sum() >= IN_A_ROW and unreadable.all():
            raise storage_error(int(errors[0]), path)
        bad.append(part[unreadable | (outcomes == Outcome.CORRUPT)])
        if on_progress is not None:
            on_progress(f"checking {path.name}", min(first + _CHECK_STEP, len(slots)), len(slots))
    return np.concatenate(bad)


def _depths(hashes: HashArray, parents: HashArray) -> Int32Array:
    """Return each block's distance from the root, -1 where an ancestor is missing."""
    above = {row.tobytes(): parent.tobytes() for row, parent in zip(hashes, parents, strict=True)}
    depth = {bytes(32): -1}
    for start in above:
        path = []
        at = start
        while at not in depth and at in above:
            path.append(at)
            depth[at] = -2  # a cycle of blocks does not reach the root either
            at = above[at]
        base = depth.get(at, -2)
        for step, block in enumerate(reversed(path), start=1):
            depth[block] = base + step if base != -2 else -2
    found = np.array([depth[row.tobytes()] for row in hashes], np.int32)
    return np.where(found == -2, -1, found).astype(np.int32)


# --- a summary ----------------------------------------------------------------------------------------------


def summarize(files: Sequence[SlabContents | Damaged], *, verified: bool) -> dict[str, Any]:
    """Return the figures of a folder as plain JSON values. A block counts once for each rank that stores its part.

    ``corrupt_blocks`` counts records that a check refused and damaged headers; without a check, headers only.
    """
    whole = [one for one in files if isinstance(one, SlabContents)]
    damaged = [one for one in files if isinstance(one, Damaged)]
    now = time.time()
    by_namespace: dict[str, list[SlabContents]] = {}
    for contents in whole:
        by_namespace.setdefault(contents.namespace, []).append(contents)
    return {
        "blocks": sum(len(contents.slots) for contents in whole),
        "bytes": sum(contents.nbytes for contents in whole),
        "verified": verified,
        "corrupt_blocks": sum(contents.num_corrupt for contents in whole),
        "namespaces": [
            _summarize_namespace(name, group, now) for name, group in sorted(by_namespace.items())
        ],
        "files": [_summarize_file(contents) for contents in whole],
        "damaged_files": [{"path": str(one.path), "reason": one.reason} for one in damaged],
    }


def _summarize_namespace(name: str, group: Sequence[SlabContents], now: float) -> dict[str, Any]:
    written = np.concatenate([contents.written_ms for contents in group]) / 1000.0
    depths = np.concatenate([contents.depths for contents in group])
    reachable = depths[depths >= 0]
    layout = group[0].layout
    return {
        "namespace": name,
        "model": layout.model,
        "revision": layout.revision,
        "block_size": layout.block_size,
        "record_bytes": layout.record_bytes,
        "ranks": sorted(contents.superblock.rank for contents in group),
        "tp_size": layout.record_ranks,
        "blocks": len(depths),
        "bytes": sum(contents.nbytes for contents in group),
        "capacity_blocks": sum(contents.superblock.slots for contents in group),
        "unreachable_blocks": int((depths < 0).sum()),
        "first_blocks": int((depths == 0).sum()),
        "mean_depth": round(float(reachable.mean()), 1) if len(reachable) else None,
        "deepest": int(reachable.max()) if len(reachable) else None,
        "oldest_seconds": round(now - float(written.min()), 1) if len(written) else None,
        "newest_seconds": round(now - float(written.max()), 1) if len(written) else None,
        "corrupt_blocks": sum(contents.num_corrupt for contents in group),
    }


def _summarize_file(contents: SlabContents) -> dict[str, Any]:
    status = contents.path.stat()
    return {
        "path": str(contents.path),
        "namespace": contents.namespace,
        "rank": contents.superblock.rank,
        "blocks": len(contents.slots),
        "file_bytes": status.st_size,
        "disk_bytes": status.st_blocks * 512,
        "corrupt_slots": contents.corrupt.tolist(),
        "damaged_headers": contents.bad_headers,
    }


# --- removal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """Blocks to remove; all conditions must hold. ``namespace`` is the beginning of a fingerprint, or a model name."""

    namespace: str | None = None
    older_than: float | None = None
    corrupt: bool = False
    everything: bool = False

    def matches(self, contents: SlabContents) -> bool:
        """Return True for a file of the namespace."""
        wanted = self.namespace
        return wanted is None or contents.namespace.startswith(wanted) or contents.layout.model == wanted

    @property
    def whole_files(self) -> bool:
        """True when matching files are removed as a whole."""
        return self.older_than is None and not self.corrupt


@dataclass(frozen=True, slots=True)
class Removal:
    """Blocks and bytes removed from a file, or that a dry run would remove; ``whole``: the file itself is removed."""

    path: Path
    blocks: int
    nbytes: int
    whole: bool


def remove(
    path: Path, selection: Selection, *, dry_run: bool, on_progress: Progress | None = None
) -> list[Removal]:
    """Remove blocks, with all their descendants, from the files in a folder.

    Raises ``StorageBusyError`` for a file that an engine has open, before that file is changed, and ``StorageError``
    for a named file that does not belong to fdcache.
    """
    return [
        removal
        for file in _removable_files(path)
        if (removal := _remove_from(file, selection, dry_run, on_progress)) is not None
    ]


def _removable_files(path: Path) -> list[Path]:
    """Return the files of fdcache in a folder, or the one file at ``path``.

    Raises ``StorageError`` for a named file that does not belong to fdcache, and for a link to a file.
    """
    files = slab_files(path)
    for file in files:
        if file.is_symlink():
            raise StorageError(
                f"{file}: a link to {file.readlink()}; nothing is removed through a link, name the file itself"
            )
    if files == [path] and not _belongs_to_fdcache(path):
        raise StorageError(
            f"{path}: not a slab file of fdcache, nothing is removed; name a file fdcache-*{SUFFIX} or its folder"
        )
    return [file for file in files if _belongs_to_fdcache(file)]


def _belongs_to_fdcache(file: Path) -> bool:
    """Return True for a file with a name that fdcache gives, and for a slab file with a similar name.

    The contents of the first kind are not examined, so that damaged files can be removed.
    """
    if not file.match(f"fdcache-*{SUFFIX}") or not file.is_file():
        return False
    return is_file_name(file.name) or has_magic(file)


def _remove_from(
    path: Path, selection: Selection, dry_run: bool, on_progress: Progress | None
) -> Removal | None:
    with _locked(path):
        contents = read_file(path, verify=selection.corrupt, on_progress=on_progress)
        if isinstance(contents, Damaged):
            chosen = selection.namespace is None and (selection.everything or selection.corrupt)
            if chosen and not dry_run:
                path.unlink()
            return Removal(path, 0, 0, whole=True) if chosen else None
        if not selection.matches(contents):
            return None
        if selection.whole_files:
            if not dry_run:
                path.unlink()
            return Removal(path, len(contents.slots), contents.nbytes, whole=True)
        doomed = _with_descendants(contents, _chosen(contents, selection))
        if doomed.any() and not dry_run:
            _erase(contents, contents.slots[doomed])
        count = int(doomed.sum())
        return Removal(path, count, count * contents.superblock.record_bytes, whole=False)


def _chosen(contents: SlabContents, selection: Selection) -> NDArray[np.bool_]:
    chosen = np.ones(len(contents.slots), np.bool_)
    if selection.older_than is not None:
        limit = time.time_ns() // 1_000_000 - int(selection.older_than * 1000)
        chosen &= contents.written_ms.astype(np.int64) < limit
    if selection.corrupt:
        chosen &= np.isin(contents.slots, contents.corrupt)
    return chosen


def _with_descendants(contents: SlabContents, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    gone = {row.tobytes() for row in contents.hashes[chosen]}
    doomed = chosen.copy()
    for i in np.argsort(contents.depths, kind="stable").tolist():
        if contents.parents[i].tobytes() in gone:
            doomed[i] = True
            gone.add(contents.hashes[i].tobytes())
    return doomed


def _erase(contents: SlabContents, slots: Int32Array) -> None:
    fd = os.open(contents.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        slab = open_core(contents.superblock, contents.layout, fd, fd, _THREADS)
        _scan(slab, contents.path, contents.superblock.slots, None)
        number = slab.erase(slots) or slab.sync()
    finally:
        os.close(fd)
    if number:
        raise storage_error(number, contents.path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        lock = SlabLock(path, make=False)
    except StorageBusyError as error:
        raise StorageBusyError(
            f"{path}: an engine is using it; stop the engine first, or reset through it"
        ) from error
    try:
        yield
    finally:
        lock.release()
