"""What the eviction order of a tier has learned, in a file for the next process."""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Callable
from pathlib import Path

from fdcache import _core

log = logging.getLogger(__name__)

_MAGIC = b"fdcache-reuse\0\0\0"
_VERSION = 1
_HEADER = struct.Struct("<16sI4xQ32s")  # magic, version, bytes that follow and their SHA-256
_SAVE_SECONDS = 16.0
"""Between two files: the order computes its tables as often."""


class LearnedFile:
    """The file of one tier.

    ``save_if_due`` writes it from time to time, so that a process that is killed leaves it, too. A file that is
    damaged, or of another version, is ignored: the tables then start empty.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._save_at = clock() + _SAVE_SECONDS
        self._is_writable = True

    def save_if_due(self, tier: _core.Tier) -> None:
        """Write what the tier has learned, if that was not done for 16 s."""
        if self._clock() >= self._save_at:
            self._save_at = self._clock() + _SAVE_SECONDS
            self.save(tier)

    def save(self, tier: _core.Tier) -> None:
        """Write what the tier has learned; nothing for a policy that does not learn. A full disk is logged once."""
        saved = tier.save_reuse()
        if not saved:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.write_bytes(
                _HEADER.pack(_MAGIC, _VERSION, len(saved), hashlib.sha256(saved).digest()) + saved
            )
            fresh.rename(self.path)
        except OSError as error:
            if self._is_writable:
                log.warning("%s: what eviction has learned is not kept: %s", self.path, error)
            self._is_writable = False
        else:
            self._is_writable = True

    def load(self, tier: _core.Tier) -> bool:
        """Restore the tier's tables from the file. Return True if it did; a policy that does not learn needs none."""
        if not tier.save_reuse():
            return False
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = str(error)
        else:
            problem = self._problem(tier, data)
        if problem:
            log.warning("%s: eviction learns anew: %s", self.path, problem)
        return not problem

    @staticmethod
    def _problem(tier: _core.Tier, data: bytes) -> str:
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            return "it is not a file of learned tables"
        _, version, size, digest = _HEADER.unpack_from(data)
        if version != _VERSION:
            return f"it has version {version}, not {_VERSION}"
        saved = data[_HEADER.size :]
        if len(saved) != size or hashlib.sha256(saved).digest() != digest:
            return "it is damaged"
        return "" if tier.load_reuse(saved) else "its tables are of another version"

    def remove(self) -> None:
        """Remove the file, if it is there."""
        self.path.unlink(missing_ok=True)
