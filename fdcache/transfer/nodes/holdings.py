"""Holdings: the host records of one rank that other nodes may read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fdcache._core import RecordTable, SlotHeader, Tier
from fdcache.metadata import HashArray, Int32Array
from fdcache.storage.connector import RecordBatch
from fdcache.storage.records import RecordCheck

Place = tuple[RecordTable, int, int, int]
"""Table, slot and generation of a record, and the address of its header."""

_MOST_HELD = 4
"""Readers hold at most one in four slots of a host tier: it needs the others for itself."""


@dataclass(slots=True, eq=False)
class LentSlots:
    """Slots of a host tier that are held for a reader."""

    host: Tier
    slots: Int32Array


class Holdings:
    """Where the host tier has which block of one rank.

    A slot that is held for a reader is not used again until it is let go, whatever becomes of its block. That needs the
    tier, in this process: without one nothing is held.

    A header tells whether its slot still has the block; it is looked at before and after the bytes are copied, and the
    reader compares them with the checksum. A slot has one block, so there are never more entries than slots.
    """

    def __init__(self, check: RecordCheck) -> None:
        self._check = check
        self._host: Tier | None = None
        self._held: set[LentSlots] = set()
        self._num_held = 0
        self._lock = threading.Lock()
        self._places: dict[bytes, Place] = {}
        self._in_slot: dict[int, bytes] = {}  # by the address of its header

    def __len__(self) -> int:
        return len(self._places)

    def add(self, batch: RecordBatch, blocks: Sequence[int]) -> None:
        """Enter blocks of a batch, whose records are ready."""
        headers = batch.records.addresses(batch.host_slots)[1].tolist()
        with self._lock:
            for i in blocks:
                key, header = batch.hashes[i].tobytes(), headers[i]
                self._forget(self._in_slot.get(header, b""))
                self._forget(key)
                self._places[key] = (
                    batch.records,
                    int(batch.host_slots[i]),
                    int(batch.host_generations[i]),
                    header,
                )
                self._in_slot[header] = key

    def has(self, hashes: Iterable[bytes]) -> NDArray[np.bool_]:
        """Return a mask of the blocks that are there now."""
        with self._lock:
            return np.array([self._header(key) is not None for key in hashes], np.bool_)

    def read(self, block_hash: bytes, target: NDArray[np.uint8]) -> SlotHeader | None:
        """Copy a record; return its header, or None if the block is not there or left meanwhile."""
        with self._lock:
            header = self._header(block_hash)
            if header is None:
                return None
            table, slot, _, _ = self._places[block_hash]
            target[:] = table.record(slot)
            after = self._header(block_hash)
        return header if after is not None and after.payload_checksum == header.payload_checksum else None

    # --- readers ----------------------------------------------------------------------------------------------

    def lend_from(self, host: Tier | None) -> None:
        """Hold slots of this tier from now on; those of another one are let go."""
        with self._lock:
            if host is not self._host:
                for held in list(self._held):
                    self._end(held)
                self._host = host

    @property
    def num_held(self) -> int:
        """Number of slots that are held, once for each reader."""
        return self._num_held

    def hold(self, hashes: Sequence[bytes]) -> LentSlots | None:
        """Hold the slots of the blocks that are there, as many as readers may."""
        with self._lock:
            host = self._host
            keys = [key for key in hashes if self._header(key) is not None]
            if host is None or not keys:
                return None
            most = host.stats().slots // _MOST_HELD - self._num_held
            held = LentSlots(host, host.hold_ready(_array(keys), max(most, 0)).slots)
            self._held.add(held)
            self._num_held += len(held.slots)
            return held

    def let_go(self, held: LentSlots) -> None:
        """End a ``hold``. Idempotent."""
        with self._lock:
            if held in self._held:
                self._end(held)

    def _end(self, held: LentSlots) -> None:
        self._held.remove(held)
        self._num_held -= len(held.slots)
        held.host.unhold(held.slots)

    # --- ends -------------------------------------------------------------------------------------------------

    def drop(self, hashes: Iterable[bytes]) -> list[bool]:
        """Serve these blocks no more; return for each whether it was there."""
        with self._lock:
            found = []
            for key in hashes:
                found.append(self._header(key) is not None)
                self._forget(key)
            return found

    def clear(self) -> int:
        """Serve nothing that is there now; return how many blocks that were."""
        with self._lock:
            count = len(self._places)
            self._places.clear()
            self._in_slot.clear()
            return count

    def unregister(self, records: RecordTable) -> None:
        """Forget the blocks in records that are about to go. No read of them goes on after the call."""
        slots: Int32Array = np.arange(records.num_slots, dtype=np.int32)
        with self._lock:
            for header in records.addresses(slots)[1].tolist():
                self._forget(self._in_slot.get(header, b""))

    def _header(self, key: bytes) -> SlotHeader | None:
        """Return the header of a block that its slot still has; forget one that it has not."""
        place = self._places.get(key)
        if place is None:
            return None
        table, slot, generation, _ = place
        header = table.header(slot)
        if header.generation == generation and self._check.is_ready(header, key):
            return header
        self._forget(key)
        return None

    def _forget(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._in_slot.pop(place[3], None)


def _array(hashes: Sequence[bytes]) -> HashArray:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
