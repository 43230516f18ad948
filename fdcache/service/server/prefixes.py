"""A prefix in one namespace: its blocks, which are pages of a model with groups, and the states at their ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fdcache.groups import pages_of, record_keys, state_keys
from fdcache.metadata import HashArray
from fdcache.plans.ledger import ROOT, UNKNOWN
from fdcache.service.server.arguments import (
    ArgumentError,
    Arguments,
    check_path,
    hashes_of_path,
    select_namespace,
)
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.tiers.pool import READY, BlockPool
from fdcache.tiers.storage_index import LocalIndex
from fdcache.tiers.storage_reads import StorageReads

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The ``blocks`` of a path, and ``keys``, those of their records: ``records`` for each.

    At the ends of some there are states, ``states`` records for each. A prefix is usable up to a block with states; of
    a model without them, up to every block.
    """

    namespace: Namespace
    blocks: HashArray
    keys: HashArray

    @classmethod
    def of(cls, service: Service, arguments: Arguments) -> StoredPrefix:
        """Read ``namespace`` and ``hashes``.

        Raises ``ArgumentError``, also if a block that is there continues another one than that before it in the list.
        """
        namespace = select_namespace(service, arguments)
        if not namespace.layout.page_records:
            raise ArgumentError(
                "namespace: its model keeps states alone, of which no prefix has its own; use `fdcache reset`"
            )
        blocks = hashes_of_path(check_path(arguments.get("hashes")))
        if not len(blocks):
            raise ArgumentError("tokens or hashes: give at least one full block; only full blocks are kept")
        keys = record_keys(blocks, namespace.layout.page_records)
        storage = service.storage_of(namespace)
        stored = storage.index.pool if storage and isinstance(storage.index, LocalIndex) else None
        for pool in (namespace.tier, stored):
            if pool is not None:
                _require_path(pool, keys)
        return cls(namespace, blocks, keys)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def records(self) -> int:
        """Records of each block."""
        return self.namespace.layout.page_records

    @property
    def states(self) -> int:
        """Records of the states at the end of a block that has some; 0 for a model without."""
        return self.namespace.layout.num_states

    @property
    def last(self) -> bytes:
        """Hash of the last block."""
        return bytes(self.blocks[-1].tobytes())

    def states_at(self, blocks: int) -> HashArray:
        """Return the keys of the states after this number of blocks."""
        return state_keys(self.blocks[blocks - 1 : blocks], self.records, self.states)

    def path_to(self, blocks: int) -> HashArray:
        """Return the keys of this number of blocks and of the states at their end."""
        return np.concatenate((self.keys[: blocks * self.records], self.states_at(blocks)))

    # --- the host tier --------------------------------------------------------------------------------------

    @property
    def on_host(self) -> int:
        """Number of leading blocks in the host tier."""
        tier = self.namespace.tier
        if tier is None:
            return 0
        gaps = np.flatnonzero(tier.contains(self.keys) != READY)
        return (int(gaps[0]) if len(gaps) else len(self.keys)) // self.records

    @property
    def usable(self) -> int:
        """Number of leading blocks in the host tier after which an engine can go on."""
        return self.usable_of(self.on_host)

    def usable_of(self, blocks: int) -> int:
        """Return after how many of these leading blocks, which the host tier has, an engine can go on."""
        return self.last_end(self._has_states(blocks)) if self.states else blocks

    def _has_states(self, blocks: int) -> Mask:
        """Return for each of these leading blocks whether the host tier has the states at its end."""
        tier, keys = self.namespace.tier, state_keys(self.blocks[:blocks], self.records, self.states)
        there = np.zeros(len(keys), np.bool_) if tier is None else tier.contains(keys) == READY
        return np.asarray(there.reshape(blocks, self.states).all(axis=1))

    def host_states(self, blocks: int) -> HashArray:
        """Return the keys of all states at the ends of these leading blocks that the host tier has."""
        if not self.states:
            return self.keys[:0]
        ends = np.flatnonzero(self._has_states(blocks))
        return state_keys(np.ascontiguousarray(self.blocks[ends]), self.records, self.states)

    def usable_with(self, reads: StorageReads | None) -> int | None:
        """Return after how many blocks an engine could go on with host tier and storage; None while a store is
        asked.
        """
        if not self.states:
            return len(self)
        usable = self.last_end(self._has_states(len(self)))
        stored = reads.last_end(self.blocks, usable) if reads is not None else 0
        return None if stored is None else max(usable, stored)

    @staticmethod
    def last_end(has_states: Mask) -> int:
        """Return the number of blocks up to the last that has states."""
        ends = np.flatnonzero(has_states)
        return int(ends[-1]) + 1 if len(ends) else 0

    def removable_from(self, tier: BlockPool, blocks: int) -> int:
        """Return from which of these blocks of the host tier on nothing uses them or continues them but their own."""
        first, below = blocks, 0
        slots = tier.find(self.keys[: blocks * self.records]).slots.reshape(blocks, self.records)
        own = self._has_states(blocks) if self.states else np.zeros(blocks, np.bool_)
        for block in range(blocks - 1, -1, -1):
            path = slots[block].tolist()
            more = tier.find(self.states_at(block + 1)).slots.tolist() if own[block] else []
            chains = [*zip(path, [1] * (len(path) - 1) + [below + bool(more)], strict=True)]
            chains += zip(more, [1] * (len(more) - 1) + [0], strict=True) if more else []
            if any(_is_used(tier, slot, children) for slot, children in chains):
                break
            first, below = block, 1
        return first

    # --- any pool -------------------------------------------------------------------------------------------

    def are_there(self, there: Mask) -> Mask:
        """Return which blocks have all their records, of a mask of records."""
        return np.asarray(there.reshape(-1, self.records).all(axis=1))

    def blocks_below(self, pool: BlockPool, keys: HashArray) -> int:
        """Return how many blocks have records among these and all that continue them."""
        listed = pool.ancestry(slots := pool.below(keys))
        return pages_of(listed.hashes[np.isin(listed.slots, slots)], self.records + self.states)


def _is_used(tier: BlockPool, slot: int, children: int) -> bool:
    """Return True for a block in use, or that more blocks continue than ``children``."""
    node = tier.node(slot)
    return bool(node.pins or node.holds or node.children > children)


def _require_path(pool: BlockPool, keys: HashArray) -> None:
    """Raise ``ArgumentError`` unless each of these blocks that is there continues the one before it."""
    there = pool.find(keys)
    places = {row.tobytes(): place for place, row in enumerate(keys)}
    if len(places) < len(keys):
        raise ArgumentError(
            "hashes: one is given twice; give all blocks of one prompt in order, from the first on"
        )
    for found, parent in zip(there.hashes, there.parents, strict=True):
        place = places[found.tobytes()]
        before = keys[place - 1].tobytes() if place else ROOT
        if parent.tobytes() not in ({before} if place else {ROOT, UNKNOWN}):
            raise ArgumentError(
                f"hashes: {found.tobytes().hex()[:16]}... does not continue "
                f"{'the hash before it' if place else 'from a beginning'}; give all blocks of one prompt in order, "
                "from the first on"
            )
