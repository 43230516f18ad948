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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fuse_protocol import FuseServer

ROOT = Path(__file__).parent.parent


class Disturbances:
    """What is to go wrong, as the file says."""

    def __init__(self, faults: Path) -> None:
        self._faults = faults
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def meet(self, operation: str) -> str | float | None:
        """Return what is to go wrong with this call, once it has waited for that. Raises ``OSError``."""
        given: Any = json.loads(self._faults.read_text() or "{}").get(operation)
        if given is None:
            return None
        what: str | float = given[0]
        times: int = given[1]
        with self._lock:
            key = f"{operation} {what} {times}"
            self._counts[key] += 1
            if 0 <= times < self._counts[key]:
                return None
        if isinstance(what, str) and what.startswith("E"):
            raise OSError(getattr(errno, what), what)
        if isinstance(what, int | float):
            time.sleep(what)
        return what


class PassedThrough:
    """Operations of another folder; each may be disturbed under its name."""

    def __init__(self, source: str, faults: Path) -> None:
        self._source = source
        self._fault = Disturbances(faults).meet

    def _path(self, name: str) -> Path:
        return Path(self._source + name)

    def getattr(self, name: str) -> os.stat_result:
        self._fault("getattr")
        return self._path(name).lstat()

    def readdir(self, name: str) -> list[str]:
        self._fault("readdir")
        return [".", "..", *sorted(each.name for each in self._path(name).iterdir())]

    def open(self, name: str, flags: int) -> int:
        self._fault("open")
        return os.open(self._path(name), flags & ~os.O_NOFOLLOW)

    def create(self, name: str, mode: int) -> int:
        self._fault("create")
        return os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, handle: int, size: int, offset: int) -> bytes:
        what = self._fault("read")
        content = os.pread(handle, size, offset)
        return content[: len(content) // 2] if what == "short" else content

    def write(self, handle: int, data: bytes, offset: int) -> int:
        what = self._fault("write")
        return os.pwrite(handle, data[: max(len(data) // 2, 1)] if what == "half" else data, offset)

    def link(self, target: str, source: str) -> None:
        self._fault("link")
        os.link(self._path(source), self._path(target))

    def rename(self, old: str, new: str) -> None:
        self._fault("rename")
        self._path(old).rename(self._path(new))

    def unlink(self, name: str) -> None:
        self._fault("unlink")
        self._path(name).unlink()

    def mkdir(self, name: str, mode: int) -> None:
        self._fault("mkdir")
        self._path(name).mkdir(mode)

    def rmdir(self, name: str) -> None:
        self._path(name).rmdir()

    def utimens(self, name: str, accessed: int | None, modified: int | None) -> None:
        self._fault("utimens")
        now = time.time_ns()
        times = (now if accessed is None else accessed, now if modified is None else modified)
        os.utime(self._path(name), ns=times)

    def truncate(self, name: str, length: int) -> None:
        os.truncate(self._path(name), length)

    def fsync(self, handle: int) -> None:
        self._fault("fsync")
        os.fsync(handle)

    def flush(self, handle: int) -> None:
        self._fault("flush")

    def release(self, handle: int) -> None:
        os.close(handle)

    def statfs(self) -> os.statvfs_result:
        return os.statvfs(self._source)


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
    FuseServer(sys.argv[2], PassedThrough(sys.argv[1], Path(sys.argv[3]))).serve()
