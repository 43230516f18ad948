"""Objects as files below one folder, which nodes share by NFS, Lustre, CephFS or another file system."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdcache.storage.objects.backend import (
    LAYOUT,
    ROOT,
    DamagedObjectError,
    ObjectExistsError,
    ObjectMissingError,
    Stored,
    StoreFailedError,
)
from fdcache.storage.objects.files import NO_FILE, read_file

_DRAFT = ".draft"
_NAME_PARTS = 6
"""Parts of an object's name: what has as many and is a folder is in an object's place."""

_ABANDONED_SECONDS = 3600.0
"""Age, by the file system's clock, at which a draft has no writer any more."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_UNREADABLE = (errno.EIO, errno.EACCES, errno.EPERM)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class SharedFolder:
    """Objects in a folder. A file is written under another name, and linked to its own as a whole.

    The folder is never made: one that is missing is taken for a file system that is not mounted. ``fsync``: a file is
    on the disk before it has its name. No lock is taken.
    """

    def __init__(self, folder: Path, *, fsync: bool = True) -> None:
        self._folder = folder
        self._fsync = fsync
        self._drafts = itertools.count()
        self._own = f".{socket.gethostname()}.{os.getpid()}.{id(self):x}"
        self._device: int | None = None

    @property
    def place(self) -> str:
        """The folder."""
        return str(self._folder)

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Return bytes of a file; a file that was replaced meanwhile is opened once more."""
        with self._failures(name):
            try:
                return self._read(name, offset, length)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
            return self._read(name, offset, length)

    def _read(self, name: str, offset: int, length: int) -> memoryview:
        try:
            return read_file(self._folder / name, offset, length)
        except OSError as error:
            if error.errno in NO_FILE or (error.errno in _UNREADABLE and self._can_read_others(name)):
                raise DamagedObjectError(f"{self._folder / name}: {error.strerror}") from error
            raise

    def _can_read_others(self, name: str) -> bool:
        """Return True if the folder can be listed, and its medium answers for the file beside, the layout."""
        try:
            os.scandir(self._folder / ROOT).close()
        except OSError:
            return False
        layout = Path(*Path(name).parts[:3], LAYOUT)
        if str(layout) == name:
            return True
        try:
            read_file(self._folder / layout, 0, 1)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EACCES, *NO_FILE)
        return True

    def create(self, name: str, content: NDArray[np.uint8]) -> None:
        """Write a file and give it its name, unless that is taken."""
        with self._draft(name, content) as draft:
            path = self._folder / name
            try:
                draft.link(path)
            except FileExistsError:
                raise ObjectExistsError(name) from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if (
                    path.exists()
                ):  # without links two nodes may both come here: their files hold the same blocks
                    raise ObjectExistsError(name) from None
                draft.rename(path)

    def replace(self, name: str, content: NDArray[np.uint8]) -> None:
        """Write a file and give it its name. An empty folder of that name is removed."""
        path = self._folder / name
        with self._draft(name, content) as draft:
            try:
                with suppress(OSError):
                    path.rmdir()
                draft.rename(path)
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
                raise DamagedObjectError(f"{path}: {error.strerror}; remove it") from error

    @contextmanager
    def _draft(self, name: str, content: NDArray[np.uint8]) -> Iterator[_Draft]:
        self._check_mount()
        path = self._folder / name
        draft = _Draft(self._folder, path.with_name(f"{path.name}{self._own}.{next(self._drafts)}{_DRAFT}"))
        with self._failures(name):
            try:
                draft.write(content, self._fsync)
                yield draft
                if self._fsync:
                    _sync_folder(path.parent)
            finally:
                with suppress(OSError):
                    draft.path.unlink()

    def mark_used(self, names: Iterable[str]) -> None:
        """Set the files' times to the file system's clock."""
        for name in names:
            with suppress(ObjectMissingError), self._failures(name):
                os.utime(self._folder / name)

    def stored(self, prefix: str) -> Iterator[Stored]:
        """Yield files, and remove what a writer that has died left behind."""
        self._check_mount()
        drafts: list[tuple[float, Path]] = []
        newest = 0.0
        for path, status in self._files(self._folder / prefix):
            newest = max(newest, status.st_mtime)
            if path.name.endswith(_DRAFT):
                drafts.append((status.st_mtime, path))
            else:
                yield Stored(str(path.relative_to(self._folder)), status.st_size, status.st_mtime)
        for written, path in drafts:
            if newest - written > _ABANDONED_SECONDS:
                with suppress(OSError):
                    path.unlink()

    def _files(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        with self._failures(str(folder)):
            try:
                with os.scandir(folder) as entries:
                    found = list(entries)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return
        for entry in found:
            with self._failures(entry.name):
                try:
                    is_folder, status = entry.is_dir(follow_symlinks=False), entry.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    continue  # removed meanwhile
            if is_folder:
                path = Path(entry.path)
                yield from self._files(path)
                if len(path.relative_to(self._folder).parts) == _NAME_PARTS:
                    yield path, status
            else:
                yield Path(entry.path), status

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, and what is in the place of one; a folder goes once it is empty."""
        for name in names:
            with suppress(ObjectMissingError), self._failures(name):
                try:
                    (self._folder / name).unlink()
                except IsADirectoryError:
                    with suppress(OSError):
                        (self._folder / name).rmdir()

    def close(self) -> None:
        """Keep nothing open: there is nothing to release."""

    def _check_mount(self) -> None:
        """Raise ``StoreFailedError`` if the folder is not there, or another file system has taken its place."""
        try:
            status = self._folder.stat()
        except OSError as error:
            raise StoreFailedError(
                f"{self._folder}: {error.strerror}; make the folder once, in the shared file system, and mount that"
            ) from error
        if status.st_dev != self._device:
            if self._device is not None and not (self._folder / ROOT).is_dir():
                raise StoreFailedError(f"{self._folder}: its file system is not mounted; mount it again")
            self._device = status.st_dev

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                self._check_mount()
                raise ObjectMissingError(name) from error
            raise StoreFailedError(
                f"{self._folder}: {error.strerror or error}",
                read_only=error.errno in _READ_ONLY,
                no_room=error.errno in _NO_ROOM,
            ) from error


class _Draft:
    """A file under a name that no reader asks for."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root = root
        self.path = path

    def _make_folders(self) -> None:
        """Make the folders between the root, which has to be there, and the file."""
        folder = self._root
        for part in self.path.parent.relative_to(self._root).parts:
            folder /= part
            folder.mkdir(exist_ok=True)

    def write(self, content: NDArray[np.uint8], fsync: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o664)
        except FileNotFoundError:
            self._make_folders()
            descriptor = os.open(self.path, flags, 0o664)
        try:
            left = content.data
            while left:
                left = left[os.write(descriptor, left) :]
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def link(self, path: Path) -> None:
        os.link(self.path, path)

    def rename(self, path: Path) -> None:
        self.path.replace(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise  # some file systems have no sync of a folder, and need none
    finally:
        os.close(descriptor)
