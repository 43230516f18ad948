"""
The native core: block hashes, tiers, block copies on the CPU and on GPUs, slab files.
"""

import array
from collections.abc import Callable, Iterator, Sequence
import enum
from typing import Annotated, Any, Final, overload

import numpy
import numpy.typing
from numpy.typing import NDArray

import fdcache.metadata

def has_reserved_keys(
    keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)],
) -> bool:
    """
    Return True if a key is all zeros or all ones, which stand for the root and for an unknown parent.
    """

def keys_from_hex(keys: list[str]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))]:
    """
    Return block keys that are written as 64 hexadecimal digits each. Raises HashingError.
    """

def hash_backends() -> list[str]:
    """
    Names of the implementations of block hashes that this machine can run, those with the most instructions first.
    """

def keyed_digest(message: bytes, key: bytes, backend: str | None = None) -> bytes:
    """
    Return BLAKE3's keyed hash of a message, hashed as one chunk even if longer than 1,024 bytes.
    """

def root_hash(fingerprint: bytes, tenant: bytes | None) -> bytes:
    """Return the hash before the first block of a request."""

class ExtraKeys:
    """
    The inputs of a request, other than its tokens and its root, that its KV depends on.
    """

    def __init__(self, adapter_id: bytes | None, items: Sequence[tuple[int, int, bytes, bool]]) -> None:
        """
        ``items``: (offset, length, hash, hash is text) of each multimodal item, in order and
        disjoint.
        """

    def block_items(self, start: int, end: int, index: int) -> tuple[int, list[int]]:
        """
        Find the items that overlap the block of tokens [start, end), searching from item
        ``index``.

        Returns the index from which to search for the next block, and the items' positions.
        """

def hash_blocks(
    tokens: Sequence[int] | numpy.typing.NDArray[numpy.int32 | numpy.int64] | array.array[int],
    block_size: int,
    parent: bytes,
    start: int,
    extra_keys: ExtraKeys,
    lookahead: int = 0,
    backend: str | None = None,
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Hash the full blocks of ``tokens``, which follow token ``start`` and the block ``parent``.

    Returns an array of shape (blocks, 32). Raises HashingError for bad arguments.
    """

class TokenBlocks:
    """
    The tokens of a request and the hashes of its full blocks, growing at the end.
    """

    def __init__(self, block_size: int, root: bytes, extra_keys: ExtraKeys, lookahead: int = 0) -> None: ...
    def append(
        self, tokens: int | Sequence[int] | numpy.typing.NDArray[numpy.int32 | numpy.int64] | array.array[int]
    ) -> None:
        """Append tokens and hash the blocks that they complete."""

    def __len__(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def hashes(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), writable=False)]: ...
    @property
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

def record_checksum(
    record: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> int:
    """
    Return the checksum of a record whose planes are at ``offsets``, multiples of 8.
    """

def copy_record_with_checksum(
    target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> int:
    """
    Copy a record whole, and return the checksum of the copy, as ``record_checksum``.
    """

def copy_with_checksum(
    target: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    source: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> int:
    """Copy all bytes and return their checksum."""

class HostRun:
    """Blocks of a path on the host, in path order."""

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(
        self,
        lease: int,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        unverified: Annotated[
            NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
        ]
        | None = None,
    ) -> None: ...
    def __len__(self) -> int: ...
    def part(self, first: int, stop: int) -> HostRun:
        """Return the blocks ``first`` to ``stop``, pinned by the same lease."""

    @property
    def lease(self) -> int:
        """Pins the blocks until it is released; 0 if there are none."""

    def columns(
        self,
    ) -> tuple[
        numpy.typing.NDArray[numpy.int32],
        numpy.typing.NDArray[numpy.uint32],
        numpy.typing.NDArray[numpy.uint8] | None,
    ]:
        """
        Return slots, generations, and 1 for records whose bytes nothing has verified, or None.
        """

class HostIndex:
    """The host tier as planners see it: of this process, or of a service."""

    def find_and_pin(
        self,
        path: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        start: int = 0,
        storage_use: int = 0,
    ) -> tuple[HostRun, bool, int]:
        """
        Pin the leading run of a path from ``start`` on. Return the run, True if the block after it is
        being copied to the tier, and for how many leading blocks of the path the service has to be
        asked, 0 if it need not.
        """

    def release(self, lease: int) -> bool:
        """
        Release what a lease owns, or a run after the loads that read it. Return False if that was
        done before.
        """

    def begin_load(
        self,
        lease: int,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Keep slots of a run until the load of them ends, whatever becomes of its lease.
        """

    def begin_load_of(self, run: HostRun) -> None:
        """Do so with all slots of a run."""

    def end_load(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        copied: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        bad: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None:
        """
        End a load. ``copied`` is 1 for blocks that every rank has, ``bad`` for records to forget.
        """

    def cancel_load(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """End a load that was planned and reads nothing."""

    def contains(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Per hash: 0 absent, 1 ready, 2 pending; of a service's tier as far as this process knows.
        """

    @property
    def room(self) -> int:
        """The most blocks that may be copied now."""

    @property
    def capacity(self) -> int:
        """
        The blocks of the tier. A service grants room in the background, up to as many.
        """

    def complete(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        copied: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        checksums: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        End copies into the tier, parents first. 1 for each block that is there, or will be.

        A block that was not copied, or whose parent is not ready, is removed. ``checksums`` may
        be empty.
        """

class BlockList:
    """Parallel arrays that describe blocks; the arrays are read-only views."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> tuple[int, int, bytes, bytes, int]:
        """Return slot, generation, hash, parent's hash and hits of a block."""

    @overload
    def __getitem__(self, index: slice) -> BlockList:
        """Return a list of some of the blocks."""

    def __eq__(self, other: object | None) -> bool:
        """Compare the contents."""

    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __getstate__(self) -> tuple[bytes, bytes, bytes, bytes, bytes]: ...
    def __setstate__(self, state: tuple[bytes, bytes, bytes, bytes, bytes]) -> None: ...
    @property
    def slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...
    @property
    def generations(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), writable=False)]: ...
    @property
    def hashes(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), writable=False)]: ...
    @property
    def parents(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), writable=False)]:
        """32 zero bytes stand for the root."""

    @property
    def hits(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), writable=False)]: ...

class MatchRun:
    """The pinned leading run of a path."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...
    @property
    def generations(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), writable=False)]: ...
    @property
    def hits(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), writable=False)]: ...
    @property
    def pending(self) -> bool:
        """True if the block after the run is being copied into this tier."""

class Reservation:
    """
    Reserved slots, and the blocks evicted for them (children before parents).
    """

    def __len__(self) -> int: ...
    @property
    def slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...
    @property
    def generations(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,), writable=False)]: ...
    @property
    def evicted(self) -> BlockList: ...
    @property
    def missing(self) -> int:
        """Number of slots that were not available; none is reserved then."""

class CopyReservation(Reservation):
    """Slots reserved for copies."""

    @property
    def status(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """
        Per hash: 0 reserved (its slot is the next of ``slots``), 1 ready, 2 pending, 3 no parent.
        """

class TierStats:
    """Counts of slots, of what uses them, and of operations."""

    @property
    def slots(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def writing(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def pending(self) -> int: ...
    @property
    def evictable(self) -> int: ...
    @property
    def quarantined(self) -> int: ...
    @property
    def withheld(self) -> int: ...
    @property
    def orphans(self) -> int: ...
    @property
    def unjoined(self) -> int: ...
    @property
    def contradictions(self) -> int: ...
    @property
    def pins(self) -> int: ...
    @property
    def holds(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def lookups(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

class NodeView:
    """The state of one slot."""

    @property
    def slot(self) -> int: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def tenant(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def children(self) -> int: ...
    @property
    def pins(self) -> int: ...
    @property
    def holds(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def state(self) -> int: ...
    @property
    def findable(self) -> bool: ...
    @property
    def hash(self) -> bytes: ...
    @property
    def checksum(self) -> int: ...
    @property
    def idle_seconds(self) -> float:
        """Since the entry was last matched, or stored."""

    @property
    def ready_seconds(self) -> float:
        """Since the entry was stored."""

class FreeRuns:
    """
    The free slots of a tier as runs (first, count). No run crosses a multiple of ``extent``;
    0: there is one extent.
    """

    def __init__(self, extent: int = 0) -> None: ...
    def __len__(self) -> int: ...
    def resize(self, slots: int) -> None:
        """Change the number of slots. New ones are not free."""

    def add(self, first: int, count: int = 1) -> None:
        """Free a run of slots. Raises ValueError if one of them is free."""

    def take(self, count: int) -> list[tuple[int, int]]:
        """
        Take slots in as few runs as possible, ascending. Raises ValueError if fewer are free.
        """

    def clear(self) -> None:
        """Make no slot free."""

    def runs(self) -> list[tuple[int, int]]:
        """Return all runs, ascending."""

    def check_integrity(self) -> list[str]:
        """Return the invariants that do not hold, in words."""

class PresenceTable:
    """
    The blocks of a tier of another process, read from memory that the tier mirrors itself
    into.

    Answers may be out of date.
    """

    def __init__(
        self,
        memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """``memory``: whole buckets of 128 bytes, after one for control."""

    def contains(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """1 for each hash that is present, else 0."""

    def run(
        self,
        path: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        start: int = 0,
    ) -> int:
        """
        Number of consecutive blocks of a path that are present, from ``start`` on.
        """

class PresenceWriter(PresenceTable):
    """
    The presence table of a tier of this process, which the tier itself keeps: ``Tier.mirror``.
    """

    def __init__(
        self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
    ) -> None: ...
    def close(self) -> None:
        """
        Stop clients from pinning blocks by themselves until ``open``. What they have pinned is in their rings.
        """

    def open(self) -> None: ...
    def set_unverified(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        unverified: bool,
    ) -> None:
        """Mark blocks of the table, or remove the mark."""

class OutgoingCopies:
    """
    Copies into the tier of another process, whose presence table is ``table``.

    Keeps the slots granted for copies, and the blocks that the table does not show yet.
    """

    def __init__(self, table: PresenceTable) -> None: ...
    def grant(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """Add slots to the stock, from which copies take theirs."""

    def give_up_stock(self, first: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Remove and return the slots of the stock from ``first`` on."""

    @property
    def stock(self) -> int:
        """Number of granted slots that no copy uses yet."""

    def take_asked(self) -> int:
        """
        Return the most slots that one reservation since the last call has asked for.
        """

    @property
    def tier_slots(self) -> int:
        """Slots of the whole tier, as the service has told last."""

    @tier_slots.setter
    def tier_slots(self, arg: int, /) -> None: ...
    def contains(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Per hash: 0 absent, 1 ready, 2 being copied by this process."""

    def reserve(
        self,
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        below_pending: bool = False,
    ) -> CopyReservation:
        """
        Take slots of the stock for hashes that are absent and whose parent is ready or precedes
        them. ``below_pending``: as for ``Tier.reserve_copies``.
        """

    def end(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        copied: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        reported: bool,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))],
        Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))],
    ]:
        """
        End copies and return the parents and hashes of their blocks.

        ``reported``: the tier gets a report and will acknowledge it. Raises IndexError for a slot
        without a copy in flight.
        """

    def acknowledge(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """
        Forget these blocks: the tier has acknowledged them, and its table shows them.
        """

    def drop_unacknowledged(self) -> None:
        """Forget all copied blocks that the tier has not acknowledged."""

    @property
    def in_flight(self) -> int:
        """Number of blocks being copied."""

class FoundRun:
    """The leading run of a path, as the table showed it. Not pinned yet."""

    def __len__(self) -> int: ...
    @property
    def slots(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...
    @property
    def generations(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    @property
    def unverified(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))] | None:
        """
        1 for records whose bytes nothing has verified; None if there are none.
        """

class SharedRuns:
    """
    Runs that a client finds in the table of a shared tier and pins by itself.

    ``ring``: shared memory in which it tells the service.
    """

    def __init__(
        self,
        table: PresenceTable,
        ring: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    ) -> None: ...
    def find(
        self,
        path: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        start: int,
    ) -> FoundRun:
        """Look up the leading run of a path from ``start`` on."""

    def pin(
        self,
        path: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        found: FoundRun,
    ) -> int:
        """
        Pin a run that was found on this path; return its number, or 0: ask the service.

        0 if the service removes blocks now or has removed some since, lets no client pin, or has
        not read enough of the ring.
        """

    @property
    def observer(self) -> Callable[[str], None]:
        """
        For tests: called with 'found' after a look-up that found blocks, and 'pinned' after a pin.
        """

    @observer.setter
    def observer(self, observer: Callable[[str], None] | None) -> None: ...
    def next_number(self) -> int:
        """Return a number for a run pinned on request."""

    def unpin(self, run: int) -> None:
        """Unpin a run; a full ring delays it until ``flush``."""

    def flush(self) -> None:
        """Write what a full ring has delayed."""

class LoadingRuns:
    """The slots that loads read, and the runs that pin them."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, run: int) -> bool: ...
    def begin(
        self,
        run: int,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Begin to load these slots of a run."""

    def end(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> list[int]:
        """
        End a load of these slots; return the runs that pin them, each once.

        Raises IndexError for a slot that no load reads.
        """

class RunRing:
    """The service's end of the ring of a client."""

    def __init__(
        self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
    ) -> None: ...
    def take(self) -> list[tuple[int, int, Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))]]]:
        """
        Return (run, start, path) of each record since the last call; an empty path unpins.

        The first ``start`` hashes of a path are zero. Raises ValueError for a record that no
        client writes.
        """

    def close(self) -> None:
        """Stop the client from writing."""

class MissLog:
    """Blocks that look-ups did not find, until they are sent to the service."""

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def in_flight(self) -> int:
        """
        Number of look-ups that ended at a block which this engine was copying to the service.
        """

    @in_flight.setter
    def in_flight(self, arg: int, /) -> None: ...
    def clear(self) -> None:
        """Forget what was not sent."""

    def take(self) -> tuple[int, bytes, bytes, bytes, int]:
        """
        Return and forget: the number of look-ups without any hit, the hash of the first missing block of
        each look-up, how many blocks were missing as int32, and a sample of all missing blocks: the
        beginnings of their hashes as uint64, those below a limit, and the limit.
        """

class SharedHost(HostIndex):
    """
    The host tier of a service, through one session after another.

    Nothing is found or reserved without a session. A run is unpinned once it is released and no
    load reads it.
    """

    def __init__(self) -> None: ...
    def begin_session(self, runs: SharedRuns, copies: OutgoingCopies) -> None:
        """
        Use a session that has begun. Nothing of the one before may be in flight.
        """

    def end_session(self) -> None:
        """Find and reserve nothing until the next session begins."""

    def set_closed(self, closed: bool) -> None:
        """Find and reserve nothing while ``closed``, whatever session there is."""

    def reserve(
        self,
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        below_pending: bool = False,
    ) -> CopyReservation:
        """
        Take slots of the session's stock, as ``OutgoingCopies.reserve``; all are missing without one.
        """

    def add(self, owner: SharedRuns, number: int, unverified: bool) -> int:
        """
        Add a run that the service has pinned under a number; return its lease.
        """

    def take_reports(self) -> list[tuple[bytes, bytes | None, bytes, bytes, bytes]]:
        """
        Return the copies and loads that ended and that the service has to be told of, in order:
        slots, parents (None for a load), hashes, copied and checksums of each, as bytes.
        """

    def drop_reports(self) -> None:
        """Forget what ended: no service listens. What was copied is not there."""

    @property
    def has_reports(self) -> bool: ...
    @property
    def misses(self) -> MissLog: ...
    @property
    def runs(self) -> int:
        """Number of runs that are not released."""

    @property
    def slots_loading(self) -> int:
        """Number of slots that loads read."""

    @property
    def blocks_in_flight(self) -> int:
        """Number of blocks being copied."""

SLOT_FREE: int = 0

SLOT_WRITING: int = 1

SLOT_READY: int = 2

class HintKind(enum.IntEnum):
    """What a client says of blocks."""

    ONCE = 0

    RELEASE = 1

    RETAIN = 2

    RETURN = 3

    PRIORITY = 4

class HintAnswer(enum.IntEnum):
    """What became of a hint."""

    TAKEN = 0

    NOT_LEARNING = 1

    OVER_BUDGET = 2

    NO_BLOCK = 3

    REPLACED = 4

class HintFate(enum.IntEnum):
    """What became of a block with a hint."""

    WAITING = 0

    USED = 1

    EVICTED = 2

    GONE = 3

class ReuseTables:
    """
    What was learned of reuse, by class and age.

    Tables are flat, of ``ROLES`` x ``OUTPUTS`` x ``NEWS`` x ``AGES`` numbers, and of
    ``HINTS`` x ``AGES`` for blocks that a client has told about; those that their path left behind are
    class ``LEFT``.
    """

    @property
    def reused(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Blocks used again at an age; older counts fade."""

    @property
    def at_risk(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Seconds that blocks spent at an age."""

    @property
    def rate(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Reuses per second of one block."""

    @property
    def index(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Hits per second of keeping a block: its rank in the eviction order."""

    @property
    def begins(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """Seconds at which the ages begin, and where the last one ends."""

    ROLES: Final[int] = ...
    """(arg: object, /) -> int"""

    OUTPUTS: Final[int] = ...
    """(arg: object, /) -> int"""

    NEWS: Final[int] = ...
    """(arg: object, /) -> int"""

    AGES: Final[int] = ...
    """(arg: object, /) -> int"""

    HINTS: Final[int] = ...
    """(arg: object, /) -> int"""

    LEFT: Final[int] = ...
    """(arg: object, /) -> int"""

def read_hints(
    hints: Sequence[object], prompt_tokens: int, block_size: int, num_blocks: int, num_records: int
) -> list[tuple[HintKind, float, int, int, bool]]:
    """
    Return what hints say of the records of a request's blocks, as ``Tier.hint`` takes it.
    """

class Tier(HostIndex):
    """
    Slots, the entries in them and their users; any thread may call.

    Hash arrays have shape (n, 32); a parent of 32 zero bytes stands for the root. Every
    operation is all or nothing. Raises IndexError for a slot that is not in use, ValueError
    for other bad arguments, and StaleLeaseError for a lease that was released or, unless
    noted, opened before a reset.
    """

    def __init__(self, slots: int, eviction: str = "lru", extent: int = 0, spare: float = 0.0) -> None:
        """
        ``extent``: runs of slots cross no multiple of it; 0: there is one extent. ``spare``:
        reservations evict ahead of need, for longer runs, while less than this share of the slots
        (0 to 0.5) is free.
        """

    def set_below(self, below: HostIndex, is_always_copied: bool) -> None:
        """
        Tell the eviction order of the tier below: that of this process, or the runs of a service.

        ``learned`` then weighs a block by what its eviction loses: less if the tier below keeps it.
        ``is_always_copied``: every evicted block is copied there, and no other; so the tiers hold
        different blocks.
        """

    def set_above(self) -> None:
        """
        Tell the eviction order that there is a tier above: both together may lose to last use what
        one alone may.
        """

    def set_states(self, page_records: int, states: int) -> None:
        """
        Tell the eviction order that prefixes end where a page, of ``page_records`` records, has ``states``
        of them below it: ``learned`` then weighs states by the pages that they save for the slots that
        are free without them. Nothing changes if either number is 0.
        """

    def set_clock(self, milliseconds: int) -> None:
        """
        Take the time from the caller from now on: it is what the last call said, but never goes back.
        """

    def open_lease(self) -> int:
        """Open a lease, which owns pins and reserved slots until ``release``."""

    def finish(
        self, lease: int, prompt_tokens: int | None = None, output_tokens: int = 0, block_tokens: int = 0
    ) -> bool:
        """
        Release a lease whose entries were used, and let the eviction order learn from it.

        The numbers are of the request, if they are known.
        """

    def match(
        self,
        lease: int,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        start: int = 0,
        known: int = 0,
    ) -> MatchRun:
        """
        Pin the leading run of ready blocks from ``start`` on; ``hashes`` are one path from the
        root, or the end of one.

        Adds a hit to each block except the first ``known``.
        """

    def reserve(self, lease: int, count: int) -> Reservation:
        """Reserve anonymous slots to compute into."""

    def evict_copied(self, count: int) -> BlockList | None:
        """
        Evict all that can be, and of the blocks that copies read as many as keep ``count`` others.

        Return the blocks evicted; None, and change nothing, if there are not as many above copies. The
        slots that copies read are free once these end.
        """

    def reserve_copies(
        self,
        lease: int,
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        below_pending: bool = False,
        tenant: int = 0,
    ) -> CopyReservation:
        """
        Reserve slots for copies into this tier. They are pending until ``complete``.

        Reserves a slot for each hash that is absent and whose parent is ready or reserved earlier
        in this call. Never evicts a block that the result calls ready. Lease 0: no lease owns the
        slots. ``below_pending``: also below parents whose copies are in flight; a block is dropped in
        the end unless its parent's copy has succeeded before. ``tenant``: of the blocks, unless the
        first one is below a block of another; beyond its limit it evicts its own, and what there is
        no room for then is missing.
        """

    def commit(
        self,
        lease: int,
        parent: bytes,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Make slots that the lease reserved matchable below ``parent``, in path order. Per block: 0
        stored, 1 duplicate.

        Stops at the first block that cannot be committed yet: its parent is not ready, its hash
        is pending or below another parent, or a copy uses its slot. For a duplicate, pins the
        existing entry; the slot stays with the lease.
        """

    def publish(
        self,
        lease: int,
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        copied: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        checksums: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        tenants: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ]
        | None = None,
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Make slots that the lease reserved, and others filled, matchable. Per block: 0 stored, 1
        duplicate, 2 no parent, 3 dropped, 4 over limit.

        The lease gives up all these slots. A lease from before a reset drops them all.
        ``tenants``: of the blocks below the root, inherited by the blocks below them. A tenant at
        its limit evicts its own coldest leaves.
        """

    def set_tenant_limit(self, tenant: int, most: int) -> None:
        """
        Limit the entries of a tenant. The first call enables tenants; ValueError if there are
        entries.
        """

    def tenant_entries(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """Number of entries by tenant."""

    def drop(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Remove entries and blocks that are being copied, and everything below them; return their slots.
        """

    def below(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Return the slots that ``drop`` would remove."""

    def free_among(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Return those of these slots that are free."""

    def hold(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Keep slots while a copy reads them, without a change to the eviction order.
        """

    def hold_ready(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        most: int,
    ) -> BlockList:
        """Hold the ready ones of these blocks, at most ``most``; return them."""

    def unhold(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """End a ``hold``."""

    def find(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> BlockList:
        """Return the blocks that are ready, in the order of ``hashes``."""

    def ancestry(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        levels: int = 4294967295,
    ) -> BlockList:
        """
        Return the entries in ``slots`` and their ancestors, each once, parents first.

        A walk up ends ``levels`` above the last of ``slots`` that it met, or at an entry listed
        before.
        """

    def coldest(self, count: int) -> BlockList:
        """Return the next entries to be evicted, in order."""

    def hottest(self, count: int) -> BlockList:
        """Return the entries with the most hits."""

    def idle(self, seconds: float, tenant: int | None = None) -> BlockList:
        """Return the entries not used for this long, of one tenant or all."""

    def starting_with(self, prefix: bytes) -> BlockList:
        """Return the entries whose hash starts with ``prefix``."""

    def restore(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        checksums: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        times: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        generation: int = 0,
        tenants: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ]
        | None = None,
        keep_orphans: bool = False,
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Create entries for blocks whose bytes are there already, in free slots and any order; 1
        for each one created.

        Of equal hashes the newest by ``times`` counts, or the first. Later content of any slot
        gets a generation above ``generation`` and all those given. ``keep_orphans``: blocks without
        a parent keep their slots and become entries once it is there. Releases the GIL: do not
        change the arrays meanwhile.
        """

    def discard(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        quarantine: bool = False,
        keep_orphans: bool = False,
    ) -> BlockList:
        """
        Remove READY entries and everything below them. ``quarantine`` takes the slots out of use
        for good. ``keep_orphans``: blocks below become orphans, which keep their slots until room is
        needed and are entries again once their parent is.
        """

    def awaited(self, count: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))]:
        """
        Return up to ``count`` missing blocks that orphans wait for; the next call goes on with others.
        """

    @property
    def num_orphans(self) -> int:
        """Number of orphans."""

    def drop_orphans(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Evict every orphan; return the slots."""

    def quarantine(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Take slots in use out of use for good, once nothing uses them."""

    def withhold(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Take slots in use out of use until ``give_back``, once nothing uses them.
        """

    def give_back(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Return withheld slots to use."""

    def hint(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        hints: Sequence[tuple[HintKind, float, int, int, bool]],
        sample: int = 0,
    ) -> list[tuple[int, int, int, bytes]]:
        """
        Take what a client says of blocks of one path, until their next use. A hint is (kind, seconds or
        a priority of 1 to 100, first block, block after the last, True: only of those that nobody else
        has). The last one about a block holds. Return for each its ``HintAnswer``, its first block, their
        number, and if it keeps them the hashes of up to ``sample`` of them, from the last one on.
        """

    def hint_fates(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Return what became of blocks that a hint was taken for, as a ``HintFate`` each.
        """

    def reuse(self) -> ReuseTables | None:
        """
        Return a copy of what the eviction order has learned; None for one that does not learn.
        """

    def save_reuse(self) -> bytes:
        """
        Return what was learned, for ``load_reuse`` of a later process; empty if nothing is.
        """

    def load_reuse(self, saved: bytes) -> bool:
        """
        Go on from what was learned before. Return False, and change nothing, for other bytes.
        """

    def reset(self) -> None:
        """Remove all entries. Slots in use stay with their leases and copies."""

    def resize(self, slots: int) -> int:
        """
        Change the number of slots. If slots to remove are in use, return how many and change
        nothing.

        Raises MemoryError if there is no room to grow.
        """

    def mirror(
        self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
    ) -> None:
        """
        Keep a presence table of the READY blocks in ``memory``, which may be shared.
        """

    def record_events(self, capacity: int) -> None:
        """Keep up to ``capacity`` events for ``take_events``; 0 keeps none."""

    def take_events(
        self,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))],
        Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))],
    ]:
        """
        Return kinds (0 stored, 1 removed, 2 cleared, 3 lost: some are missing), hashes and
        parents, oldest first.
        """

    def take_event_bytes(self) -> tuple[bytes, bytes, bytes]:
        """``take_events`` in bytes, which costs less for few."""

    def stats(self) -> TierStats: ...
    def node(self, slot: int) -> NodeView:
        """Return the state of a slot."""

    @property
    def available(self) -> int:
        """Number of slots that ``reserve`` can provide: free or evictable."""

    @property
    def above_copies(self) -> int:
        """
        Number of further slots that ``reserve`` can provide after ``evict_copied``.
        """

    def check_integrity(self) -> list[str]:
        """Return the invariants that do not hold, in words."""

class BlockQueue:
    """
    A first-in, first-out queue of at most ``most`` block hashes.

    A full queue drops what was added first, one call's blocks at a time.
    """

    def __init__(self, most: int) -> None: ...
    def __len__(self) -> int: ...
    def add(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> int:
        """Append blocks; return the number of blocks dropped."""

    def take(self, count: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))]:
        """Remove and return the first blocks, or as many as there are."""

    def holds(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """For each block 1 if it is queued, else 0; walks the whole queue."""

    def clear(self) -> None:
        """Drop every block."""

class BlockCopies:
    """
    Copies of blocks between slots of two tiers, planned one after the other.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def append(
        self,
        slots: numpy.typing.NDArray[numpy.int32],
        generations: numpy.typing.NDArray[numpy.uint32],
        hashes: numpy.typing.NDArray[numpy.uint8],
        parents: numpy.typing.NDArray[numpy.uint8],
        unverified: numpy.typing.NDArray[numpy.uint8] | None,
        targets: numpy.typing.NDArray[numpy.int32],
        target_generations: numpy.typing.NDArray[numpy.uint32] | None,
    ) -> int:
        """
        Add copies; return the number of copies before them. ``target_generations``: None for zeros.
        """

    def append_run(
        self,
        run: HostRun,
        path: numpy.typing.NDArray[numpy.uint8],
        start: int,
        targets: numpy.typing.NDArray[numpy.int32],
        target_generations: numpy.typing.NDArray[numpy.uint32] | None,
    ) -> int:
        """
        Do so with the blocks of a run, which are those of a path from block ``start`` on.
        """

    def remove(self, first: int, count: int) -> numpy.typing.NDArray[numpy.int32]:
        """Remove copies; return their source slots."""

    def take(
        self,
    ) -> tuple[
        numpy.typing.NDArray[numpy.int32],
        numpy.typing.NDArray[numpy.int32],
        numpy.typing.NDArray[numpy.uint32],
        numpy.typing.NDArray[numpy.uint32],
        numpy.typing.NDArray[numpy.uint8],
        numpy.typing.NDArray[numpy.uint8],
        numpy.typing.NDArray[numpy.uint8] | None,
    ]:
        """
        Remove everything and return it: source slots, target slots, source generations, target
        generations, hashes, parents, and the marks of unverified blocks or None.
        """

def parents_from_root(
    path: numpy.typing.NDArray[numpy.uint8], stop: int
) -> numpy.typing.NDArray[numpy.uint8]:
    """
    Return the parent hashes of the first ``stop`` blocks of a path, at least one.
    """

def take_transfers(lists: Sequence[BlockCopies], forms: Sequence[tuple[Any, Any, Any, Any]]) -> list[Any]:
    """
    Empty lists of copies. Return a transfer for each, None for an empty one. A form has the
    transfer's class, purpose, source and target.
    """

class SwapInFlight:
    """
    One transfer of a plan, with the result of each block over all ranks that have reported.
    """

    def __init__(self, swap: object) -> None: ...
    @property
    def swap(self, /) -> Any: ...
    @property
    def size(self) -> int: ...
    @property
    def checksums(self, /) -> numpy.typing.NDArray[numpy.uint64]:
        """
        Those of the first record; empty before the report of a rank that writes it.
        """

    @checksums.setter
    def checksums(self, value: numpy.typing.NDArray[numpy.uint64], /) -> None: ...
    def settle(
        self,
        arrived: Annotated[
            NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """Set which blocks the target tier has; ``arrived`` is 1 for these."""

    @property
    def copied(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """
        Blocks that every rank has copied and, once the transfer is settled, the target tier has.
        """

    @property
    def flags(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """1 for each block that is ``copied``, else 0."""

    @property
    def is_whole(self) -> bool:
        """True if every block is ``copied``."""

    @property
    def num_copied(self) -> int:
        """Number of blocks that are ``copied``."""

    @property
    def lost(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """Blocks that some rank did not find in the source."""

    @property
    def corrupt(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """Blocks whose source record some rank found wrong."""

    @property
    def any_corrupt(self) -> bool:
        """True if some rank found a source record wrong."""

    @property
    def bad_slots(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """Blocks whose storage slot some rank cannot read or write."""

    @property
    def no_room(self) -> Annotated[NDArray[numpy.bool_], dict(shape=(None,))]:
        """Blocks for which some rank's disk has no room."""

class InFlightPlan:
    """
    A plan or a task of one that some of ``ranks`` ranks have not reported.
    """

    def __init__(self, plan: object, deadline: float, ranks: int) -> None: ...
    @property
    def plan(self, /) -> Any: ...
    @property
    def deadline(self) -> float: ...
    @property
    def is_overdue(self) -> bool: ...
    @is_overdue.setter
    def is_overdue(self, arg: bool, /) -> None: ...
    def waits_for(self, rank: int) -> bool:
        """Return True if this rank has not reported."""

    def stop_waiting(self, rank: int) -> None:
        """Count a rank that will not report."""

    def fail(self, rank: int, reason: str) -> None:
        """Count a rank that will never report as one that copied nothing."""

    @property
    def swaps(self, /) -> dict[fdcache.metadata.SwapPurpose, SwapInFlight]:
        """The transfers by purpose, with what the ranks have reported."""

    @property
    def errors(self) -> list[str]:
        """One message per failed rank and transfer."""

class PlanTable:
    """
    The plans in flight by number, for ``num_ranks`` ranks.

    ``num_sharers``: ranks, from the first on, that write the first record of a
    block in shares.
    """

    def __init__(self, num_ranks: int, num_sharers: int = 1) -> None: ...
    def __len__(self) -> int: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def plans(self, /) -> dict[int, InFlightPlan]: ...
    @property
    def next_deadline(self) -> float:
        """No plan is newly overdue before it."""

    @next_deadline.setter
    def next_deadline(self, arg: float, /) -> None: ...
    def expect(self, flight: InFlightPlan) -> None:
        """Add a plan."""

    def remove(self, flight: InFlightPlan) -> None:
        """Remove a plan."""

    def require_rank(self, rank: object | None) -> int:
        """Return the rank. Raises ``PlanError`` for an unknown one."""

    def check(self, report: object | None) -> None:
        """
        Raise ``PlanError`` for a report of an unknown rank, or one that does not fit its plan.
        """

    def expects(self, report: object) -> bool:
        """Return True if this rank has not reported this plan yet."""

    def record(self, report: Any) -> list[InFlightPlan]:
        """
        Count a report; return the plans, storage tasks included, that it completes.
        """

    def take_finished(self) -> list[InFlightPlan]:
        """Remove the plans that wait for no rank, and return them."""

    def blocks_in_flight(self, purpose: object) -> int:
        """Return the number of blocks being copied for this purpose."""

class CopyMeter:
    """
    Bytes and durations of copies by purpose.

    ``bounds``: upper bounds of a histogram's buckets, in seconds; the
    last bucket has none.
    """

    def __init__(self, bounds: Sequence[float]) -> None: ...
    def add(self, purpose: object, copied_bytes: int, seconds: float) -> None:
        """Count one rank's transfer, unless it copied nothing."""

    def total(self, purpose: object) -> tuple[int, list[int], float]:
        """Return bytes, transfers by duration, and the sum of the durations."""

class DevicePath:
    """
    The blocks of one request on the device, growing at the end.

    ``parent`` is the hash before the first one, None if it is unknown: the first block can then
    not be copied.
    """

    def __init__(self, parent: bytes | None) -> None: ...
    def __len__(self) -> int: ...
    @property
    def root(self) -> bytes | None:
        """
        Hash of the first block; None if there is none, or it is not the first of a prompt.
        """

    def hashes_from(self, start: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))]:
        """Return the hashes of the blocks from one on."""

    def extend(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Append blocks by their device blocks, -1 for none; ``hashes`` are those of the whole path.
        """

def are_block_ids(values: object | None, least: int = 0, distinct: bool = False) -> bool:
    """
    Return True for a contiguous int32 array of numbers from ``least`` on; ``distinct``: each but -1 is
    there once.
    """

class PlannedCopies:
    """The outcome of a call that planned or dropped copies."""

    @property
    def planned(self) -> int:
        """Number of copies planned."""

    @property
    def dropped(self) -> int:
        """Number of blocks that the host had no room for, each counted once."""

    @property
    def asked(self) -> int:
        """Number of host slots asked for at once."""

    @property
    def displaced(self) -> BlockList:
        """Blocks that left the host to make room."""

    @property
    def after(self) -> list[int]:
        """Plans that read device blocks which are given away."""

class DeviceContents:
    """
    The known blocks of a device cache that an engine owns, by device block.
    """

    def __init__(self) -> None: ...
    @property
    def num_blocks(self) -> int:
        """Number of device blocks that were offered at any time."""

    @property
    def num_known(self) -> int:
        """Number of device blocks whose content is known."""

    @property
    def has_offers(self) -> bool:
        """True if offers have not been looked at."""

    def offered(self, path: DevicePath, start: int, counted: int) -> None:
        """
        Take an offer of the blocks of a path from ``start`` on. Its request has counted as a hit of those before
        ``counted``.
        """

    def next_evicted(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Set which device blocks are given away next, coldest first."""

    def give_away(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        copies_out: CopyOut,
        target: HostIndex,
        copies: BlockCopies,
        plans: PlanTable,
    ) -> PlannedCopies | None:
        """
        Plan copies of wanted blocks before these device blocks are overwritten, and forget them.
        """

    def forget(
        self,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Forget what is in these device blocks, without a copy."""

    def drop(
        self,
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """Forget these blocks, and all below them, without a copy."""

    def sent(
        self,
        plan: int,
        ids: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Record the device blocks that a plan reads."""

class CopyOut:
    """
    Plans copies of the blocks of a device cache to a host tier, ancestors first.

    Blocks are wanted there as soon as they have ``least_hits``, or, with ``writes_back``, once they are
    evicted or among the next ``clean_reserve`` to be. ``target``: the host tier, of this process or of a
    service. Planned copies hold their slots on the host, and on a device of the
    scheduler's.
    """

    @overload
    def __init__(self, device: Tier, writes_back: bool, least_hits: int, clean_reserve: int) -> None: ...
    @overload
    def __init__(
        self, device: DeviceContents, writes_back: bool, least_hits: int, clean_reserve: int
    ) -> None: ...
    @property
    def has_queue(self) -> bool:
        """True if the next plan may copy queued blocks."""

    def enqueue(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Queue the blocks in these device slots."""

    def enqueue_awaited(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Queue blocks ahead of all and whatever their hits."""

    def clear(self) -> None:
        """Forget what is queued, and what an engine has told of its device."""

    def ended(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Record the end of copies out of these device slots."""

    def queued(self, target: HostIndex) -> int:
        """Return the number of blocks that wait for a plan."""

    def has_work(self, target: HostIndex) -> bool:
        """Return True if the next plan may copy queued blocks."""

    def ended_of(self, path: DevicePath, start: int, stop: int, target: HostIndex) -> tuple[int, int]:
        """
        Return how many blocks of an offered path, from ``start`` on, neither wait for a plan nor are being copied,
        up to the first that does or is; and how many of these the target has.
        """

    def evict(self, evicted: BlockList, target: HostIndex, copies: BlockCopies) -> PlannedCopies | None:
        """
        Plan copies of evicted blocks that the host lacks, before their slots are overwritten.
        """

    def plan(
        self, target: HostIndex, in_flight: int, is_patient: bool, now: float, copies: BlockCopies
    ) -> PlannedCopies | None:
        """
        Plan backups of queued blocks, while ``in_flight`` blocks are being backed up. While ``is_patient``, a few
        blocks wait for more.
        """

def copies_that_may_end(
    hashes: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)],
    parents: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)],
    target: HostIndex,
) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
    """
    Return 1 for each block of a transfer to the host that is not below a copy in flight of another one.
    """

class RequestState:
    """
    Tokens, block hashes and device blocks of one request: the state that
    ``fdcache.manager.Request`` documents.
    """

    def __init__(
        self,
        request_id: str,
        prompt: object,
        tenant: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        use_cache: bool = True,
        device_only: bool = False,
        max_cached_tokens: object | None = None,
    ) -> None: ...
    @property
    def request_id(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Number of prompt and appended tokens."""

    @property
    def num_cached_tokens(self) -> int:
        """Length of the matched prefix; 0 unless the request is matched."""

    @property
    def use_cache(self) -> bool: ...
    @use_cache.setter
    def use_cache(self, arg: bool, /) -> None: ...
    @property
    def device_only(self) -> bool: ...
    @device_only.setter
    def device_only(self, arg: bool, /) -> None: ...
    @property
    def max_cached_tokens(self) -> int | None: ...
    @max_cached_tokens.setter
    def max_cached_tokens(self, value: int | None, /) -> None: ...
    @property
    def is_loading(self) -> bool:
        """
        True from the planning of a load to the ``LoadOutcome`` of ``CacheManager.apply``.
        """

    @property
    def load(self) -> int:
        """
        Number of the load that the request waits for, by which its outcome names it; 0 for none.
        """

    @property
    def lease(self) -> int:
        """
        Lease of the request's device blocks, another one after each match; 0 unless it is live.
        """

    @property
    def num_blocks(self) -> int:
        """Length of the block table."""

    @property
    def is_live(self) -> bool:
        """True between the request's match and its end."""

    @property
    def block_table(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        Device slots in path order, shape (blocks,); empty unless the request is matched.
        """

    @property
    def tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        Prompt and appended tokens, int32, shape (tokens,); empty before they are hashed.
        """

    @property
    def block_hashes(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), writable=False)]:
        """
        Hashes of the full blocks so far, shape (blocks, 32); empty before they are made.

        With look-ahead tokens the last full blocks have no hash until the tokens after them are
        known.
        """

    def append_tokens(
        self, tokens: int | Sequence[int] | numpy.typing.NDArray[numpy.int32 | numpy.int64] | array.array[int]
    ) -> None:
        """
        Append accepted generated tokens. Raises ``RequestStateError`` before the first match.
        """

class DescribedBlocks:
    """
    Blocks of requests that were described to another process, up to ``capacity``; older
    ones are described again.
    """

    def __init__(self, capacity: int) -> None: ...
    def describe(self, requests: Sequence[RequestState]) -> list[tuple[int, int, bytes, bytes, bytes]]:
        """
        Return for each request with blocks that were not described: its position, its first such block,
        the hash of the one before it or nothing, and hashes and tokens of all from there on.
        """

    def clear(self) -> None:
        """Forget all."""

class AdvanceResult:
    """
    The blocks that a decode step added to its requests.

    ::

        result = manager.advance(requests, sampled_tokens)
        for position, block in result:       # or the arrays, for a copy to the GPU
            print(requests[position].request_id, block)
        for position in result.failed:
            preempt(requests[position])

    ``positions`` and ``block_ids`` are parallel int32 arrays, shape (blocks,), ascending
    by request: views, which keep the result alive.
    """

    @property
    def positions(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """Position in the call of the request of each block."""

    @property
    def block_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """Device slot of each block."""

    @property
    def failed(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        Positions of the requests that got no blocks; preempt them, or allocate again.
        """

    @property
    def shortfall(self) -> int:
        """Blocks that the first of them lacks; 0 without one."""

    @property
    def ok(self) -> bool:
        """True if every block table holds all tokens."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return (position of the request, device slot)."""

    def __iter__(self) -> Iterator[tuple[int, int]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __getstate__(self) -> tuple[list[int], list[int], list[int], int]: ...
    def __setstate__(self, arg: tuple[Sequence[int], Sequence[int], Sequence[int], int], /) -> None: ...

class LoadForms:
    """How Python is told of the ends of loads."""

    def __init__(
        self,
        outcome: object,
        confirmed: object,
        failed: object,
        overdue: object,
        block_size: int,
        groups: int = 1,
    ) -> None: ...

class LoadTotals:
    """How loads have ended."""

    @property
    def confirmed(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def cut_short(self) -> int: ...
    @property
    def overdue(self) -> int: ...

class Load:
    """
    Blocks ``first`` to ``stop`` of one request, loaded in one part or more.
    """

    @property
    def number(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def planned(self) -> int:
        """The block after the last one that is part of a plan."""

    @property
    def plan(self) -> int:
        """The plan of the first part; 0 before it is sent."""

    @property
    def is_revoked(self) -> bool:
        """True if its blocks are gone through no fault of the load."""

    @property
    def arrived(self) -> int:
        """The block after the last one that counts."""

    @property
    def is_open(self) -> bool:
        """True if another part will be planned."""

    @property
    def is_in_flight(self) -> bool:
        """True until its end."""

    @property
    def is_confirmed(self) -> bool: ...
    @property
    def is_overdue(self) -> bool: ...
    def outcome(self, forms: LoadForms, request_id: str, unplanned: tuple[int, ...]) -> Any:
        """Return the outcome, once the load has ended."""

class LoadPart:
    """Blocks of a load that one plan has."""

    @property
    def load(self) -> Load: ...
    @property
    def first(self) -> int: ...
    @property
    def has_parts_below(self) -> bool: ...

class Loads:
    """
    What the requests of one manager load, from the plan of a load's first part to its end.

    A whole load has one part; one that follows reads from storage has several.
    """

    def begin(self, first: int, stop: int) -> Load:
        """Begin a load, whose parts follow."""

    def add(self, load: Load, stop: int, offset: int, count: int, is_ahead: bool) -> None:
        """
        Put the next part of a load, up to block ``stop``, into the plan that is sent next. ``count`` of
        its blocks are copied, from ``offset`` of the plan's loads on.
        """

    def take_rest(self, load: Load, count: int) -> LoadPart:
        """
        Return the rest of a load as its last part, which ``send_part`` attaches to a plan. ``count`` of
        its blocks are copied.
        """

    def send(self, plan: int, is_ahead: bool) -> None:
        """Attach the parts added since the last call to this plan."""

    def send_part(self, plan: int, part: LoadPart) -> None:
        """Attach one part to this plan."""

    def end(
        self,
        plan: int,
        copied: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        errors: Sequence[str],
    ) -> None:
        """End the parts of a plan that every rank has reported."""

    def give_up(self, plan: int) -> None:
        """End the loads that wait for an overdue plan."""

    def withdraw(self, load: Load) -> tuple[int, int, bool] | None:
        """
        Withdraw a load of which no plan was sent: it never ends. Return offset and count of its blocks in
        the plan's loads, which have to leave it, and True if that is the plan of loads ahead. None if a
        plan was sent.
        """

    def cut_off(self, load: Load, reason: str) -> None:
        """Plan no other part of a load."""

    def revoke(self, reason: str) -> None:
        """
        Make every load fail that has not ended, or whose end was not taken: its blocks are gone.
        """

    def take_ended(self) -> list[Load]:
        """Return the loads that have ended since the last call."""

    def loads_of(self, plan: int) -> list[tuple[int, bool]]:
        """
        Return the numbers of the loads that have blocks in a plan in flight; True: their last.
        """

    @property
    def open(self) -> list[Load]:
        """The loads of which other parts will be planned."""

    @property
    def has_ended(self) -> bool:
        """True if ``take_ended`` has something."""

    @property
    def totals(self) -> LoadTotals: ...

class MatchForms:
    """
    How ``BlockManager`` tells of matches, and their terms: ``cell`` blocks are a cell of
    the reuse grid; a request waits ``defer_timeout`` seconds for another's copy.
    """

    def __init__(
        self, cell: int, defer_timeout: float, result: object, matched: object, deferred: object
    ) -> None: ...
    @property
    def cell(self) -> int: ...

class AllocationForms:
    """How ``BlockManager`` tells of allocations."""

    def __init__(self, result: object, no_blocks: object, deferred: object) -> None: ...

class BlockManagerStats:
    """Totals since the manager was made."""

    @property
    def lookups(self) -> int: ...
    @property
    def lookup_tokens(self) -> int: ...
    @property
    def device_hit_tokens(self) -> int: ...
    @property
    def host_hit_tokens(self) -> int: ...
    @property
    def storage_hit_tokens(self) -> int: ...
    @property
    def deferred(self) -> int: ...
    @property
    def allocation_failures(self) -> int: ...

class BlockManager:
    """
    The device blocks of the requests of one scheduler.

    ``live`` are the requests between match and end by id, a dictionary that the caller keeps. With
    ``follow_*`` the manager keeps what write policies need to know until ``take_followed``. Raises
    RequestStateError for requests in another state; nothing is changed then.
    """

    def __init__(
        self,
        tier: Tier,
        block_size: int,
        fingerprint: bytes,
        lookahead: int = 0,
        caches_prefixes: bool = True,
        follow_stored: bool = False,
        follow_evicted: bool = False,
        follow_owners: bool = False,
        follow_hits: int = 0,
        host: HostIndex | None = None,
    ) -> None: ...
    def prepare(self, request: RequestState, keeps_gil: bool = False) -> None:
        """
        Hash the tokens of a request, without the GIL, unless they are. Any thread may call. With
        ``keeps_gil`` the GIL is kept for all but very long ones. Raises HashingError for tokens that
        cannot be hashed.
        """

    def change_fingerprint(self, fingerprint: bytes) -> None:
        """Hash with another layout from now on. Live requests publish no more."""

    def stop_publishing(self) -> None:
        """Stop live requests from publishing; they keep their blocks."""

    def publishes(self, request: RequestState) -> bool: ...
    def owns(self, request: RequestState) -> bool:
        """Return True between the request's match and its end."""

    def check_match(self, requests: Sequence[RequestState], live: dict[str, Any]) -> None:
        """
        Check that the requests can be matched, and hash those that are not yet.
        """

    def matchable(self, request: RequestState) -> int:
        """
        How many leading blocks a match may find: not the last token's, nor any above the request's
        limit.
        """

    def match(
        self,
        requests: Sequence[RequestState],
        live: dict[str, Any],
        forms: MatchForms,
        clock: object,
        is_reading: object | None = None,
        storage_use: Sequence[int] | None = None,
        worth_loading: object | None = None,
    ) -> list[Any]:
        """
        Pin the longest cached prefix of each request, on the device and then on the host, or defer it.
        Return a ``result`` for each, or (first block, blocks) where the service has to be asked for as
        many leading blocks: see ``answer``. Blocks for which ``is_reading`` are not waited for.
        ``storage_use``, for a service with storage: 1 if blocks may be read for a request, 2 if they are.
        ``worth_loading(request_id, num_tokens, on_device, on_host, last_hash)`` returns how many of the blocks on the
        host to load.
        """

    def answer(
        self,
        request: RequestState,
        live: dict[str, Any],
        forms: MatchForms,
        clock: object,
        run: HostRun,
        from_storage: tuple[int, int],
        worth_loading: object | None = None,
    ) -> object:
        """
        End a match with the run that the service has pinned for it; ``from_storage`` are the first block of
        the run that was read from storage for the request, and the one after the last.
        """

    def wait_for_reads(self, request: RequestState, live: dict[str, Any]) -> None:
        """Release a request that waits for its reads from storage."""

    def set_from_storage(self, request: RequestState, blocks: int) -> None:
        """Count blocks of a matched request's host run as read from storage."""

    def set_loaded_ahead(self, request: RequestState, from_host: int, from_storage: int) -> None:
        """
        Count blocks of a matched request on the device as hits of the tier that they were loaded from
        for it. Raises RequestStateError for more than it has there.
        """

    def allocate(
        self,
        demands: Sequence[tuple[RequestState, int]],
        loads: BlockCopies,
        live: dict[str, Any],
        forms: AllocationForms,
    ) -> list[Any]:
        """
        Extend the block table of each (request, number of tokens), and plan the loads of its host run.
        Return a ``result`` for each.
        """

    def commit(self, progress: Sequence[tuple[RequestState, int]]) -> None:
        """
        Publish the full blocks of the first tokens of each (request, number of tokens).
        """

    def advance(
        self, requests: object, tokens: object, uncomputed_tokens: object = 1, grow: bool = True
    ) -> AdvanceResult:
        """
        Append tokens, extend the block tables and publish full blocks: a whole decode step.
        """

    @property
    def loads(self) -> Loads:
        """What requests load."""

    def take_outcomes(self, forms: LoadForms) -> list[Any]:
        """
        Return the ends of loads that a request waits for, each once; publish what waited for them.
        """

    def expect_from_peer(self, request: RequestState) -> int:
        """
        Extend a match by the blocks that only a peer has; return their number.
        """

    def take_fetches(
        self,
    ) -> list[
        tuple[str, int, LoadPart, numpy.typing.NDArray[numpy.int32], numpy.typing.NDArray[numpy.uint32]]
    ]:
        """
        Return (request id, lease, part of its load, slots, generations) of the fetches that allocations
        have planned since the last call.
        """

    def release(self, request: RequestState, live: dict[str, Any]) -> bool:
        """Release every block of a live request; return False if it is not live."""

    def finish(self, requests: Sequence[RequestState], live: dict[str, Any]) -> None:
        """
        Release requests at their end: the eviction order learns how their blocks were used, and their
        next match counts as another hit.
        """

    @property
    def has_followed(self) -> bool:
        """True if ``take_followed`` has something."""

    def queue_followed(self, copies: CopyOut) -> None:
        """
        Queue the blocks that became entries or reached ``follow_hits`` for a backup.
        """

    def take_followed(self) -> tuple[BlockList | None, list[tuple[bytes, str]]]:
        """
        Return blocks evicted and (first block, tenant) of requests that published, and forget all news.
        """

    @property
    def stats(self) -> BlockManagerStats: ...

class CopiedBlocks:
    """Totals of blocks copied by purpose."""

    @property
    def loaded(self) -> int: ...
    @property
    def evicted(self) -> int: ...
    @property
    def backed_up(self) -> int: ...

class CountedReports:
    """What follows from reports."""

    @property
    def ended(self, /) -> list[InFlightPlan]:
        """
        Plans whose transfers the caller has to end: tasks, and those with a failure.
        """

    @property
    def arrived(self, /) -> list[Any]:
        """
        (transfer, 1 for each block that is in the tier or None for a service, checksums or None)
        of the other copies to the host.
        """

    @property
    def handovers(self, /) -> list[Any]:
        """Reports of hand-overs."""

    @property
    def not_cleared(self) -> bool:
        """True if a rank refused a plan that empties its storage."""

class PlanReports:
    """
    Counts the reports of plans, and ends the transfers of those of which every rank has copied everything.
    """

    def __init__(
        self,
        plans: PlanTable,
        loads: Loads,
        device: Tier | None,
        host: HostIndex | None,
        meter: CopyMeter | None,
        tells_arrivals: bool,
    ) -> None: ...
    def count(self, reports: list[Any]) -> CountedReports | None:
        """
        Count reports; return what follows from them, None if nothing does. Raises ``PlanError`` before
        any is counted.
        """

    @property
    def copied(self) -> CopiedBlocks: ...
    @property
    def unexpected(self) -> int:
        """Reports that no plan waited for."""

class MemoryGuard:
    """
    Guards mapped shared memory whose file another process may truncate.

    Pages that the file has lost are zeros of this process alone, where an access would end it with
    SIGBUS.
    """

    def __init__(
        self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
    ) -> None: ...
    @property
    def has_lost(self) -> bool:
        """True once a page was lost."""

class SlotHeader:
    """The header of a slot outside the device (docs/format-record.md)."""

    def __init__(
        self,
        state: int,
        generation: int,
        block_hash: bytes,
        parent: bytes,
        fingerprint: bytes,
        payload_bytes: int,
        payload_checksum: int,
    ) -> None:
        """``state``: 0 empty, 1 being written, 2 ready."""

    @staticmethod
    def from_bytes(data: bytes) -> SlotHeader:
        """Read a header from its 128 bytes; ``is_valid`` tells if they are one."""

    def to_bytes(self) -> bytes: ...
    @property
    def is_valid(self) -> bool:
        """True if magic, version and header checksum are right."""

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
    def written_ms(self) -> int:
        """In a slab file, milliseconds since 1970; 0 in an arena."""

class HostMemory:
    """Page-aligned anonymous memory, filled with zeros."""

    def __init__(self, nbytes: int) -> None: ...
    def prefer_node(self, node: int) -> None:
        """
        Take pages that are not touched yet from this NUMA node while it has free ones.
        """

    def populate(self, threads: int) -> None:
        """Allocate every page now, with several threads. Raises MemoryError."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def map_pages(address: int, nbytes: int) -> None:
    """
    Enter the pages of a shared mapping into the page tables, so that their first use takes no faults.
    """

class Tensor:
    """A tensor of any framework, imported through DLPack."""

    def __init__(self, tensor: object) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes."""

    @property
    def itemsize(self) -> int: ...
    @property
    def device_type(self) -> int:
        """DLPack's number of the device type."""

class PlaneTable:
    """
    The planes of a device cache; block b of a plane is at address + b * stride.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        strides: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        owner: object | None,
    ) -> None:
        """
        ``offsets``: of the planes in a record, multiples of 8. ``owner`` keeps the memory alive; without
        one the planes are only numbers, for ``plane_runs``.
        """

class RecordTable:
    """Records in extents of equal size, and their slot headers."""

    def __init__(
        self,
        extents: Sequence[int],
        records_per_extent: int,
        record_bytes: int,
        headers: Sequence[int],
        num_slots: int,
        owner: object,
    ) -> None:
        """
        ``headers``: address of the first header of each extent. ``owner`` keeps the memory alive.
        """

    @property
    def num_slots(self) -> int: ...
    def record(self, slot: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Return the bytes of a record, without a copy."""

    def addresses(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> tuple[
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
    ]:
        """Return the addresses of the slots' records and of their headers."""

    def header(self, slot: int) -> SlotHeader:
        """Return a copy of the slot's header."""

    def set_header(self, slot: int, header: SlotHeader) -> None: ...

def are_sound_transfers(evictions: object | None, loads: object | None, backups: object | None) -> bool:
    """
    Return True if the arrays of a plan's transfers have the right types and lengths, and no slot of
    the backups is in another transfer.
    """

def is_sound_transfer(swap: object, to_host: bool, device_blocks: int, host_blocks: int) -> bool:
    """
    Return True if the arrays of a transfer have the right types and lengths, all slots exist, and none is
    written twice.
    """

def are_disjoint_slots(
    first: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    second: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> bool:
    """Return True if no slot is in both arrays."""

def extents_of(
    slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    size: int,
) -> list[int]:
    """
    Return the extents of ``size`` slots each in which slots are, ascending.
    """

class Event:
    """A one-shot event between copy streams and the host."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def query(self) -> bool:
        """Return True if the event is set."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set; return False after ``timeout`` seconds."""

def wait_any(events: Sequence[Event], timeout: float | None = None) -> bool:
    """
    Wait until one of the events is set; return False after ``timeout`` seconds.
    """

class BlockCopy:
    """A batch of block copies in one direction."""

    def cancel(self) -> bool:
        """
        Cancel the batch unless it has started. Return True if it will never touch memory.
        """

    @property
    def done(self) -> Event: ...
    @property
    def started(self) -> bool: ...
    def finish(self) -> tuple[bytes, bytes, int, float, str]:
        """
        End a batch whose ``done`` is reached: mark complete records ready, and return

        - a byte per block: 0 if it was copied, else the reason (BlockFault in csrc/copy/record.hpp); empty if all
          were copied,
        - a 64-bit checksum per block of a copy to the host; empty for loads,
        - the bytes and seconds of the copies, and the device's error.
        """

def copy_blocks(
    swap: object,
    to_host: bool,
    planes: PlaneTable,
    device_blocks: int,
    records: RecordTable,
    fingerprint: bytes,
    verify: bool,
) -> BlockCopy | None:
    """
    Prepare the copies of a transfer; return None unless it is sound (``is_sound_transfer``).
    ``verify``: loads fail unless their bytes have the record's checksum.
    """

class CopyWindow:
    """
    The batches of one stream that have not ended. At most ``most`` bytes, or one batch, are
    enqueued behind the batch being copied.
    """

    def __init__(self, most: int) -> None: ...
    def add(self, nbytes: int, done: object) -> None:
        """Add a batch; ``done`` is the event of its end."""

    def has_room(self) -> bool:
        """Return True if another batch may be enqueued."""

    def drop_ended(self) -> None:
        """Forget the batches that have ended."""

    def next_end(self) -> Any:
        """Return the end of the oldest batch."""

class CopyStream:
    """
    A stream of the CPU device: runs operations in order on its own threads.
    """

    def __init__(self, threads: int, background: bool = False) -> None: ...
    def copy(self, copy: BlockCopy, first_plane: int, last_plane: int) -> None:
        """
        Enqueue planes [first_plane, last_plane) of a batch. Ranges of a batch come in order.
        """

    def copy_groups(self, copy: BlockCopy, ranges: Sequence[tuple[int, int]]) -> list[Event]:
        """Enqueue ranges of planes in order; return an event set after each."""

    def record(self, event: Event) -> None:
        """Set the event once all earlier operations are done."""

    def wait(self, event: Event) -> None:
        """Make later operations wait until the event is set."""

    def retire(self) -> None:
        """Drop the references to copies that are done."""

    def close(self) -> None:
        """
        Stop after the blocks in flight, abandon queued copies and set queued events.
        """

def copy_planes(
    source: PlaneTable,
    source_blocks: int,
    source_slots: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    target: PlaneTable,
    target_blocks: int,
    target_slots: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    first_plane: int,
    last_plane: int,
) -> None:
    """
    Copy planes [first_plane, last_plane) of blocks between two caches with equal planes, without the
    GIL. Raises IndexError for a slot that a cache does not have.
    """

def plane_runs(
    source: PlaneTable,
    source_slots: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    target: PlaneTable,
    target_slots: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    first_plane: int,
    last_plane: int,
) -> tuple[
    Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
    Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
    Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
]:
    """
    Return the runs of a copy of planes [first_plane, last_plane) of blocks, plane by plane: where each
    begins in the source and in the target, and its bytes. Pieces that adjoin on both sides are one run.
    Accesses no memory, so the planes may be those of another process.
    """

def sum_planes(
    planes: PlaneTable,
    num_blocks: int,
    slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    first_plane: int,
    last_plane: int,
) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """
    Sum planes [first_plane, last_plane) of blocks, without the GIL. Sums of ranges add up to the sum of
    the record's checksum.
    """

class CancelFlag:
    """Set once, from any thread, to cancel requests that have not started."""

    def __init__(self) -> None: ...
    def set(self) -> None: ...
    @property
    def is_set(self) -> bool: ...

class SlabFile:
    """
    Records and headers of an open slab file (docs/format-storage.md).

    ``read``, ``write`` and ``verify`` return the fault of each block, its checksum, its
    errno, the bytes of all copied records, and an errno that concerns the whole file. Faults:
    0 none, 1 miss, 2 corrupt, 3 source changed, 4 error, 5 timeout, 6 cancelled, 7 no room.
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
    ) -> None:
        """
        ``parts``: (offset, bytes) of each plane in a record, in order. The caller closes the
        descriptors.
        """

    def scan(self, first: int, last: int, repair: bool = False) -> tuple[int, int, int]:
        """
        Read the headers of slots [first, last); return the numbers of ready and corrupt ones, and
        an errno or 0. ``repair``: empty the corrupt ones in the file.
        """

    def entries(
        self,
    ) -> tuple[
        Annotated[NDArray[numpy.int32], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))],
        Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
    ]:
        """
        Return slots, generations, hashes, parents, checksums and write times (ms since 1970) of
        ready slots.
        """

    def read(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        host_generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        records: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        headers: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        timeout: float,
        verify: bool,
        cancel: CancelFlag | None = None,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
        Annotated[NDArray[numpy.int32], dict(shape=(None,))],
        int,
        int,
    ]:
        """
        Read slots into host records. ``records``, ``headers``: addresses. ``timeout``: seconds.

        Checks every record, unless ``verify`` is false and this object wrote or checked the slot
        before.
        """

    def write(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        host_generations: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        hashes: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        parents: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, 32), order="C", device="cpu", writable=False)
        ],
        records: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        headers: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        timeout: float,
        sync: bool,
        now_ms: int,
        cancel: CancelFlag | None = None,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
        Annotated[NDArray[numpy.int32], dict(shape=(None,))],
        int,
        int,
    ]:
        """
        Write host records into slots. ``sync``: flush to disk before and after the headers change.
        """

    def verify(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
        Annotated[NDArray[numpy.int32], dict(shape=(None,))],
        int,
        int,
    ]:
        """Check the records of ready slots against their headers."""

    def erase(
        self,
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> int:
        """Empty slots; return an errno or 0."""

    def sync(self) -> int:
        """Make all writes so far survive power loss; return an errno or 0."""

    @property
    def unsynced(self) -> bool:
        """True if there are writes since the last ``sync``."""

class SwapMethod(enum.Enum):
    """How the planes of a batch are copied."""

    DIRECT = 0
    """By the copy engine, between records and layers."""

    STAGED = 1
    """
    By the copy engine between records and a staging ring, by a kernel between ring and layers.
    """

    KERNEL = 2
    """By a kernel that accesses host memory in place."""

class SwapChoice(enum.Enum):
    """The method that the settings ask for."""

    AUTO = 0

    DIRECT = 1

    STAGED = 2

    KERNEL = 3

class SwapPolicy:
    """The fastest way to copy on a machine, as measured."""

    def __init__(
        self,
        choice: SwapChoice,
        to_host: Sequence[int],
        to_device: Sequence[int],
        staging_bytes: int,
        kernel_ctas: int,
        transpose_ctas: int,
        direct_pieces: int,
        small_pieces: int,
        batched: bool,
    ) -> None:
        """
        ``to_host``, ``to_device``: the thresholds direct_plane, staged_column and run_copy, in
        bytes.
        """

    @property
    def kernel_ctas(self) -> int: ...
    @property
    def transpose_ctas(self) -> int: ...
    @property
    def batched(self) -> bool: ...

def find_runs(
    host_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    records_per_extent: int,
) -> list[tuple[int, int]]:
    """
    Return (first index, count) of the maximal runs of adjacent slots within one extent.
    """

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
    unhurried: bool,
) -> SwapMethod:
    """Choose the method for a plane range of a batch of ``rows`` blocks."""

def plan_steps(
    policy: SwapPolicy,
    to_host: bool,
    planes: PlaneTable,
    records: RecordTable,
    device_slots: Annotated[
        NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ],
    host_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    first_plane: int,
    last_plane: int,
    slot_bytes: int,
    contended: bool,
    unhurried: bool,
) -> list[tuple[Any, ...]]:
    """
    Plan a plane range of a batch: tuples that start with the name of a step
    (csrc/cuda/swap_steps.hpp).
    """

def split_range(
    planes: PlaneTable, first_plane: int, last_plane: int, record_bytes: int, limit: int
) -> list[tuple[int, int]]:
    """
    Split a plane range into parts whose columns have at most ``limit`` bytes, or one plane.
    """

def swap_chunks(planes: PlaneTable, record_bytes: int) -> tuple[bytes, list[int]]:
    """
    Return the chunk table of the kernels, as bytes, and the first chunk of each plane and the
    end.
    """

def swap_source() -> str:
    """Return the CUDA source of the copy kernels."""

class CudaError(RuntimeError):
    """A call of the CUDA driver failed."""

class CudaContext:
    """The primary context of one GPU."""

    def __init__(self, ordinal: int) -> None: ...
    @property
    def lost(self) -> str | None:
        """The error that made the GPU unusable, if any."""

    def is_stream_of(self, stream: int) -> bool:
        """Return True if the stream belongs to this context."""

def device_uuid(ordinal: int) -> bytes:
    """Return the 16-byte UUID of a GPU."""

def has_batched_copies() -> bool:
    """Return True if the driver takes many copies in one call."""

class CudaEvent:
    """An event of a GPU that is recorded once."""

    def __init__(self, context: CudaContext, timing: bool = False) -> None: ...
    def record_unless_captured(self, stream: int) -> bool:
        """
        Record the event. Do nothing and return False if the stream is being captured.
        """

    def hold_unless_captured(self, stream: int) -> bool:
        """
        Make the stream wait for the event. Blocks until a promised event is recorded. Do nothing and
        return False if the stream is being captured.
        """

    def record(self, stream: object) -> None:
        """
        Reach the event once the stream has completed everything enqueued so far.
        """

    def query(self) -> bool:
        """Return True once the event is reached, or the GPU has failed."""

    def wait(self, timeout: float | None = None) -> bool:
        """
        Wait up to ``timeout`` seconds, None for ever; return True when the event is reached.
        """

def wait_cuda_events(events: Sequence[CudaEvent], timeout: float | None = None) -> bool:
    """
    Wait until one of the events is reached; return False after ``timeout`` seconds.
    """

class CudaRegistration:
    """Host memory pinned for all GPUs, until the object is deleted."""

    def __init__(self, context: CudaContext, address: int, nbytes: int, owner: object) -> None:
        """``owner`` keeps the memory alive."""

    @property
    def device_address(self) -> int: ...

class CudaExtents:
    """Addresses of the extents of an arena, as a GPU sees them."""

    def __init__(self, addresses: Sequence[int]) -> None: ...

class CudaLane:
    """
    A stream for kernels, one for the copy engine, and the staging ring between them.
    """

    def __init__(
        self, context: CudaContext, main: int, copy: int, staging: int, slot_bytes: int, slots: int
    ) -> None: ...

class CudaSubmitter:
    """
    Enqueues work on one stream in order: small batches on the calling thread, others on a
    thread of its own.
    """

    def __init__(self, context: CudaContext, main: int, background: bool) -> None: ...
    def record(self, event: CudaEvent) -> None: ...
    def wait(self, event: CudaEvent) -> None:
        """
        Make later work wait for the event. If the driver refuses, the next batch fails.
        """

    def enqueue(
        self,
        batch: CudaSwap,
        owner: object,
        lane: CudaLane,
        ranges: Sequence[tuple[int, int]],
        after: Sequence[CudaEvent],
    ) -> list[CudaEvent]:
        """
        Enqueue plane ranges of a batch after these events; return the event of each. ``owner`` is kept
        until the batch has ended.
        """

    def refuse(self, batch: CudaSwap, owner: object, reason: str) -> None:
        """End a batch that cannot be copied."""

    def retire(self) -> None:
        """Release the owners of batches that have ended."""

    def ends(self) -> list[CudaEvent]:
        """Return the ends of the batches whose owners are kept."""

    def close(self) -> None:
        """
        Run the queued work, end the thread and release all owners; later work runs on the calling
        thread.
        """

class CudaPlanes:
    """Planes of a device cache, and the table of their chunks on the GPU."""

    def __init__(
        self, table: PlaneTable, chunks: int, first_chunk: Sequence[int], num_blocks: int, owner: object
    ) -> None:
        """
        ``chunks``, ``first_chunk``: of ``swap_chunks``. ``owner`` keeps the memory of both alive.
        """

class CudaCopier:
    """Prepares the batches of one GPU."""

    def __init__(
        self, context: CudaContext, kernels: Sequence[int], policy: SwapPolicy, owner: object
    ) -> None:
        """
        ``kernels``: copy_in, copy_out, sum, copy_words, read_peer, which ``owner`` keeps loaded.
        """

    def prepare(
        self,
        swap: object,
        to_host: bool,
        planes: CudaPlanes,
        records: RecordTable,
        extents: CudaExtents,
        fingerprint: bytes,
        verify: bool,
    ) -> CudaSwap | None:
        """
        Prepare the copies of a transfer; return None unless it is sound (``is_sound_transfer``).
        ``verify``: loads fail unless their bytes have the record's checksum.
        """

class CudaSwap:
    """A batch of block copies on a GPU."""

    @property
    def table_bytes(self) -> int:
        """Size of the block table."""

    def set_table(self, host: int, device: int) -> None:
        """
        Set the addresses of the block table in pinned host memory and on the GPU.
        """

    @property
    def started(self) -> bool: ...
    @property
    def is_certain(self) -> bool: ...
    @property
    def done(self) -> CudaEvent: ...
    def finish(self) -> tuple[bytes, bytes, int, float, str]:
        """
        End a batch whose ``done`` is reached: mark complete records ready, and return

        - a byte per block: 0 if it was copied, else the reason (BlockFault in csrc/copy/record.hpp); empty if all
          were copied,
        - a 64-bit checksum per block of a copy to the host; empty for loads,
        - the bytes and seconds of the copies, and the device's error.
        """

class LaunchedPlan:
    """A plan in flight on a GPU, and the events of its layers."""

    @property
    def plan_id(self) -> int: ...
    def pending_event(self) -> CudaEvent:
        """
        Return an event that comes before the end of the plan, or None if it has ended.
        """

    def pending_read(self) -> CudaEvent:
        """
        Return the event after which the plan reads the device no more, or None if it does not now.
        """

    @property
    def is_certain(self) -> bool:
        """True once the load can only fail with the device."""

    def wait(self, timeout: float | None) -> bool:
        """
        Wait up to ``timeout`` seconds, None without limit; return True if the plan has ended.
        """

    def cancel(self) -> bool:
        """Return False: work that is enqueued on a GPU cannot be cancelled."""

    def status(self) -> Any:
        """Return the status of the plan."""

    def result(self) -> Any:
        """Return the report of a plan that has ended."""

    def known(self) -> list[Any]:
        """Return the event of each layer."""

    def required(self) -> list[Any]:
        """Return the event of each layer."""

class PlanLauncher:
    """
    Submits plans of loads and backups between the planes of a GPU and an arena.
    """

    def __init__(
        self,
        *,
        copier: object,
        planes: object,
        records: object,
        extents: object,
        fingerprint: bytes,
        verify: bool,
        loads: object,
        backups: object,
        window: object,
        ranges_of: object,
        as_stream: object,
        stream_type: object,
        take_table: object,
        record_types: object,
        purposes: object,
        arena: object | None,
        name: str,
        rank: int,
        num_layers: int,
    ) -> None: ...
    def submit(self, plan: object, stream: object | None, in_flight: dict[int, Any]) -> Any:
        """
        Enqueue the copies of a plan after the work that the stream has now, and add it to ``in_flight``.

        Return None for a plan that needs another way of submitting, or has a mistake, and the driver's error
        as a text; nothing is enqueued then.
        """

    def retire(self) -> None:
        """Release the memory of copies that have ended."""

def take_ended(executions: dict[int, Any]) -> list[Any]:
    """
    Remove the plans that have ended from a dictionary by id, and return their reports in its order.
    """

class CudaPeerMemory:
    """An allocation of another process, mapped until the object is deleted."""

    def __init__(self, context: CudaContext, handle: bytes) -> None:
        """``handle``: of ``export_memory`` in the other process."""

    @property
    def address(self) -> int: ...

def export_memory(context: CudaContext, address: int) -> tuple[bytes, int, int]:
    """
    Return the handle, the address and the bytes of the allocation around an address. Raises CudaError for
    memory that has no handle.
    """

def enable_peer_access(context: CudaContext, other: CudaContext) -> None:
    """Give kernels access to the memory of another GPU of this process."""

class CudaPlaneWork:
    """A kernel over the planes of blocks."""

    @property
    def done(self) -> CudaEvent:
        """Event of its end, reached even if the driver refused the kernel."""

    @property
    def error(self) -> str:
        """Reason of the driver's refusal, empty without one."""

    @property
    def seconds(self) -> float:
        """Seconds on the GPU, once ``done`` is reached."""

def read_planes(
    copier: CudaCopier,
    stream: int,
    source: CudaPlanes,
    places: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    target: CudaPlanes,
    slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    first_plane: int,
    last_plane: int,
    host: int,
    table: int,
    table_bytes: int,
    thread_blocks: int,
    threads: int,
    after: Sequence[CudaEvent],
) -> CudaPlaneWork:
    """
    Read planes [first_plane, last_plane) of blocks ``places`` of other planes into ``slots`` with one kernel,
    after these events. ``host``, ``table``: a block table in pinned memory and on the GPU, in use until the end.
    Raises IndexError for a block that does not exist.
    """

def sum_device_planes(
    copier: CudaCopier,
    stream: int,
    planes: CudaPlanes,
    slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    first_plane: int,
    last_plane: int,
    host: int,
    table: int,
    table_bytes: int,
) -> CudaPlaneWork:
    """
    Sum planes [first_plane, last_plane) of blocks as ``sum_planes`` does; ``read_sums`` returns the
    sums once it has ended.
    """

def read_sums(host: int, count: int) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """Return the sums in a block table."""

class PatternModel:
    """
    A stand-in for a model: computing a token writes bytes derived from its whole prefix.
    """

    def __init__(
        self,
        planes: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None, None), device="cpu")]],
        layers: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        num_layers: int,
        block_size: int,
        rank: int,
    ) -> None:
        """
        ``planes[i]``, of shape (device blocks, bytes of a block) with contiguous rows, belongs to
        layer ``layers[i]``.
        """

    def begin(
        self,
        sequence: int,
        tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Set the tokens of a sequence, replacing earlier ones."""

    def end(self, sequence: int) -> None:
        """Forget a sequence."""

    def prepare(
        self,
        segments: Annotated[
            NDArray[numpy.int32], dict(shape=(6, None), order="C", device="cpu", writable=False)
        ],
        blocks: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        every: int,
    ) -> int:
        """
        Prepare a step; return how many blocks it will compare.

        ``segments`` has the rows sequence, start, end, keep, grow, verify: the step computes
        tokens [start, end) of the sequence. Its block table keeps ``keep`` entries and grows by
        the next ``grow`` of ``blocks``. Of its ``verify`` leading blocks, every ``every``-th and
        the last are compared before anything is written; none if ``every`` is 0. -1 stands for
        a block that is given up, and is neither compared nor written. Raises ValueError, and
        changes nothing, for values out of range.
        """

    def run_layer(self, layer: int) -> list[tuple[int, int]]:
        """
        Compare, then write, one layer; layers come in order.

        Returns (segment, block of the sequence) of each block that differs. Such a sequence
        computes garbage until a later comparison of its prefix succeeds.
        """

def set_leak_warnings(on: bool) -> None:
    """
    Report on stderr the native objects that are left at exit, or not. Off in release builds.
    """
