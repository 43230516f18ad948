"""Whose blocks are: tenants by block, for blocks below the root."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache

from fdcache.hashing import NO_TENANT, tenant_key

_MOST = 1 << 20
_key = lru_cache(maxsize=65536)(tenant_key)


class Owners:
    """Tenants of blocks below the root. Bounded: those told longest ago are forgotten first, and are nobody's."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._tenants: OrderedDict[bytes, bytes] = OrderedDict()

    def add(self, block: bytes, tenant: str) -> None:
        """This block is this tenant's."""
        self._tenants[block] = _key(tenant)
        self._tenants.move_to_end(block)
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)

    def of(self, blocks: Iterable[bytes]) -> bytes:
        """The keys of the blocks' tenants, one after the other; nothing where all are nobody's."""
        keys = [self._tenants.get(block, NO_TENANT) for block in blocks]
        return b"".join(keys) if any(key is not NO_TENANT for key in keys) else b""
