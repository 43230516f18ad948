"""The native core: block hashing, tiers, block copies."""

from typing import final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]

# --- hashing ---------------------------------------------------------------------------------------

# --- tier ------------------------------------------------------------------------------------------
# Hash arrays have shape (n, 32); a parent of 32 zero bytes stands for the root; lease 0 for nobody.

SLOT_FREE: int
SLOT_WRITING: int
SLOT_READY: int

@final
class BlockList:
    """Parallel arrays that describe blocks."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> Int32s: ...
    @property
    def generations(self) -> UInt32s: ...
    @property
    def hashes(self) -> Bytes: ...
    @property
    def parents(self) -> Bytes: ...
    @property
    def hits(self) -> UInt32s: ...

@final
class MatchRun:
    """The pinned leading run; ``pending``: the block after it is being copied into this tier."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> Int32s: ...
    @property
    def generations(self) -> UInt32s: ...
    @property
    def hits(self) -> UInt32s: ...
    @property
    def pending(self) -> bool: ...

class Reservation:
    """Slots taken, what was evicted for them (children before parents), or how many are missing."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> Int32s: ...
    @property
    def generations(self) -> UInt32s: ...
    @property
    def evicted(self) -> BlockList: ...
    @property
    def missing(self) -> int: ...

@final
class CopyReservation(Reservation):
    """``status`` per hash: 0 reserved (its slot is the next of ``slots``), 1 ready, 2 pending, 3 no parent."""

    @property
    def status(self) -> Bytes: ...

@final
class TierStats:
    slots: int
    free: int
    writing: int
    ready: int
    pending: int
    evictable: int
    pins: int
    holds: int
    leases: int
    epoch: int
    evictions: int
    lookups: int
    memory_bytes: int

@final
class NodeView:
    slot: int
    parent: int | None
    generation: int
    children: int
    pins: int
    holds: int
    hits: int
    depth: int
    state: int
    findable: bool
    hash: bytes
    checksum: int
    idle_seconds: float

class Tier:
    def __init__(self, slots: int) -> None: ...
    def open_lease(self) -> int: ...
    def release(self, lease: int) -> bool: ...
    def match(self, lease: int, hashes: Bytes, start: int = 0) -> MatchRun: ...
    def contains(self, hashes: Bytes) -> Bytes: ...
    def reserve(self, lease: int, count: int) -> Reservation: ...
    def reserve_copies(self, lease: int, parents: Bytes, hashes: Bytes) -> CopyReservation: ...
    def commit(self, lease: int, parent: bytes, hashes: Bytes, slots: Int32s) -> Bytes: ...
    def complete(self, slots: Int32s, copied: Bytes, checksums: UInt64s) -> Bytes: ...
    def hold(self, slots: Int32s) -> None: ...
    def unhold(self, slots: Int32s) -> None: ...
    def find(self, hashes: Bytes) -> BlockList: ...
    def ancestry(self, slots: Int32s) -> BlockList: ...
    def coldest(self, count: int) -> BlockList: ...
    def reset(self) -> None: ...
    def resize(self, slots: int) -> int: ...
    def record_events(self, capacity: int) -> None: ...
    def take_events(self) -> tuple[Bytes, Bytes, Bytes]: ...
    def stats(self) -> TierStats: ...
    def node(self, slot: int) -> NodeView: ...
    @property
    def available(self) -> int: ...
    def check_integrity(self) -> list[str]: ...

# --- copy ------------------------------------------------------------------------------------------

# --- pattern ---------------------------------------------------------------------------------------
