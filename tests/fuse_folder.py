"""A file system that passes everything through to another folder, and disturbs what it is told to.

    python -m tests.fuse_folder SOURCE MOUNTPOINT FAULTS

``FAULTS`` is a file with a JSON object, read at each call: an operation, and ``[what, times]``. What is the name of an
errno, ``short`` or ``half`` (bytes read or written), or a number of seconds to wait; times is -1 without end.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def serve(source: str, mountpoint: str, faults: Path) -> None:
    import mfusepy

    counts: dict[str, int] = {}
    lock = threading.Lock()

    def fault(operation: str) -> str | float | None:
        """Return what is to go wrong with this call."""
        given: Any = json.loads(faults.read_text() or "{}").get(operation)
        if given is None:
            return None
        what: str | float = given[0]
        times: int = given[1]
        with lock:
            key = f"{operation} {what} {times}"
            counts[key] = counts.get(key, 0) + 1
            if 0 <= times < counts[key]:
                return None
        if isinstance(what, str) and what.startswith("E"):
            raise mfusepy.FuseOSError(getattr(errno, what))
        if isinstance(what, int | float):
            time.sleep(what)
        return what

    def path(name: str) -> Path:
        return Path(source + name)

    class PassedThrough(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def getattr(self, name: str, fh: int | None = None) -> dict[str, int]:
            fault("getattr")
            status = os.lstat(path(name))
            keys = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks")
            times = {key: getattr(status, f"{key}_ns") for key in ("st_atime", "st_mtime", "st_ctime")}
            return {key: getattr(status, key) for key in keys} | times

        def readdir(self, name: str, fh: int) -> list[str]:
            fault("readdir")
            return [".", "..", *(each.name for each in path(name).iterdir())]

        def open(self, name: str, flags: int) -> int:
            fault("open")
            return os.open(path(name), flags)

        def create(self, name: str, mode: int, fi: Any = None) -> int:
            fault("create")
            return os.open(path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

        def read(self, name: str, size: int, offset: int, fh: int) -> bytes:
            what = fault("read")
            content = os.pread(fh, size, offset)
            return content[: len(content) // 2] if what == "short" else content

        def write(self, name: str, data: bytes, offset: int, fh: int) -> int:
            what = fault("write")
            return os.pwrite(fh, data[: max(len(data) // 2, 1)] if what == "half" else data, offset)

        def link(self, target: str, source_name: str) -> None:
            fault("link")
            os.link(path(source_name), path(target))

        def rename(self, old: str, new: str) -> None:
            fault("rename")
            path(old).rename(path(new))

        def unlink(self, name: str) -> None:
            fault("unlink")
            path(name).unlink()

        def mkdir(self, name: str, mode: int) -> None:
            fault("mkdir")
            path(name).mkdir(mode)

        def rmdir(self, name: str) -> None:
            path(name).rmdir()

        def utimens(self, name: str, times: tuple[int, int] | None = None) -> None:
            fault("utimens")
            os.utime(path(name), ns=times or (time.time_ns(), time.time_ns()))

        def fsync(self, name: str, datasync: int, fh: int) -> None:
            fault("fsync")
            os.fsync(fh)

        def flush(self, name: str, fh: int) -> None:
            fault("flush")

        def release(self, name: str, fh: int) -> None:
            os.close(fh)

        def truncate(self, name: str, length: int, fh: int | None = None) -> None:
            os.truncate(path(name), length)

        def statfs(self, name: str) -> dict[str, int]:
            found = os.statvfs(path(name))
            return {
                key: getattr(found, key) for key in ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize")
            }

    # No caches: every call comes here, as it goes to a server whose files others change.
    mfusepy.FUSE(
        PassedThrough(), mountpoint, foreground=True, direct_io=True, attr_timeout=0, entry_timeout=0
    )


class FaultyFolder:
    """A mounted folder, and what goes wrong in it."""

    def __init__(self, folder: Path, source: Path, faults: Path) -> None:
        self.folder = folder
        self.source = source
        self._faults = faults
        self.calm()

    def disturb(self, **faults: tuple[str | float, int]) -> None:
        """Disturb operations from now on, in place of what was disturbed before."""
        draft = self._faults.with_suffix(".new")
        draft.write_text(json.dumps(faults))
        draft.replace(self._faults)

    def calm(self) -> None:
        self.disturb()


@contextmanager
def faulty_folder(
    base: Path, until: Callable[[Callable[[], bool], str], None]
) -> Iterator[FaultyFolder | None]:
    """Mount a folder; yield None where that is not possible."""
    source, folder, faults = base / "source", base / "mounted", base / "faults.json"
    source.mkdir()
    folder.mkdir()
    found = FaultyFolder(folder, source, faults)
    command = [sys.executable, "-m", "tests.fuse_folder", str(source), str(folder), str(faults)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: os.path.ismount(folder) or process.poll() is not None, "the file system is mounted")
        yield found if os.path.ismount(folder) else None
    finally:
        found.calm()
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
