"""StoredOwners: whose the stored blocks below the root are, so that a tenant's can be deleted after a restart, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fdcache.hashing import NO_TENANT
from fdcache.metadata import CacheSwapMetadata, HashArray
from fdcache.service.server.owners_file import HASH_BYTES, OwnersFile
from fdcache.service.server.tenants import blocks_of
from fdcache.tiers.pool import ABSENT, BlockPool
from fdcache.tiers.remote_index import RemoteIndex
from fdcache.tiers.storage_index import LocalIndex

_SLACK = 4096  # owners of blocks that are gone, before they are forgotten


class StoredOwners:
    """The tenants of the blocks of local storage; a store that others use too has none.

    A row is in the file before its block is. Blocks without a row belong to no tenant.
    """

    def __init__(self, index: LocalIndex | RemoteIndex, path: Path) -> None:
        self._pool: BlockPool | None = index.pool if isinstance(index, LocalIndex) else None
        self._owners: dict[bytes, bytes] = {}
        self._file = OwnersFile(path, self._owners)
        if self._pool is not None:
            self._owners.update(self._file.load())
            self._forget_absent()

    def writing(self, swaps: Iterable[CacheSwapMetadata], roots: Mapping[bytes, bytes]) -> None:
        """Record the owners of blocks that are about to be written; ``roots`` are those of the host tier."""
        if self._pool is None or not roots:
            return
        fresh: dict[bytes, bytes] = {}
        for swap in swaps:
            for row in swap.hash_values[~swap.parent_hashes.any(axis=1)]:
                block = row.tobytes()
                if (key := roots.get(block)) is not None and self._owners.get(block) != key:
                    fresh[block] = key
        if len(self._owners) > 2 * self._pool.stats().ready + _SLACK:
            self._forget_absent()
        self._owners |= fresh
        self._file.add(fresh)

    def knows(self, key: bytes) -> bool:
        """Return True for a tenant with stored blocks."""
        return key in self._owners.values()

    def owner(self, block: bytes) -> bytes:
        """Return the key of the tenant of a block below the root."""
        return self._owners.get(block, NO_TENANT)

    def rooted(self, key: bytes) -> HashArray:
        """Return the stored blocks of a tenant below the root."""
        return blocks_of(key, self._owners)

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()

    def _forget_absent(self) -> None:
        assert self._pool is not None
        blocks = np.frombuffer(b"".join(self._owners), np.uint8).reshape(-1, HASH_BYTES)
        for row in blocks[self._pool.contains(blocks) == ABSENT]:
            del self._owners[row.tobytes()]
