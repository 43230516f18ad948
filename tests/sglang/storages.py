"""Storages of tests: one that loads wrong bytes, and one that writes down what SGLang asks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fdcache.integrations.sglang.storage import FdcacheStorage


class WrongStorage(FdcacheStorage):
    """Says that pages are in their place, and has the bytes of the first in all of them."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load, and overwrite all pages with the first."""
        done = super().batch_get_v1(keys, host_indices, extra_info)
        slots = self._pages["kv"].slots_of(host_indices)
        for plane in self._pages["kv"].planes:
            plane[slots] = plane[slots[:1]]
        return done


RECORD = "TEST_RECORD"
"""Variable with the file that ``RecordingStorage`` writes."""


class RecordingStorage(FdcacheStorage):
    """Writes the keys of look-ups and stores to a file, a line of JSON each, and does them."""

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Look up."""
        self._record("exists", keys, extra_info)
        return super().batch_exists(keys, extra_info)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store."""
        self._record("set", keys, extra_info)
        return super().batch_set_v1(keys, host_indices, extra_info)

    @staticmethod
    def _record(call: str, keys: list[str], extra_info: Any) -> None:
        line = json.dumps([call, getattr(extra_info, "prefix_keys", None), keys])
        with Path(os.environ[RECORD]).open("a") as file:
            file.write(line + "\n")
