"""Objects that own threads and mappings: refused in a forked process, shut down when their own process exits."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import NoReturn, Protocol

from fdcache.errors import FdcacheError, ForkedProcessError

logger = logging.getLogger(__name__)

_SECONDS_AT_EXIT = 5.0
"""Longest wait of a process exit for copies in flight, which take milliseconds unless something hangs."""


class ProcessGuard:
    """Knows the process that created its owner; one comparison costs no system call.

    if not self._guard.is_own:
        self._guard.refuse()
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._process = os.getpid()
        self.is_own = True
        """False in processes that were forked from the one that created it."""
        _guards.add(self)

    def refuse(self) -> NoReturn:
        """Raise ``ForkedProcessError``."""
        raise ForkedProcessError(
            f"this {self._owner} belongs to process {self._process} and was forked into {os.getpid()}; "
            "start workers with the 'spawn' method and create one there"
        )


_guards: weakref.WeakSet[ProcessGuard] = weakref.WeakSet()


def _disown() -> None:
    for guard in _guards:
        guard.is_own = False


os.register_at_fork(after_in_child=_disown)


class Closable(Protocol):
    """An object that ``close_at_exit`` shuts down."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut down within ``timeout`` seconds."""


_open: weakref.WeakKeyDictionary[Closable, ProcessGuard] = weakref.WeakKeyDictionary()


def close_at_exit(owner: Closable, guard: ProcessGuard) -> None:
    """Shut ``owner`` down if its process exits while it is open, as after an exception.

    Exit handlers run last in, first out. Registered again for each owner, this one runs before those of the libraries
    that the owner uses.
    """
    _open[owner] = guard
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def forget_at_exit(owner: Closable) -> None:
    """Drop an owner that was shut down."""
    _open.pop(owner, None)


def _close_all() -> None:
    left = [owner for owner, guard in _open.items() if guard.is_own]
    for owner in left:
        if owner not in _open:  # shut down by another owner
            continue
        try:
            owner.shutdown(_SECONDS_AT_EXIT)
        except FdcacheError as error:
            logger.warning("the process exits with copies in flight: %s", error)
