"""Looking into storage files, and removing from them, without a server or an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fdcache import _core
from fdcache.errors import StorageBusyError, StorageError, StorageFormatError
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray, Int32Array, UInt64Array
from fdcache.storage.connector import Outcome
from fdcache.storage.slab_faults import IN_A_ROW
from fdcache.storage.slab_format import (
    SUFFIX,
    Superblock,
    has_magic,
    is_file_name,
    read_layout,
    read_superblock,
)
from fdcache.storage.slab_handle import SCAN_STEP, SlabLock, open_core, storage_error

_STEP = 512
_THREADS = 4

Progress = Callable[[str, int, int], None]
"""Called with what is being done to which file, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class SlabContents:
    """One file. Arrays are parallel; ``depths`` is -1 for blocks that nothing leads to."""

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
    """Slots whose record cannot be read, or is not what its header says; only after a check."""

    @property
    def namespace(self) -> str:
        """The fingerprint of model and layout, in hexadecimal."""
        return self.superblock.fingerprint.hex()


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file of ours that cannot be read at all."""

    path: Path
    reason: str


def slab_files(path: Path) -> list[Path]:
    """The slab files in a folder, or the one that ``path`` names. Raises ``StorageError`` when there is nothing."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise StorageError(f"{path}: no such folder or file; give the FDCACHE_STORAGE_DIR of the engine")
    return sorted(path.glob(f"fdcache-*{SUFFIX}"))


def _removable_files(path: Path) -> list[Path]:
    """Return the files of fdcache in a folder, or the one that ``path`` names.

    Raises ``StorageError`` for a named file that is none of fdcache's, and for a link to a file.
    """
    files = slab_files(path)
    for file in files:
        if file.is_symlink():
            raise StorageError(
                f"{file}: a link to {file.readlink()}; nothing is removed through a link, name the file itself"
            )
    if files == [path] and not _is_ours(path):
        raise StorageError(
            f"{path}: not a slab file of fdcache, nothing is removed; name a file fdcache-*{SUFFIX} or its folder"
        )
    return [file for file in files if _is_ours(file)]


def _is_ours(file: Path) -> bool:
    """Return True for a file with a name that fdcache gives, and for a slab file with a similar name.

    Contents do not count against the first kind: a damaged file can be removed.
    """
    if not file.match(f"fdcache-*{SUFFIX}") or not file.is_file():
        return False
    return is_file_name(file.name) or has_magic(file)


def read_file(
    path: Path, *, verify: bool = False, on_progress: Progress | None = None
) -> SlabContents | Damaged:
    """What a file holds; with ``verify`` every record is read and checked. The file is not changed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(error.errno or 5, path) from error
    try:
        with _direct(path) as record_fd:
            superblock = read_superblock(fd, path)
            layout = read_layout(fd, superblock, path)
            slab = open_core(superblock, layout, record_fd, fd, _THREADS)
            bad_headers = _scan(slab, path, superblock.slots, on_progress)
            slots, _, hashes, parents, _, written_ms = slab.entries()
            corrupt = _check(slab, path, slots, on_progress) if verify else np.empty(0, np.int32)
    except StorageFormatError as error:
        return Damaged(path, str(error))
    finally:
        os.close(fd)
    depths = _depths(hashes, parents)
    return SlabContents(
        path, superblock, layout, slots, hashes, parents, written_ms, depths, bad_headers, corrupt
    )


@contextmanager
def _direct(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _scan(slab: _core.SlabFile, path: Path, slots: int, on_progress: Progress | None) -> int:
    """Read the headers; how many are damaged."""
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
    bad = [np.empty(0, np.int32)]
    for first in range(0, len(slots), _STEP):
        part = slots[first : first + _STEP]
        outcomes, _, errors, _, _ = slab.verify(part)
        unreadable = outcomes == Outcome.ERROR
        if unreadable.sum() >= IN_A_ROW and unreadable.all():
            raise storage_error(int(errors[0]), path)
        bad.append(part[unreadable | (outcomes == Outcome.CORRUPT)])
        if on_progress is not None:
            on_progress(f"checking {path.name}", min(first + _STEP, len(slots)), len(slots))
    return np.concatenate(bad)


def _depths(hashes: HashArray, parents: HashArray) -> Int32Array:
    """The distance of each block from the root, -1 where a block on the way is missing."""
    above = {row.tobytes(): parent.tobytes() for row, parent in zip(hashes, parents, strict=True)}
    depth = {bytes(32): -1}
    for start in above:
        path = []
        at = start
        while at not in depth and at in above:
            path.append(at)
            depth[at] = -2  # a ring of blocks leads nowhere either
            at = above[at]
        base = depth.get(at, -2)
        for step, block in enumerate(reversed(path), start=1):
            depth[block] = base + step if base != -2 else -2
    found = np.array([depth[row.tobytes()] for row in hashes], np.int32)
    return np.where(found == -2, -1, found).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Selection:
    """What to remove: all conditions must hold. ``namespace`` is the beginning of a fingerprint, or a model name."""

    namespace: str | None = None
    older_than: float | None = None
    corrupt: bool = False
    everything: bool = False

    def concerns(self, contents: SlabContents) -> bool:
        """Whether the file is of the namespace."""
        wanted = self.namespace
        return wanted is None or contents.namespace.startswith(wanted) or contents.layout.model == wanted

    @property
    def whole_files(self) -> bool:
        """Whether files go as they are."""
        return self.older_than is None and not self.corrupt


@dataclass(frozen=True, slots=True)
class Removal:
    """What was, or would be, removed from a file; ``whole`` when the file itself is."""

    path: Path
    blocks: int
    nbytes: int
    whole: bool


def remove(
    path: Path, selection: Selection, *, dry_run: bool, on_progress: Progress | None = None
) -> list[Removal]:
    """Remove blocks from a folder's files, and with each block what hangs below it.

    Raises ``StorageBusyError`` for a file that an engine has open, before anything of that file is changed, and
    ``StorageError`` for a named file that is none of fdcache's.
    """
    return [
        removal
        for file in _removable_files(path)
        if (removal := _remove_from(file, selection, dry_run, on_progress)) is not None
    ]


def _remove_from(
    path: Path, selection: Selection, dry_run: bool, on_progress: Progress | None
) -> Removal | None:
    with _locked(path):
        contents = read_file(path, verify=selection.corrupt, on_progress=on_progress)
        if isinstance(contents, Damaged):
            unreadable = selection.namespace is None and (selection.everything or selection.corrupt)
            if unreadable and not dry_run:
                path.unlink()
            return Removal(path, 0, 0, whole=True) if unreadable else None
        if not selection.concerns(contents):
            return None
        if selection.whole_files:
            if not dry_run:
                path.unlink()
            count = len(contents.slots)
            return Removal(path, count, count * contents.superblock.record_bytes, whole=True)
        doomed = _with_descendants(contents, _chosen(contents, selection))
        if doomed.any() and not dry_run:
            _erase(contents, contents.slots[doomed])
        count = int(doomed.sum())
        return Removal(path, count, count * contents.superblock.record_bytes, whole=False)


def _chosen(contents: SlabContents, selection: Selection) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    chosen = np.ones(len(contents.slots), np.bool_)
    if selection.older_than is not None:
        limit = time.time_ns() // 1_000_000 - int(selection.older_than * 1000)
        chosen &= contents.written_ms.astype(np.int64) < limit
    if selection.corrupt:
        chosen &= np.isin(contents.slots, contents.corrupt)
    return chosen


def _with_descendants(
    contents: SlabContents, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
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
        lock = SlabLock(path)
    except StorageBusyError as error:
        raise StorageBusyError(f"{path}: an engine is using it; end it first, or reset through it") from error
    try:
        yield
    finally:
        lock.release()
