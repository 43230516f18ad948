"""What owns threads and mappings says so in a forked process, and is closed before its own process ends."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

from fdcache import _core
from fdcache.errors import FdcacheError, ForkedProcessError

logger = logging.getLogger(__name__)

_SECONDS_AT_EXIT = 5.0
"""How long the end of a process waits for copies in flight: they take milliseconds, unless something hangs."""


class ProcessGuard:
    """Remembers the process that made it."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._process = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise ``ForkedProcessError`` in any other process."""
        if not self.is_own:
            raise ForkedProcessError(
                f"this {self._owner} belongs to process {self._process} and was forked into {os.getpid()}; "
                "start workers with the 'spawn' method and make one there"
            )


class Closable(Protocol):
    """What ``close_at_exit`` closes."""

    def shutdown(self, timeout: float | None = None) -> None:
        """End, within ``timeout`` seconds."""


_open: weakref.WeakKeyDictionary[Closable, ProcessGuard] = weakref.WeakKeyDictionary()


def close_at_exit(owner: Closable, guard: ProcessGuard) -> None:
    """Shut ``owner`` down when its process ends with it open, as after an exception.

    Exit handlers run last in, first out: registered anew for each owner, this one runs before those of the libraries
    that the owner uses.
    """
    _open[owner] = guard
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget_at_exit(owner: Closable) -> None:
    """``owner`` was shut down."""
    _open.pop(owner, None)


def _close_all() -> None:
    left = [owner for owner, guard in _open.items() if guard.is_own]
    for owner in left:
        if owner not in _open:  # another one has closed it
            continue
        try:
            owner.shutdown(_SECONDS_AT_EXIT)
        except FdcacheError as error:
            logger.warning("the process ends with copies in flight: %s", error)
    if left:
        # They are closed, and yet frames of the exception or of threads that never end may refer to them.
        _core.set_leak_warnings(False)
