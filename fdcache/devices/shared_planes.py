"""Planes of the CPU in a shared-memory file, which a peer on the same node maps."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fdcache._core import PlaneTable
from fdcache.devices.frameworks import as_tensor
from fdcache.errors import HostMemoryError, TransferError
from fdcache.layout import KVLayout
from fdcache.machine.shared_files import remove_abandoned, try_lock

PREFIX = "fdcache-planes-"
_PAGE = 4096


class PlanesFile(msgspec.Struct, frozen=True, array_like=True):
    """Description of a file of planes for a peer. ``inode`` tells it from a later file of the same name."""

    path: str
    inode: int
    nbytes: int
    num_blocks: int
    offsets: tuple[int, ...]
    strides: tuple[int, ...]


class SharedPlanes:
    """Zero-filled planes of ``num_blocks`` blocks in a file in ``directory``, which is removed at the end.

    ::

        planes = SharedPlanes(layout, 1024, Path("/dev/shm"))
        controller.register_kv_cache(planes.tensors())

    Files of processes that were killed are removed. Raises ``HostMemoryError`` if the directory takes no such file, or
    has no room for it.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, directory: Path) -> None:
        remove_abandoned(directory, PREFIX)
        self._layout = layout
        self._blocks = [
            layout.draft_blocks(num_blocks) if layout.is_draft(plane.layer) else num_blocks
            for plane in layout.planes
        ]
        self._offsets, end = [], 0
        for plane, blocks in zip(layout.planes, self._blocks, strict=True):
            self._offsets.append(end)
            end += -(-blocks * plane.device_stride // _PAGE) * _PAGE
        self.num_blocks = num_blocks
        self.nbytes = end
        self._fd, self.path = _create(directory, end)
        self._map = mmap.mmap(self._fd, end)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._remove = weakref.finalize(self, _remove, self._fd, self.path)
        _open.add(self)

    def tensors(self, framework: str = "numpy") -> list[Any]:
        """Return a tensor for each plane of the layout, in its order."""
        return [
            as_tensor(self._bytes[offset : offset + blocks * plane.device_stride], plane, blocks, framework)
            for plane, offset, blocks in zip(self._layout.planes, self._offsets, self._blocks, strict=True)
        ]

    def describe(self, addresses: Sequence[int], strides: Sequence[int]) -> PlanesFile | None:
        """Return the description of planes at these addresses, None if they are not all in this file."""
        start = self._bytes.ctypes.data
        offsets = tuple(address - start for address in addresses)
        if not all(0 <= offset < self.nbytes for offset in offsets):
            return None
        inode = os.fstat(self._fd).st_ino
        return PlanesFile(str(self.path), inode, self.nbytes, self.num_blocks, offsets, tuple(strides))

    def close(self) -> None:
        """Remove the file. The memory lasts until the last tensor is gone, in peers until they unmap it."""
        self._remove()


_open: weakref.WeakSet[SharedPlanes] = weakref.WeakSet()


def find_shared(addresses: Sequence[int], strides: Sequence[int]) -> PlanesFile | None:
    """Return the description of planes of this process, None if they are not in a file of ``SharedPlanes``."""
    return next((found for each in list(_open) if (found := each.describe(addresses, strides))), None)


class MappedPlanes:
    """The planes of a peer, mapped read-only. Raises ``TransferError`` if the file is missing or another one."""

    def __init__(self, file: PlanesFile, layout: KVLayout) -> None:
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is not waited for
        except OSError as error:
            raise TransferError(
                f"the peer's planes {file.path} cannot be opened: {error.strerror}; ipc needs both instances on one "
                "node with the same FDCACHE_TRANSFER_DIR"
            ) from error
        try:
            status = os.fstat(fd)
            if status.st_ino != file.inode or status.st_size < file.nbytes:
                raise TransferError(
                    f"{file.path} does not match the peer's description; was the prefill instance restarted?"
                )
            self._map = mmap.mmap(fd, file.nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        data = np.frombuffer(self._map, np.uint8)
        _check(file, layout)
        self.num_blocks = file.num_blocks
        self.addresses = [data.ctypes.data + offset for offset in file.offsets]
        self.table = PlaneTable(
            self.addresses,
            list(file.strides),
            [plane.nbytes for plane in layout.planes],
            [plane.offset for plane in layout.planes],
            data,
        )


def _check(file: PlanesFile, layout: KVLayout) -> None:
    """Raise ``TransferError`` unless every block of every plane lies within the file."""
    if len(file.offsets) != layout.num_planes or len(file.strides) != layout.num_planes:
        raise TransferError(f"planes: the peer has {len(file.offsets)}, the layout {layout.num_planes}")
    for plane, offset, stride in zip(layout.planes, file.offsets, file.strides, strict=True):
        end = offset + (file.num_blocks - 1) * stride + plane.nbytes
        if offset < 0 or stride < plane.nbytes or file.num_blocks < 1 or end > file.nbytes:
            raise TransferError(
                f"plane {plane.kind.value} of layer {plane.layer} is not within the peer's file"
            )


def _create(directory: Path, nbytes: int) -> tuple[int, Path]:
    """Create a locked file. It gets its name once it is locked, so that nobody takes it for an abandoned one."""
    name = uuid.uuid4().hex[:16]
    hidden, path = directory / f".{PREFIX}{name}", directory / f"{PREFIX}{name}"
    try:
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostMemoryError(
            f"{directory} takes no file of planes: {error.strerror}; set FDCACHE_TRANSFER_DIR to a folder on a tmpfs"
        ) from error
    try:
        try_lock(fd)
        os.posix_fallocate(fd, 0, nbytes)
        hidden.rename(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise HostMemoryError(
            f"{directory} has no room for {nbytes} bytes of planes; use fewer blocks, give the container more shared "
            "memory (docker --shm-size), or set FDCACHE_TRANSFER_DIR"
        ) from error
    return fd, path


def _remove(fd: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)
