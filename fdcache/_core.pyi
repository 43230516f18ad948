"""The native core: block hashing, tiers, block copies."""

from array import array
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]

# --- hashing ---------------------------------------------------------------------------------------

_Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | array[int]

def sha_backends() -> list[str]: ...
def sha256(message: bytes, backend: str | None = None) -> bytes: ...
def root_hash(fingerprint: bytes, tenant: bytes | None) -> bytes: ...
def hash_blocks(
    tokens: _Tokens,
    block_size: int,
    parent: bytes,
    start: int,
    extra_keys: ExtraKeys,
    backend: str | None = None,
) -> NDArray[np.uint8]: ...

class ExtraKeys:
    def __init__(self, adapter_id: bytes | None, items: list[tuple[int, int, bytes, bool]]) -> None: ...
    def block_items(self, start: int, end: int, index: int) -> tuple[int, list[int]]: ...

class TokenBlocks:
    def __init__(self, block_size: int, root: bytes, extra_keys: ExtraKeys) -> None: ...
    def append(self, tokens: int | _Tokens) -> None: ...
    def __len__(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def hashes(self) -> NDArray[np.uint8]: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...

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
    """Slots, the entries in them and who uses them; any thread may call. Every operation is all or nothing.

    A slot that is named but not in use raises IndexError, other bad arguments ValueError; a lease that was
    released, never opened or (where noted) opened before a reset raises ``StaleLeaseError``.
    """

    def __init__(self, slots: int) -> None: ...
    def open_lease(self) -> int: ...
    def release(self, lease: int) -> bool:
        """Give back all that the lease has; False when that was done before."""

    def match(self, lease: int, hashes: Bytes, start: int = 0) -> MatchRun:
        """Pin the leading run of ready blocks from ``start`` on; ``hashes`` are one path from the root.

        The lease is of the present epoch.
        """

    def contains(self, hashes: Bytes) -> Bytes:
        """Per hash: 0 absent, 1 ready, 2 pending."""

    def reserve(self, lease: int, count: int) -> Reservation:
        """Take slots for computing, which nobody can find."""

    def reserve_copies(self, lease: int, parents: Bytes, hashes: Bytes) -> CopyReservation:
        """Take slots for copies into this tier, pending from now until ``complete``.

        Those blocks are taken that are absent and whose parent is ready or taken before them in this call.
        Nothing that the answer calls ready is evicted for them. The lease, unless 0, is of the present epoch.
        """

    def commit(self, lease: int, parent: bytes, hashes: Bytes, slots: Int32s) -> Bytes:
        """Publish the lease's own slots below ``parent``, in path order; per block 0 stored, 1 duplicate.

        The result ends before the first block that cannot be published yet: its parent is not ready, its hash
        is pending or stands below another parent, or a copy still uses its slot. A duplicate stays the lease's
        own, and the entry that was first is pinned. The lease is of the present epoch.
        """

    def complete(self, slots: Int32s, copied: Bytes, checksums: UInt64s) -> Bytes:
        """Report copies into this tier, parents first; ``checksums`` may be empty. 1 for what became ready.

        What was not copied, or whose parent is not ready, is forgotten and goes back to its lease, if any.
        """

    def hold(self, slots: Int32s) -> None:
        """Keep slots in place while a copy reads them."""

    def unhold(self, slots: Int32s) -> None:
        """End a ``hold``."""

    def find(self, hashes: Bytes) -> BlockList:
        """Those blocks that are ready, in the order given."""

    def ancestry(self, slots: Int32s) -> BlockList:
        """The entries in ``slots`` and all above them, each once, parents first."""

    def coldest(self, count: int) -> BlockList:
        """What would be evicted next, in that order."""

    def reset(self) -> None:
        """Forget every entry; slots in use stay with their leases and copies until those end."""

    def resize(self, slots: int) -> int:
        """Change the number of slots; when slots that would go are in use, return how many and change nothing.

        Raises MemoryError when there is no room to grow.
        """

    def record_events(self, capacity: int) -> None:
        """Keep up to ``capacity`` events for ``take_events``; 0 ends it."""

    def take_events(self) -> tuple[Bytes, Bytes, Bytes]:
        """Kinds (0 stored, 1 removed, 2 cleared, 3 lost: some are missing), hashes and parents, oldest first."""

    def stats(self) -> TierStats: ...
    def node(self, slot: int) -> NodeView: ...
    @property
    def available(self) -> int:
        """How many slots ``reserve`` could give: free or evictable."""

    def check_integrity(self) -> list[str]:
        """Every invariant that does not hold, in words."""

# --- copy ------------------------------------------------------------------------------------------

# --- pattern ---------------------------------------------------------------------------------------
