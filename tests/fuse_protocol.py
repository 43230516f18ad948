"""A file system in this process, by the kernel's FUSE protocol: no library, but the right to mount."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Protocol

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_OPENED = struct.Struct("<QII")
_INIT = struct.Struct("<4I2H2I2H2I24x")
_SET = struct.Struct("<IIQQ8x3Q3II4x2I4x")
_TRANSFER = struct.Struct("<QQIIQII")
_VERSION, _BIG_WRITES, _MANY_PAGES = (7, 31), 1 << 5, 1 << 22
_MOST_BYTES, _PAGES = 1 << 20, 256
_DIRECT = 1
"""Nothing is kept in the page cache: every read comes here, as it goes to a server whose files others change."""
_SIZE, _ACCESSED, _MODIFIED, _ACCESSED_NOW, _MODIFIED_NOW = 8, 16, 32, 128, 256
_THREADS = 16


class Operation(IntEnum):
    """The kernel's numbers of what it asks."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42
    RENAME_TO = 45


_UNANSWERED = (Operation.FORGET, Operation.BATCH_FORGET, Operation.INTERRUPT)


class FolderOperations(Protocol):
    """What is done with paths below the mounted folder, which begin with a slash. Each may raise ``OSError``."""

    def getattr(self, name: str) -> os.stat_result: ...
    def readdir(self, name: str) -> list[str]: ...
    def open(self, name: str, flags: int) -> int: ...
    def create(self, name: str, mode: int) -> int: ...
    def read(self, handle: int, size: int, offset: int) -> bytes: ...
    def write(self, handle: int, data: bytes, offset: int) -> int: ...
    def link(self, target: str, source: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def unlink(self, name: str) -> None: ...
    def mkdir(self, name: str, mode: int) -> None: ...
    def rmdir(self, name: str) -> None: ...
    def utimens(self, name: str, accessed: int | None, modified: int | None) -> None: ...
    def truncate(self, name: str, length: int) -> None: ...
    def fsync(self, handle: int) -> None: ...
    def flush(self, handle: int) -> None: ...
    def release(self, handle: int) -> None: ...
    def statfs(self) -> os.statvfs_result: ...


class FuseServer:
    """Mounts operations at a folder and serves them until it is unmounted. Raises ``OSError``."""

    def __init__(self, folder: str, operations: FolderOperations) -> None:
        self._operations = operations
        self._names = {0: "/", 1: "/"}
        self._numbers = {"/": 1}
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        library = ctypes.CDLL(None, use_errno=True)
        if library.mount(b"fdcache-test", os.fsencode(folder), b"fuse", 0, options.encode()) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{folder}: {os.strerror(number)}")

    def serve(self) -> None:
        """Answer the kernel, several questions at once."""
        with ThreadPoolExecutor(_THREADS) as threads:
            while True:
                try:
                    message = os.read(self._device, _MOST_BYTES + 4096)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue
                    return  # it is unmounted
                if _IN.unpack_from(message)[1] == Operation.INIT:
                    self._answer(message)
                else:
                    threads.submit(self._answer, message)

    def _answer(self, message: bytes) -> None:
        _, operation, unique, node = _IN.unpack_from(message)[:4]
        if operation in _UNANSWERED:
            return
        found, number = b"", 0
        try:
            found = self._call(operation, node, message[_IN.size :])
        except OSError as error:
            number = error.errno or errno.EIO
        try:
            os.write(self._device, _OUT.pack(_OUT.size + len(found), -number, unique) + found)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # the question was given up
                raise

    def _call(self, operation: int, node: int, body: bytes) -> bytes:
        calls: dict[int, Callable[[str, bytes], bytes | None]] = {
            Operation.INIT: self._init,
            Operation.LOOKUP: lambda name, body: self._entry(_below(name, body)),
            Operation.GETATTR: lambda name, _: self._attributes(name),
            Operation.SETATTR: self._set,
            Operation.MKDIR: self._mkdir,
            Operation.UNLINK: lambda name, body: self._operations.unlink(_below(name, body)),
            Operation.RMDIR: lambda name, body: self._operations.rmdir(_below(name, body)),
            Operation.RENAME: lambda name, body: self._rename(name, body, 8),
            Operation.RENAME_TO: lambda name, body: self._rename(name, body, 16),
            Operation.LINK: self._link,
            Operation.OPEN: self._open,
            Operation.CREATE: self._create,
            Operation.READ: self._read,
            Operation.WRITE: self._write,
            Operation.STATFS: self._statfs,
            Operation.RELEASE: lambda _, body: self._operations.release(_handle(body)),
            Operation.FSYNC: lambda _, body: self._operations.fsync(_handle(body)),
            Operation.FLUSH: lambda _, body: self._operations.flush(_handle(body)),
            Operation.OPENDIR: lambda _name, _body: _OPENED.pack(0, 0, 0),
            Operation.READDIR: self._readdir,
            Operation.RELEASEDIR: lambda _name, _body: b"",
        }
        if operation not in calls:
            raise OSError(errno.ENOSYS, "not served")
        return calls[operation](self._names[node], body) or b""

    def _init(self, _: str, body: bytes) -> bytes:
        ahead = struct.unpack_from("<I", body, 8)[0]
        flags = _BIG_WRITES | _MANY_PAGES
        return _INIT.pack(*_VERSION, ahead, flags, _THREADS, _THREADS, _MOST_BYTES, 1, _PAGES, 0, 0, 0)

    # --- names and attributes -----------------------------------------------------------------------------------

    def _entry(self, name: str) -> bytes:
        status = self._operations.getattr(name)
        number = self._numbers.setdefault(name, len(self._numbers) + 1)
        self._names[number] = name
        return _ENTRY.pack(number, 0, 0, 0, 0, 0) + self._packed(number, status)

    def _attributes(self, name: str) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._packed(
            self._numbers[name], self._operations.getattr(name)
        )

    def _packed(self, number: int, status: os.stat_result) -> bytes:
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        seconds, rest = zip(*(divmod(each, 10**9) for each in times), strict=True)
        owner = (status.st_nlink, status.st_uid, status.st_gid)
        sizes = (status.st_size, status.st_blocks)
        return _ATTRIBUTES.pack(number, *sizes, *seconds, *rest, status.st_mode, *owner, 0, 4096, 0)

    def _set(self, name: str, body: bytes) -> bytes:
        valid, _, _, size, *times = _SET.unpack_from(body)[:10]
        accessed, modified = (times[at] * 10**9 + times[at + 3] for at in range(2))
        if valid & _SIZE:
            self._operations.truncate(name, size)
        if valid & (_ACCESSED | _MODIFIED):
            self._operations.utimens(
                name,
                accessed if valid & _ACCESSED and not valid & _ACCESSED_NOW else None,
                modified if valid & _MODIFIED and not valid & _MODIFIED_NOW else None,
            )
        return self._attributes(name)

    def _mkdir(self, name: str, body: bytes) -> bytes:
        made = _below(name, body[8:])
        self._operations.mkdir(made, struct.unpack_from("<I", body)[0])
        return self._entry(made)

    def _rename(self, name: str, body: bytes, skipped: int) -> bytes:
        old, new = body[skipped:].split(b"\0")[:2]
        target = _below(self._names[struct.unpack_from("<Q", body)[0]], new)
        self._operations.rename(_below(name, old), target)
        number = self._numbers.pop(_below(name, old), None)
        if number is not None:
            self._numbers[target], self._names[number] = number, target
        return b""

    def _link(self, name: str, body: bytes) -> bytes:
        target = _below(name, body[8:])
        self._operations.link(target, self._names[struct.unpack_from("<Q", body)[0]])
        return self._entry(target)

    def _readdir(self, name: str, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        found = b""
        for at, each in enumerate(self._operations.readdir(name)[offset:], offset + 1):
            text = os.fsencode(each)
            one = struct.pack("<QQII", 1, at, len(text), 0) + text
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found

    def _statfs(self, _: str, body: bytes) -> bytes:
        found = self._operations.statfs()
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I24x", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0)

    # --- files ----------------------------------------------------------------------------------------------------

    def _open(self, name: str, body: bytes) -> bytes:
        handle = self._operations.open(name, struct.unpack_from("<I", body)[0])
        return _OPENED.pack(handle, _DIRECT, 0)

    def _create(self, name: str, body: bytes) -> bytes:
        made = _below(name, body[16:])
        handle = self._operations.create(made, struct.unpack_from("<I", body, 4)[0])
        return self._entry(made) + _OPENED.pack(handle, _DIRECT, 0)

    def _read(self, _: str, body: bytes) -> bytes:
        handle, offset, size = _TRANSFER.unpack_from(body)[:3]
        return self._operations.read(handle, size, offset)

    def _write(self, _: str, body: bytes) -> bytes:
        handle, offset, size = _TRANSFER.unpack_from(body)[:3]
        data = body[_TRANSFER.size : _TRANSFER.size + size]
        return struct.pack("<II", self._operations.write(handle, data, offset), 0)


def _below(folder: str, name: bytes) -> str:
    """Return the path of a name, which may end with a null byte."""
    return f"{folder.rstrip('/')}/{os.fsdecode(name.partition(bytes(1))[0])}"


def _handle(body: bytes) -> int:
    return int(struct.unpack_from("<Q", body)[0])
