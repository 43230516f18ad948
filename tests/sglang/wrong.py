"""A storage that loads other bytes than those stored, for the control that such would be noticed."""

from __future__ import annotations

from typing import Any

from fdcache.integrations.sglang.storage import FdcacheStorage


class WrongStorage(FdcacheStorage):
    """Says that pages are in their place, and has put them there in the opposite order."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load, and turn the order of the pages around."""
        done = super().batch_get_v1(keys, host_indices, extra_info)
        slots = self._pages["kv"].slots_of(host_indices)
        for plane in self._pages["kv"].planes:
            plane[slots] = plane[slots[::-1]]
        return done
