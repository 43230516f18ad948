"""Proofs of life and death. A process that the kernel says is gone can write nothing any more."""

from __future__ import annotations

import fcntl
import os
import select
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fdcache.service.wire.protocol import Live

PREFIX = "fdcache-live-"


def pid_namespace() -> int:
    """Which pid namespace this process is in."""
    return Path("/proc/self/ns/pid").stat().st_ino


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its id, which process it is."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[19])


class LiveFile:
    """A file locked by this process, and by children that it forks without exec, as long as one of them lives."""

    def __init__(self, directory: Path, engine: str | None = None) -> None:
        path = directory / f"{PREFIX}{uuid.uuid4().hex[:16]}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.live = Live(
            path=str(path),
            engine=engine or str(path),
            pid=os.getpid(),
            pid_namespace=pid_namespace(),
            start_time=start_time(os.getpid()),
        )
        os.write(self._fd, msgspec.json.encode(self.live))

    def close(self) -> None:
        """Take the file away: this process uses nothing of the service any more."""
        if self._fd >= 0:
            Path(self.live.path).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class Watch:
    """Whether the process behind a live file is gone."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._pidfd = _open_pidfd(live)
        self._poller: select.poll | None = None
        if self._pidfd >= 0:
            self._poller = select.poll()
            self._poller.register(self._pidfd, select.POLLIN)

    @property
    def pidfd(self) -> int | None:
        """A descriptor that becomes readable when the process ends; None when it is not visible from here."""
        return self._pidfd if self._pidfd >= 0 else None

    def is_gone(self) -> bool:
        """Whether the process has ended or said goodbye; never true of one that is merely silent."""
        if self._poller is not None and self._poller.poll(0):
            return True
        path = Path(self.live.path)
        return is_unlocked(path) if self._poller is None else not path.exists()

    def bury(self) -> None:
        """Take away the live file of a process that is gone, and stop watching."""
        Path(self.live.path).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
            self._poller = None


def _open_pidfd(live: Live) -> int:
    if live.pid_namespace != pid_namespace():
        return -1
    try:
        pidfd = os.pidfd_open(live.pid)
        if start_time(live.pid) == live.start_time:
            return pidfd
        os.close(pidfd)
    except OSError:
        pass  # no such process, or none that may be seen: its lock file tells
    return -1


def is_unlocked(path: Path) -> bool:
    """Whether nobody holds a live file, or it was taken away."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def earlier_processes(directory: Path) -> Iterator[Live]:
    """The processes whose live files in a folder are locked; the files of dead ones are taken away."""
    for path in sorted(directory.glob(f"{PREFIX}*")):
        try:
            live = msgspec.json.decode(path.read_bytes(), type=Live)
        except (msgspec.DecodeError, FileNotFoundError):
            live = None
        if is_unlocked(path):
            path.unlink(missing_ok=True)
        elif live is not None:
            yield live
