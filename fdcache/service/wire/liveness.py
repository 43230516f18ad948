"""Liveness of processes: lock files and pidfds. A process that the kernel reports dead can write nothing any more."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import select
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fdcache.machine.decoding import MALFORMED

log = logging.getLogger("fdcache.service")

PREFIX = "fdcache-live-"
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{1,64}")
_MOST_LIVE_BYTES = 65536

FileName = Annotated[str, Meta(min_length=1, max_length=4096)]
Number = Annotated[int, Meta(ge=0, le=2**62)]


class Live(msgspec.Struct, frozen=True):
    """Identity of a process: its lock file, and its id in its own pid namespace.

    ``engine`` is the lock file of the scheduler process that this one works for; its own for a scheduler.
    ``start_time`` is in clock ticks since boot.
    """

    path: FileName
    engine: FileName
    pid: Annotated[int, Meta(ge=1, lt=2**31)]
    pid_namespace: Number
    start_time: Number


class LiveFile:
    """Lock file of this process. The lock also lasts while children that it forked without exec are alive.

    ```python
    file = LiveFile(directory)
    register(file.live)
    ...
    file.close()
    ```
    """

    def __init__(self, directory: Path, engine: str | None = None) -> None:
        name = f"{PREFIX}{uuid.uuid4().hex[:16]}"
        path, hidden = directory / name, directory / f".{name}"
        self._fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.live = Live(
                path=str(path),
                engine=engine or str(path),
                pid=os.getpid(),
                pid_namespace=_pid_namespace(),
                start_time=_start_time(os.getpid()),
            )
            os.write(self._fd, msgspec.json.encode(self.live))
            hidden.rename(
                path
            )  # now that it is locked, so that nobody takes it for the file of a dead process
        except OSError:
            hidden.unlink(missing_ok=True)
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Remove the file: this process no longer uses the service."""
        if self._fd >= 0:
            Path(self.live.path).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class Watch:
    """Watch of the process behind a live file: by pidfd where the process is visible, else by its lock."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._has_file = not _is_missing(Path(live.path))  # in a container of its own it may be elsewhere
        self._pidfd = _open_pidfd(live)
        self._poller: select.poll | None = None
        if self._pidfd >= 0:
            self._poller = select.poll()
            self._poller.register(self._pidfd, select.POLLIN)

    @property
    def pidfd(self) -> int | None:
        """Descriptor that becomes readable when the process ends; None when the process is not visible from here."""
        return self._pidfd if self._pidfd >= 0 else None

    @property
    def is_visible(self) -> bool:
        """True if the end of the process can be seen from here."""
        path = Path(self.live.path)
        return self._poller is not None or (not _is_missing(path) and _is_locked(path) is not None)

    def is_gone(self) -> bool:
        """Return True if the process has ended or removed its file; never for one that is only silent."""
        if self._poller is not None and self._poller.poll(0):
            return True
        path = Path(self.live.path)
        if self._poller is None:
            return _is_locked(path) is False
        return self._has_file and _is_missing(path)

    def remove_file(self) -> None:
        """Remove the live file of a dead process and stop watching."""
        _remove(Path(self.live.path))
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._poller = None


def live_processes(directory: Path) -> Iterator[Live]:
    """Yield the processes whose live files in a directory are locked; remove the files of dead ones."""
    for path in sorted(directory.glob(f"{PREFIX}*")):
        if not is_live_file(path, directory):
            log.warning("%s is ignored: it is not the file of a client", path)
        elif _is_locked(path) is False:
            _remove(path)
        elif (live := _read(path)) is not None:
            yield live


def is_live_file(path: Path, directory: Path) -> bool:
    """Return True for a file right in ``directory`` that a client may have made."""
    if path.parent != directory or not _NAME.fullmatch(path.name):
        return False
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _read(path: Path) -> Live | None:
    """Return what a live file says; None if it is gone or damaged."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MOST_LIVE_BYTES), type=Live)
    except (OSError, *MALFORMED) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None


def _remove(path: Path) -> None:
    with suppress(OSError):  # not a file any more, or of another user: it is no live file then
        path.unlink(missing_ok=True)


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start_time(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; with its id it identifies the process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


def _open_pidfd(live: Live) -> int:
    if live.pid_namespace != _pid_namespace():
        return -1
    try:
        pidfd = os.pidfd_open(live.pid)
        if _start_time(live.pid) == live.start_time:
            return pidfd
        os.close(pidfd)
    except (OSError, OverflowError):
        pass  # gone, hidden from this user, or no process id at all: the lock file decides
    return -1


def _is_locked(path: Path) -> bool | None:
    """Return True if a process locks the live file, False if none does or the file is gone, None if that is unknown."""
    if not path.name.startswith(PREFIX):
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except (OSError, ValueError):  # of another user, or no such file can exist
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_missing(path: Path) -> bool:
    """Return True if there is no such file; not if this user cannot look."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False
