"""Tenants of a namespace: their numbers in its tier, their quotas, and their blocks below the root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fdcache.errors import ProtocolError
from fdcache.hashing import NO_TENANT, TENANT_BYTES, tenant_key
from fdcache.metadata import HashArray, UInt32Array
from fdcache.service.server.owners_file import HASH_BYTES, OwnersFile
from fdcache.settings.kinds import NO_TENANT_NAME
from fdcache.settings.server import ServerSettings
from fdcache.tiers.pool import ABSENT, BlockPool

_NO_LIMIT = 2**32 - 1
_FIRST_SWEEP = 4096  # from that many tenants on, numbers of tenants without blocks are reused


@dataclass(frozen=True, slots=True)
class Quotas:
    """Shares of a namespace's blocks: ``default`` for every tenant, ``own`` for some by their keys."""

    default: float
    own: dict[bytes, float]
    names: dict[bytes, str]

    @classmethod
    def of(cls, settings: ServerSettings) -> Quotas:
        """Read the settings."""
        keys = {tenant_key(name): (name, share) for name, share in settings.tenant_quotas}
        return cls(
            settings.tenant_quota,
            {key: share for key, (_, share) in keys.items()},
            {key: name for key, (name, _) in keys.items()},
        )

    def set_share(self, key: bytes, name: str, share: float) -> float:
        """Set the share of a tenant, and return the former one."""
        before = self.share(key)
        self.own[key], self.names[key] = share, name
        return before

    def share(self, key: bytes) -> float:
        """Return the share of a tenant."""
        return self.own.get(key, self.default)

    def name(self, key: bytes) -> str:
        """Return the name of a tenant if a quota names it, else the beginning of its key, or ``NO_TENANT_NAME``."""
        return NO_TENANT_NAME if key == NO_TENANT else self.names.get(key, key.hex()[:12])


class Tenants:
    """The tenants of one namespace.

    The owners of blocks below the root are kept in the file ``path`` too, so that the next service can recover them.
    """

    def __init__(self, quotas: Quotas, path: Path) -> None:
        self.quotas = quotas
        self._numbers: dict[bytes, int] = {NO_TENANT: 0}
        self.roots: dict[bytes, bytes] = {}
        self._free_numbers: list[int] = []
        self._sweep_at = _FIRST_SWEEP
        self._storable = 0
        self._file = OwnersFile(path, self.roots)

    @property
    def limited(self) -> bool:
        """Return True if some tenant may have less than the whole namespace."""
        return self.quotas.default < 1 or any(share < 1 for share in self.quotas.own.values())

    # --- numbers and limits -------------------------------------------------------------------------------

    def set_limits(self, tier: BlockPool, storable: int) -> None:
        """Set the tier's limit for each tenant, its share of ``storable`` blocks."""
        self._storable = storable
        for key, number in self._numbers.items():
            tier.set_tenant_limit(number, self.most_blocks(key))

    def most_blocks(self, key: bytes) -> int:
        """Return the number of blocks that a tenant may have."""
        share = self.quotas.share(key)
        return _NO_LIMIT if share >= 1 else max(int(share * self._storable), 1)

    def limit(self, number: int) -> tuple[int, int] | None:
        """Return the number of a tenant and the most blocks that it may have; None without a limit."""
        key = next((key for key, its in self._numbers.items() if its == number), NO_TENANT)
        most = self.most_blocks(key)
        return None if most == _NO_LIMIT else (number, most)

    def numbers(self, tier: BlockPool, parents: HashArray, keys: bytes, storable: int) -> UInt32Array:
        """Return the tenant number of each block; 0 for blocks that are not below the root.

        ``keys`` has the key of each block below the root, or is empty. Raises ``ProtocolError`` for another length.
        """
        numbers = np.zeros(len(parents), np.uint32)
        rooted = np.flatnonzero(~parents.any(axis=1)).tolist()
        if keys and len(keys) != TENANT_BYTES * len(rooted):
            raise ProtocolError(
                f"tenants: {len(keys)} bytes are not {TENANT_BYTES} for each block below the root"
            )
        if storable != self._storable:
            self.set_limits(tier, storable)
        for position, at in enumerate(rooted if keys else ()):
            key = keys[TENANT_BYTES * position : TENANT_BYTES * (position + 1)]
            numbers[at] = self._numbers[key] if key in self._numbers else self._new_number(tier, key)
        return numbers

    def _new_number(self, tier: BlockPool, key: bytes) -> int:
        if not self._free_numbers and len(self._numbers) >= self._sweep_at:
            self._sweep(tier)
        number = self._free_numbers.pop() if self._free_numbers else len(self._numbers)
        self._numbers[key] = number
        tier.set_tenant_limit(number, self.most_blocks(key))
        return number

    def _sweep(self, tier: BlockPool) -> None:
        """Free the numbers of tenants without blocks, and wait until their count has doubled before the next sweep."""
        counts = tier.tenant_entries()
        for key, number in list(self._numbers.items()):
            if number and not counts[number]:
                del self._numbers[key]
                self._free_numbers.append(number)
        self._sweep_at = max(2 * len(self._numbers), _FIRST_SWEEP)

    def blocks(self, tier: BlockPool) -> dict[bytes, int]:
        """Return the number of blocks of each tenant that has any, and of blocks without a tenant."""
        counts = tier.tenant_entries().tolist()
        return {
            key: counts[number]
            for key, number in self._numbers.items()
            if number < len(counts) and (counts[number] or key == NO_TENANT)
        }

    def name_of(self, number: int) -> str:
        """Return the tenant's name; ``?`` for a number that no tenant has."""
        return next((self.quotas.name(key) for key, its in self._numbers.items() if its == number), "?")

    def knows(self, key: bytes) -> bool:
        """Return True for a tenant that has stored blocks, or that a quota names."""
        return key in self._numbers or key in self.quotas.own

    def number(self, key: bytes) -> int | None:
        """Return the number of a tenant; None if it has never stored a block."""
        return self._numbers.get(key)

    def rooted(self, key: bytes) -> HashArray:
        """Return the blocks of a tenant below the root."""
        return blocks_of(key, self.roots)

    # --- owners of blocks ---------------------------------------------------------------------------------

    def note(self, parents: HashArray, hashes: HashArray, keys: bytes, arrived: np.ndarray) -> None:
        """Record the owners of blocks that arrived, before these can be found."""
        rows: dict[bytes, bytes] = {}
        rooted = np.flatnonzero(~parents.any(axis=1)).tolist() if keys else []
        for position, at in enumerate(rooted):
            key = keys[TENANT_BYTES * position : TENANT_BYTES * (position + 1)]
            root = hashes[at].tobytes()
            if arrived[at] and key != NO_TENANT and self.roots.get(root) != key:
                self.roots[root] = rows[root] = key
        self._file.add(rows)

    def reading(self, tier: BlockPool, root: HashArray, key: bytes, storable: int) -> int:
        """Return the number of a tenant whose path is about to be read from storage, and record whose it is."""
        no_parent = np.zeros_like(root)
        (number,) = self.numbers(tier, no_parent, key, storable)
        self.note(no_parent, root, key, np.ones(1, np.bool_))
        return int(number)

    def remove_blocks(self, blocks: Iterable[bytes]) -> None:
        """Forget blocks that left the tier."""
        if self.roots:
            for block in blocks:
                self.roots.pop(block, None)

    def forget_absent(self, tier: BlockPool, hashes: HashArray) -> None:
        """Forget those of these blocks that are not in the tier."""
        if self.roots:
            absent = hashes[tier.contains(hashes) == ABSENT]
            self.remove_blocks(row.tobytes() for row in absent)

    def clear(self) -> None:
        """Forget all blocks."""
        self.roots.clear()

    def keep_file(self) -> None:
        """Write the file again if others removed it. Raises ``OSError``."""
        self._file.keep()

    def restore(self) -> dict[bytes, bytes]:
        """Return the owners of blocks below the root, as the earlier service wrote them."""
        return self._file.load()

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()

    def remove(self) -> None:
        """Remove the file."""
        self._file.remove()


def blocks_of(key: bytes, owners: Mapping[bytes, bytes]) -> HashArray:
    """Return the blocks that belong to a tenant."""
    found = b"".join(block for block, owner in owners.items() if owner == key)
    return np.frombuffer(found, np.uint8).reshape(-1, HASH_BYTES)
