"""Threads and mappings do not survive a fork; what owns them says so instead of hanging."""

from __future__ import annotations

import os

from fdcache.errors import ForkedProcessError


class ProcessGuard:
    """Remembers the process that made it."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._process = os.getpid()

    def check(self) -> None:
        """Raise ``ForkedProcessError`` in any other process."""
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"this {self._owner} belongs to process {self._process} and was forked into {os.getpid()}; "
                "start workers with the 'spawn' method and make one there"
            )
