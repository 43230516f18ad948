"""The native core: block hashing, tiers, block copies."""

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Any, final

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
    lookahead: int = 0,
    backend: str | None = None,
) -> NDArray[np.uint8]: ...

class ExtraKeys:
    def __init__(self, adapter_id: bytes | None, items: list[tuple[int, int, bytes, bool]]) -> None: ...
    def block_items(self, start: int, end: int, index: int) -> tuple[int, list[int]]: ...

class TokenBlocks:
    def __init__(self, block_size: int, root: bytes, extra_keys: ExtraKeys, lookahead: int = 0) -> None: ...
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

# --- presence --------------------------------------------------------------------------------------

@final
class PresenceTable:
    """Which blocks a tier of another process holds, read from memory that the tier mirrors itself into.

    ``memory``: uint8, whole buckets of 64 bytes, 8 tags each. What it says may be out of date.
    """

    def __init__(self, memory: Bytes) -> None: ...
    def contains(self, hashes: Bytes) -> Bytes:
        """1 for each hash that is there, else 0."""

    def run(self, path: Bytes, start: int = 0) -> int:
        """How many blocks of a path are there from ``start`` on."""

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
class OutgoingCopies:
    """Copies into the tier of another process, whose ``table`` says what it holds: slots granted for them, and
    what they change before the table shows it.
    """

    def __init__(self, table: PresenceTable) -> None: ...
    def grant(self, slots: Int32s, generations: UInt32s) -> None:
        """More slots to copy into."""

    def give_up_stock(self, first: int) -> Int32s:
        """Give up the slots from ``first`` on that are not used yet."""

    @property
    def stock(self) -> int:
        """Slots granted and not used yet."""

    def contains(self, hashes: Bytes) -> Bytes:
        """0 absent, 1 ready, 2 being copied there by this process."""

    def run(self, path: Bytes, start: int) -> int:
        """How many blocks of a path the table has from ``start`` on."""

    def reserve(self, parents: Bytes, hashes: Bytes) -> CopyReservation:
        """Slots of the stock for those hashes that are absent and whose parent is ready or comes before them."""

    def end(self, slots: Int32s, copied: Bytes, told: bool) -> tuple[Bytes, Bytes]:
        """Copies have ended; the parents and hashes of their blocks. ``told``: the tier hears of it, and answers.

        Raises IndexError for a slot that none of the copies under way has.
        """

    def answered(self, hashes: Bytes) -> None:
        """The tier has answered for these blocks: its table speaks for them."""

    def forget_answers(self) -> None:
        """No answer will come."""

    @property
    def under_way(self) -> int:
        """Blocks being copied."""

@final
class TierStats:
    slots: int
    free: int
    writing: int
    ready: int
    pending: int
    evictable: int
    quarantined: int
    withheld: int
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
    tenant: int
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
    ready_seconds: float

class FreeRuns:
    """The free slots of a tier as runs (first, count), none of which crosses a multiple of ``extent``; 0: any may."""

    def __init__(self, extent: int = 0) -> None: ...
    def __len__(self) -> int:
        """Free slots."""

    def resize(self, slots: int) -> None:
        """Change the number of slots; new ones are not free."""

    def add(self, first: int, count: int = 1) -> None:
        """Free a run; none of it is free, and all of it is within the tier."""

    def take(self, count: int) -> list[tuple[int, int]]:
        """Take slots in as few runs as there are, ascending; ValueError when fewer are free."""

    def clear(self) -> None:
        """Forget every free slot."""

    def runs(self) -> list[tuple[int, int]]:
        """All runs, ascending."""

    def check_integrity(self) -> list[str]:
        """Every invariant that does not hold, in words."""

class Tier:
    """Slots, the entries in them and who uses them; any thread may call. Every operation is all or nothing.

    A slot that is named but not in use raises IndexError, other bad arguments ValueError; a lease that was
    released, never opened or (where noted) opened before a reset raises ``StaleLeaseError``.
    """

    def __init__(self, slots: int, eviction: str = "lru", extent: int = 0, spare: float = 0.0) -> None:
        """No run of slots crosses a multiple of ``extent`` (0: any may); reservations may evict ahead of need.

        They do so for longer runs, as long as less than the share ``spare`` of the slots, 0 to 0.5, is free.
        """

    def open_lease(self) -> int: ...
    def release(self, lease: int) -> bool:
        """Give back all that the lease has; False when that was done before."""

    def match(self, lease: int, hashes: Bytes, start: int = 0, known: int = 0) -> MatchRun:
        """Pin the leading run of ready blocks from ``start`` on; ``hashes`` are one path from the root.

        Each block's hits grow by one, but not those of the first ``known``. The lease is of the present epoch.
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

    def publish(
        self,
        lease: int,
        parents: Bytes,
        hashes: Bytes,
        slots: Int32s,
        copied: Bytes,
        checksums: UInt64s,
        tenants: UInt32s | None = None,
    ) -> Bytes:
        """End the filling of the lease's own slots by others: 0 stored, 1 duplicate, 2 no parent, 3 dropped.

        The lease gives all of them up. It may be of an earlier epoch: then all are dropped.

        ``tenants``: whose the blocks below the root are; all below them are too. A tenant at its limit gives up its
        own coldest leaves; 4: it had none to give up.
        """

    def set_tenant_limit(self, tenant: int, most: int) -> None:
        """How many entries a tenant may have. The first call turns tenants on; ValueError if there are entries."""

    def tenant_entries(self) -> UInt32s:
        """Entries by tenant."""

    def drop(self, hashes: Bytes) -> int:
        """Forget these entries and all that hang below them; how many. What is in use stays until it is not."""

    def complete(self, slots: Int32s, copied: Bytes, checksums: UInt64s) -> Bytes:
        """Report copies into this tier, parents first; ``checksums`` may be empty. 1 for what became ready.

        What was not copied, or whose parent is not ready, is forgotten and goes back to its lease, if any.
        """

    def hold(self, slots: Int32s) -> None:
        """Keep slots while a copy reads them. That is no use: their places in the eviction order stay theirs."""

    def unhold(self, slots: Int32s) -> None:
        """End a ``hold``."""

    def find(self, hashes: Bytes) -> BlockList:
        """Those blocks that are ready, in the order given."""

    def ancestry(self, slots: Int32s, levels: int = 2**32 - 1) -> BlockList:
        """The entries in ``slots`` and those above them, each once, parents first.

        A walk up ends ``levels`` above the last of ``slots`` that it met, or at what is listed already.
        """

    def coldest(self, count: int) -> BlockList:
        """What would be evicted next, in that order; not what a copy holds."""

    def hottest(self, count: int) -> BlockList:
        """The entries with the most hits."""

    def idle(self, seconds: float, tenant: int | None = None) -> BlockList:
        """The entries that nobody has used for so long, of all tenants or one."""

    def starting_with(self, prefix: bytes) -> BlockList:
        """The entries whose hash begins so."""

    def restore(
        self,
        slots: Int32s,
        generations: UInt32s,
        hashes: Bytes,
        parents: Bytes,
        checksums: UInt64s,
        times: UInt64s | None = None,
        generation: int = 0,
        tenants: UInt32s | None = None,
    ) -> Bytes:
        """Make entries of blocks that are there already, in free slots and any order; 1 for what was taken.

        Of equal hashes the newest by ``times`` counts, or the first. New content of any slot gets a generation
        above ``generation`` and all those given. The arrays must not change meanwhile: other threads run.
        """

    def discard(self, slots: Int32s, quarantine: bool = False) -> BlockList:
        """Cut READY entries and all below them out; ``quarantine`` keeps the slots themselves out of use."""

    def quarantine(self, slots: Int32s) -> None:
        """Keep slots that something uses out of use for good, once that has ended."""

    def withhold(self, slots: Int32s) -> None:
        """Keep slots that something uses out of use, once that has ended, until they are given back."""

    def give_back(self, slots: Int32s) -> None:
        """Let withheld slots be used again."""

    def reset(self) -> None:
        """Forget every entry; slots in use stay with their leases and copies until those end."""

    def resize(self, slots: int) -> int:
        """Change the number of slots; when slots that would go are in use, return how many and change nothing.

        Raises MemoryError when there is no room to grow.
        """

    def mirror(self, memory: Bytes) -> None:
        """From now on keep a presence table of the READY blocks in ``memory``, which may be shared."""

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

class Event:
    """A one-shot event between streams and the host."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def query(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...

class BlockCopy:
    """One batch of block copies in one direction; ``faults()`` and ``checksums()`` once ``done`` is set."""

    def __init__(
        self,
        to_host: bool,
        planes: PlaneTable,
        records: RecordTable,
        device_slots: NDArray[np.int32],
        host_slots: NDArray[np.int32],
        generations: NDArray[np.uint32],
        hashes: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        fingerprint: bytes,
        verify: NDArray[np.uint8] | None = None,
    ) -> None: ...
    @property
    def done(self) -> Event: ...
    @property
    def started(self) -> bool: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    def cancel(self) -> bool: ...
    def faults(self) -> bytes: ...
    def checksums(self) -> bytes: ...

class CopyStream:
    """A FIFO of operations, run by its own threads without the GIL."""

    def __init__(self, threads: int, background: bool = False) -> None: ...
    def copy(self, copy: BlockCopy, first_plane: int, last_plane: int) -> None: ...
    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None: ...
    def retire(self) -> None: ...
    def close(self) -> None: ...

class HostMemory:
    """Page-aligned anonymous memory, zero filled."""

    def __init__(self, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def prefer_node(self, node: int) -> None: ...
    def populate(self, threads: int) -> None: ...

class Tensor:
    """A tensor of any framework, held through DLPack; strides are in bytes."""

    def __init__(self, tensor: object) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def device_type(self) -> int: ...

class PlaneTable:
    """Where the planes of every device block are; ``owner`` keeps that memory alive."""

    def __init__(
        self,
        addresses: Sequence[int],
        strides: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        owner: object,
    ) -> None: ...

class SlotHeader:
    """The 128-byte header of a slot outside the device; sealed with magic, version and checksum."""

    def __init__(
        self,
        state: int,
        generation: int,
        block_hash: bytes,
        parent: bytes,
        fingerprint: bytes,
        payload_bytes: int,
        payload_checksum: int,
    ) -> None: ...
    @staticmethod
    def from_bytes(data: bytes) -> SlotHeader: ...
    def to_bytes(self) -> bytes: ...
    @property
    def is_valid(self) -> bool: ...
    @property
    def version(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def payload_checksum(self) -> int: ...
    @property
    def hash(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def written_ms(self) -> int: ...

class RecordTable:
    """Records in equal extents with each extent's slot headers; ``owner`` keeps that memory alive."""

    def __init__(
        self,
        extents: Sequence[int],
        records_per_extent: int,
        record_bytes: int,
        headers: Sequence[int],
        num_slots: int,
        owner: object,
    ) -> None: ...
    @property
    def num_slots(self) -> int: ...
    def record(self, slot: int) -> NDArray[np.uint8]: ...
    def addresses(self, slots: Int32s) -> tuple[UInt64s, UInt64s]: ...
    def header(self, slot: int) -> SlotHeader: ...
    def set_header(self, slot: int, header: SlotHeader) -> None: ...

def wait_any(events: Sequence[Event], timeout: float | None = None) -> bool: ...
def set_leak_warnings(on: bool) -> None: ...
def record_checksum(record: NDArray[np.uint8], offsets: Sequence[int], sizes: Sequence[int]) -> int: ...
def copy_with_checksum(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> int: ...

# --- slab ------------------------------------------------------------------------------------------
# Faults per block: 0 none, 1 miss, 2 corrupt, 3 source changed, 4 error, 5 timeout, 6 cancelled.

class CancelFlag:
    """Set once, from any thread, to take back what has not begun."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    @property
    def is_set(self) -> bool: ...

class SlabFile:
    """Records and headers of an open slab file.

    Reads, writes and checks give (faults, checksums, errno by block, bytes, errno of headers or a sync).
    """

    def __init__(
        self,
        record_fd: int,
        header_fd: int,
        header_offset: int,
        record_offset: int,
        record_bytes: int,
        slots: int,
        fingerprint: bytes,
        parts: Sequence[tuple[int, int]],
        threads: int,
    ) -> None: ...
    def scan(self, first: int, last: int) -> tuple[int, int, int]:
        """Read slot headers: how many are ready and corrupt, and an errno or 0."""

    def entries(self) -> tuple[Int32s, UInt32s, Bytes, Bytes, UInt64s, UInt64s]: ...
    def read(
        self,
        slots: Int32s,
        generations: UInt32s,
        host_generations: UInt32s,
        hashes: Bytes,
        parents: Bytes,
        records: UInt64s,
        headers: UInt64s,
        timeout: float,
        verify: bool,
        cancel: CancelFlag | None = None,
    ) -> tuple[Bytes, UInt64s, Int32s, int, int]: ...
    def write(
        self,
        slots: Int32s,
        generations: UInt32s,
        host_generations: UInt32s,
        hashes: Bytes,
        parents: Bytes,
        records: UInt64s,
        headers: UInt64s,
        timeout: float,
        sync: bool,
        now_ms: int,
        cancel: CancelFlag | None = None,
    ) -> tuple[Bytes, UInt64s, Int32s, int, int]: ...
    def verify(self, slots: Int32s) -> tuple[Bytes, UInt64s, Int32s, int, int]: ...
    def erase(self, slots: Int32s) -> int: ...
    def sync(self) -> int: ...
    @property
    def unsynced(self) -> bool: ...

# --- pattern ---------------------------------------------------------------------------------------

class PatternModel:
    """The stand-in for a model: computing a token writes bytes derived from its whole prefix."""

    def __init__(
        self,
        planes: list[NDArray[np.uint8]],
        layers: NDArray[np.int32],
        num_layers: int,
        block_size: int,
        rank: int,
    ) -> None:
        """``planes[i]``, shape (device blocks, bytes of a block), rows contiguous, is of layer ``layers[i]``."""

    def begin(self, sequence: int, tokens: NDArray[np.int32]) -> None:
        """Give a sequence its tokens, shape (tokens,), replacing what it had."""

    def end(self, sequence: int) -> None:
        """Forget a sequence."""

    def prepare(self, segments: Int32s, blocks: Int32s, every: int) -> int:
        """Take a step's segments, shape (6, n), with the rows sequence, start, end, keep, grow, verify.

        Tokens [start, end) of the sequence will be computed. Its block table keeps ``keep`` entries and grows by
        the next ``grow`` of ``blocks``; its ``verify`` leading blocks (every ``every``-th and the last; none if
        0) are compared before anything is written. Returns how many blocks will be compared. Raises
        ``ValueError``, with nothing changed, for anything out of range.
        """

    def run_layer(self, layer: int) -> list[tuple[int, int]]:
        """Compare, then write, one layer; layers go in order.

        Returns (segment, block of the sequence) of each block that differs; such a sequence computes garbage
        until a later comparison of its prefix succeeds.
        """

# --- swap ------------------------------------------------------------------------------------------

class SwapMethod(Enum):
    """How a plane range of a batch is copied."""

    DIRECT = ...
    STAGED = ...
    KERNEL = ...

class SwapChoice(Enum):
    """Which method is wanted."""

    AUTO = ...
    DIRECT = ...
    STAGED = ...
    KERNEL = ...

class SwapPolicy:
    """What is fastest on a machine; thresholds are direct_plane, staged_column, run_copy, in bytes."""

    def __init__(
        self,
        choice: SwapChoice,
        to_host: Sequence[int],
        to_device: Sequence[int],
        staging_bytes: int,
        kernel_ctas: int,
        transpose_ctas: int,
        direct_pieces: int,
        batched: bool,
    ) -> None: ...
    @property
    def kernel_ctas(self) -> int: ...
    @property
    def transpose_ctas(self) -> int: ...
    @property
    def batched(self) -> bool: ...

def are_sound_slots(slots: NDArray[np.int32], limit: int, distinct: bool) -> bool: ...
def are_disjoint_slots(first: NDArray[np.int32], second: NDArray[np.int32]) -> bool: ...
def find_runs(host_slots: NDArray[np.int32], records_per_extent: int) -> list[tuple[int, int]]: ...
def choose_method(
    policy: SwapPolicy,
    to_host: bool,
    planes: PlaneTable,
    first_plane: int,
    last_plane: int,
    record_bytes: int,
    rows: int,
    runs: int,
    contended: bool,
) -> SwapMethod: ...
def plan_steps(
    policy: SwapPolicy,
    to_host: bool,
    planes: PlaneTable,
    records: RecordTable,
    device_slots: NDArray[np.int32],
    host_slots: NDArray[np.int32],
    first_plane: int,
    last_plane: int,
    slot_bytes: int,
    contended: bool,
) -> list[tuple[Any, ...]]:
    """The steps of a batch, each a tuple that begins with its name (csrc/core/swap_steps.hpp)."""

def split_range(
    planes: PlaneTable, first_plane: int, last_plane: int, record_bytes: int, limit: int
) -> list[tuple[int, int]]: ...
def swap_chunks(planes: PlaneTable, record_bytes: int) -> tuple[bytes, list[int]]: ...
def swap_source() -> str: ...

class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""

class CudaContext:
    """The primary context of one GPU."""

    def __init__(self, ordinal: int) -> None: ...
    @property
    def lost(self) -> str | None: ...
    def is_stream_of(self, stream: int) -> bool: ...
    def is_capturing(self, stream: int) -> bool: ...

def device_uuid(ordinal: int) -> bytes: ...
def has_batched_copies() -> bool: ...

class CudaEvent:
    """An event of a GPU; recorded once."""

    def __init__(self, context: CudaContext, timing: bool = False) -> None: ...
    def record(self, stream: int) -> None: ...
    def hold(self, stream: int) -> None: ...
    def query(self) -> bool: ...
    def seconds_since(self, earlier: CudaEvent) -> float: ...

def wait_cuda_events(events: Sequence[CudaEvent], timeout: float | None = None) -> bool: ...

class CudaRegistration:
    """Host memory pinned for the GPUs; ``owner`` keeps it."""

    def __init__(self, context: CudaContext, address: int, nbytes: int, owner: object) -> None: ...
    @property
    def device_address(self) -> int: ...

class CudaExtents:
    """Where a GPU sees the extents of an arena."""

    def __init__(self, addresses: Sequence[int]) -> None: ...

class CudaLane:
    """A stream for kernels, one for the copy engine, and the ring between them."""

    def __init__(
        self, context: CudaContext, main: int, copy: int, staging: int, slot_bytes: int, slots: int
    ) -> None: ...

class CudaSubmitter:
    """Puts work on one stream in order: at once while nothing waits, else from a thread of its own."""

    def __init__(self, context: CudaContext, main: int, background: bool) -> None: ...
    def record(self, event: CudaEvent) -> None: ...
    def wait(self, event: CudaEvent) -> None: ...
    def enqueue(
        self, batch: CudaSwap, lane: CudaLane, ranges: Sequence[tuple[int, int]]
    ) -> list[CudaEvent]: ...
    def refuse(self, batch: CudaSwap, reason: str) -> None: ...
    def close(self) -> None: ...

class CudaTraffic:
    """How many batches of one GPU have not ended, by direction."""

    def __init__(self) -> None: ...

class CudaSwap:
    """One batch of block copies on a GPU; ``faults()`` and ``checksums()`` after ``finish()``."""

    def __init__(
        self,
        context: CudaContext,
        traffic: CudaTraffic,
        kernels: Sequence[int],
        policy: SwapPolicy,
        to_host: bool,
        planes: PlaneTable,
        chunks: int,
        first_chunk: Sequence[int],
        records: RecordTable,
        extents: CudaExtents,
        device_slots: NDArray[np.int32],
        host_slots: NDArray[np.int32],
        generations: NDArray[np.uint32],
        hashes: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        fingerprint: bytes,
        verify: bool,
    ) -> None: ...
    @property
    def table_bytes(self) -> int: ...
    def set_table(self, host: int, device: int) -> None: ...
    def finish(self) -> None: ...
    @property
    def started(self) -> bool: ...
    @property
    def done(self) -> CudaEvent: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def error(self) -> str: ...
    def faults(self) -> bytes: ...
    def checksums(self) -> bytes: ...
