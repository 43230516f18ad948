"""Plans, reports and the enums in them: plain data between scheduler, workers and service.

    data = encode(plan)                                 # in the scheduler
    controller.submit_swap_tasks(decode_plan(data))     # in a worker

They contain no handle, pointer or lock, can be pickled or packed with msgpack, and mean the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EXTENT_BYTES",
    "NO_BLOCK",
    "SLOT_HEADER_BYTES",
    "BlockCopy",
    "BlockNode",
    "CacheLevel",
    "CacheStatus",
    "CacheSwapMetadata",
    "HashArray",
    "Int32Array",
    "PeerTask",
    "StorageScan",
    "StorageTask",
    "SwapPurpose",
    "TransferPlan",
    "TransferReport",
    "TransferResult",
    "UInt32Array",
    "UInt64Array",
    "decode_plan",
    "decode_report",
    "decode_scan",
    "encode",
]

Int32Array = NDArray[np.int32]
UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]
HashArray = NDArray[np.uint8]
"""Block hashes, shape (blocks, 32)."""

NO_BLOCK = -1
"""Stands for a device block that the engine does not have, or that is not known yet."""

SLOT_HEADER_BYTES = 128
"""Bytes of the header of each record."""

EXTENT_BYTES = 64 << 20
"""Maximum size of an extent of a worker's own arena, unless one record is larger. No record or copy spans two."""


class CacheLevel(StrEnum):
    """A tier."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"
    PEER = "peer"
    """The device of another instance."""


class CacheStatus(StrEnum):
    """Place of one block, or the copy in flight to it."""

    DEVICE = "device"
    HOST = "host"
    SWAP_TO_HOST = "swap_to_host"
    SWAP_TO_DEVICE = "swap_to_device"
    STORAGE = "storage"
    SWAP_TO_STORAGE = "swap_to_storage"
    LOADING_FROM_STORAGE = "loading_from_storage"


class SwapPurpose(StrEnum):
    """Reason for a copy, and the tiers that it joins. Loads go first, backups last."""

    source: CacheLevel
    target: CacheLevel

    def __new__(cls, value: str, source: CacheLevel, target: CacheLevel) -> SwapPurpose:
        """Make the member of this value, which joins these tiers."""
        purpose = str.__new__(cls, value)
        purpose._value_ = value
        purpose.source = source
        purpose.target = target
        return purpose

    LOAD = "load", CacheLevel.HOST, CacheLevel.DEVICE
    EVICT = "evict", CacheLevel.DEVICE, CacheLevel.HOST
    BACKUP = "backup", CacheLevel.DEVICE, CacheLevel.HOST
    STORE = "store", CacheLevel.HOST, CacheLevel.STORAGE
    PREFETCH = "prefetch", CacheLevel.STORAGE, CacheLevel.HOST
    SEND = "send", CacheLevel.DEVICE, CacheLevel.PEER
    FETCH = "fetch", CacheLevel.PEER, CacheLevel.DEVICE


class BlockNode(msgspec.Struct, kw_only=True, frozen=True):
    """Snapshot of one block of one tier. Hashable; ``parent`` is the slot of its parent, None for a first block."""

    block_id: int
    generation: int
    hash_value: bytes
    parent: int | None
    depth: int
    cache_status: CacheStatus
    ref_count: int
    children: int
    hit_count: int
    idle_seconds: float


class ComparesArrays:
    """Equality of records whose fields may be arrays: all fields are equal, element by element."""

    __slots__ = ()
    __struct_fields__: tuple[str, ...]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)

    __hash__ = None  # type: ignore[assignment]


def _same(left: object, right: object) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return not isinstance(left, np.ndarray) and not isinstance(right, np.ndarray) and left == right


class BlockCopy(NamedTuple):
    """One block of a transfer."""

    src_block_id: int
    dst_block_id: int
    src_generation: int
    dst_generation: int
    hash_value: bytes
    parent_hash: bytes


class CacheSwapMetadata(ComparesArrays, msgspec.Struct, eq=False, kw_only=True):
    """One batch of block copies in one direction. Array fields are parallel: element i is one block.

    ::

        print(plan.loads)           # CacheSwapMetadata(load of 2 blocks, host to device: 7 -> 3, 8 -> 4)
        plan.loads[0].hash_value    # of the first block
        plan.loads[:8]              # the transfer of the first eight

    The arrays of a manager's plans are read-only views of native memory.

    ``unverified``, of loads, is 1 for host records not read since a recovery, whose checksum is verified.
    ``success`` and ``error_message`` are set from the workers' results; until then ``mapping`` is empty.
    """

    purpose: SwapPurpose
    src_type: CacheLevel
    dst_type: CacheLevel
    src_block_ids: Int32Array
    dst_block_ids: Int32Array
    src_generations: UInt32Array
    dst_generations: UInt32Array
    hash_values: HashArray
    parent_hashes: HashArray
    unverified: HashArray | None = None
    success: bool = False
    error_message: str | None = None

    def __len__(self) -> int:
        return len(self.src_block_ids)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, also of a transfer some of whose fields are no arrays."""
        arrays = [getattr(self, name) for name in _COLUMNS]
        return next((len(each) for each in arrays if isinstance(each, np.ndarray) and each.ndim), 0)

    def __iter__(self) -> Iterator[BlockCopy]:
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> BlockCopy: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> CacheSwapMetadata: ...
    def __getitem__(self, index: int | slice | NDArray[Any]) -> BlockCopy | CacheSwapMetadata:
        if isinstance(index, slice | np.ndarray):
            arrays = {name: getattr(self, name)[index] for name in _COLUMNS}
            marks = None if self.unverified is None else self.unverified[index]
            return msgspec.structs.replace(self, **arrays, unverified=marks)
        return BlockCopy(
            int(self.src_block_ids[index]),
            int(self.dst_block_ids[index]),
            int(self.src_generations[index]),
            int(self.dst_generations[index]),
            self.hash_values[index].tobytes(),
            self.parent_hashes[index].tobytes(),
        )

    def __repr__(self) -> str:
        count = len(self)
        first = slice(_MOST_SHOWN)
        pairs = zip(self.src_block_ids[first], self.dst_block_ids[first], strict=False)
        shown = [f"{source} -> {target}" for source, target in pairs] + ["..."] * (count > _MOST_SHOWN)
        listed = f": {', '.join(shown)}" if shown else ""
        state = "; succeeded" if self.success else f"; {self.error_message}" if self.error_message else ""
        return (
            f"CacheSwapMetadata({self.purpose.value} of {count} block{'s' * (count != 1)}, "
            f"{self.src_type.value} to {self.dst_type.value}{listed}{state})"
        )

    @property
    def to_host(self) -> bool:
        """True if the blocks are copied into host slots."""
        return self.dst_type is CacheLevel.HOST

    @property
    def host_slots(self) -> Int32Array:
        """The host slots: sources of loads and stores, destinations of all others."""
        return self.dst_block_ids if self.to_host else self.src_block_ids

    @property
    def host_generations(self) -> UInt32Array:
        """Generations of ``host_slots``: written by a copy to the host, required by a copy from it."""
        return self.dst_generations if self.to_host else self.src_generations

    @property
    def device_slots(self) -> Int32Array:
        """The device slots of an eviction, a backup or a load."""
        return self.src_block_ids if self.to_host else self.dst_block_ids

    @property
    def mapping(self) -> dict[int, int]:
        """Source slot to destination slot; empty unless the transfer succeeded."""
        if not self.success:
            return {}
        return dict(zip(self.src_block_ids.tolist(), self.dst_block_ids.tolist(), strict=True))


_COLUMNS = (
    "src_block_ids",
    "dst_block_ids",
    "src_generations",
    "dst_generations",
    "hash_values",
    "parent_hashes",
)
_MOST_SHOWN = 4


class SlowTask(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One transfer of a plan that has its own plan id and report, since others need not wait for it."""

    plan_id: int
    swap: CacheSwapMetadata
    timeout: float

    def swaps(self) -> tuple[CacheSwapMetadata, ...]:
        """Return the transfer."""
        return (self.swap,)


class StorageTask(SlowTask, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One transfer between host and storage. ``timeout``: seconds after which a rank starts no further block of it."""


class PeerTask(SlowTask, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One hand-over to or from a peer instance, reported by itself. Positions in the peer are blocks of the transfer.

    Args:
        transfer: name of the hand-over, the same on both instances.
        timeout: of a send, seconds until a peer has to ask; of a fetch, seconds until all blocks are here.
        addresses: of a fetch, the address of each rank of the peer.
        attempt: of a fetch, its number among those of the same transfer.
        computed: of a send, how many leading blocks are computed already.
        wanted: False for a fetch that only tells the peer that nothing is wanted.
        peer_hashes: of a fetch from an instance of another tensor parallelism, its hashes of the blocks, 32 bytes each.
    """

    transfer: str
    addresses: tuple[str, ...] = ()
    attempt: int = 0
    computed: int = 0
    wanted: bool = True
    peer_hashes: bytes = b""


class StorageScan(
    ComparesArrays, msgspec.Struct, eq=False, kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Blocks in one rank's storage when it was opened. Arrays are parallel: element i is one block in one slot."""

    rank: int
    capacity: int
    slots: Int32Array
    generations: UInt32Array
    hashes: HashArray
    parents: HashArray
    checksums: UInt64Array
    written_ms: UInt64Array


class TransferPlan(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Copies of every rank for one scheduler step.

        for plan in manager.take_plans():
            controller.submit_swap_tasks(plan)

    Evictions read device slots that loads and the step itself then write, so a worker orders both after them. Backups
    only read the device and are ordered after the compute that wrote their blocks.

    Args:
        arena: the shared arena that host slots refer to; None for the worker's own.
        storage: transfers between host and storage, each reported when it ends.
        peers: hand-overs to and from other instances, each reported when it ends.
        cancelled: ids of earlier storage transfers and hand-overs that are no longer needed.
        clear_storage: empty the storage before anything else of this plan.
        after: ids of earlier plans whose reads of the device have to end before this plan's loads, and before the
            compute after it. Ids of plans that have ended have no effect.
        is_ahead: the loads are for requests that still wait for blocks from storage, so that no step waits for them.
    """

    plan_id: int
    arena: str | None = None
    evictions: CacheSwapMetadata | None = None
    loads: CacheSwapMetadata | None = None
    backups: CacheSwapMetadata | None = None
    storage: tuple[StorageTask, ...] = ()
    peers: tuple[PeerTask, ...] = ()
    cancelled: tuple[int, ...] = ()
    clear_storage: bool = False
    after: tuple[int, ...] = ()
    is_ahead: bool = False

    def swaps(self) -> tuple[CacheSwapMetadata, ...]:
        """Return the transfers in order of execution: evictions, loads, backups."""
        return tuple([swap for swap in (self.evictions, self.loads, self.backups) if swap is not None])

    def __repr__(self) -> str:
        shown = {"arena": self.arena, "cancelled": self.cancelled, "clear_storage": self.clear_storage}
        shown |= {"after": self.after, "is_ahead": self.is_ahead}
        parts = [str(self.plan_id)]
        parts += [f"{swap.purpose.value} of {len(swap)}" for swap in self.swaps()]
        parts += [f"{task.swap.purpose.value} of {len(task.swap)} as {task.plan_id}" for task in self.storage]
        parts += [f"{task.swap.purpose.value} of {len(task.swap)} as {task.plan_id}" for task in self.peers]
        parts += [f"{name}={value!r}" for name, value in shown.items() if value]
        return f"TransferPlan({', '.join(parts)})"

    @property
    def tasks(self) -> tuple[StorageTask | PeerTask, ...]:
        """Tasks that are reported by themselves."""
        return (*self.storage, *self.peers)

    @property
    def plan_ids(self) -> tuple[int, ...]:
        """Ids that every rank reports: of this plan and of its tasks."""
        return (self.plan_id, *(task.plan_id for task in self.tasks))


_NO_POSITIONS: Int32Array = np.empty(0, np.int32)
_NO_POSITIONS.flags.writeable = False


def _no_positions() -> Int32Array:
    return _NO_POSITIONS


class TransferResult(ComparesArrays, msgspec.Struct, eq=False, kw_only=True, frozen=True):
    """One rank's result of one transfer of a plan. Positions are indices into the transfer's arrays.

    Args:
        failed: positions that were not copied.
        checksums: one record checksum per position for copies to the host; empty for loads.
        copied_bytes: bytes copied.
        seconds: time from the start of the first copy to the end of the last.
        error_message: first reason of a failure.
        lost: failed positions whose source no longer exists.
        corrupt: failed positions with a wrong checksum.
        bad_slots: failed positions whose storage slot cannot be read or written.
        no_room: failed positions for which the disk has no space.
    """

    purpose: SwapPurpose
    failed: Int32Array
    checksums: UInt64Array
    copied_bytes: int
    seconds: float
    error_message: str | None = None
    lost: Int32Array = msgspec.field(default_factory=_no_positions)
    corrupt: Int32Array = msgspec.field(default_factory=_no_positions)
    bad_slots: Int32Array = msgspec.field(default_factory=_no_positions)
    no_room: Int32Array = msgspec.field(default_factory=_no_positions)

    @classmethod
    def failure(cls, swap: CacheSwapMetadata, reason: str | None) -> TransferResult:
        """Return the result of a transfer of which nothing was copied."""
        return cls(
            purpose=swap.purpose,
            failed=np.arange(swap.num_blocks, dtype=np.int32),
            checksums=np.empty(0, np.uint64),
            copied_bytes=0,
            seconds=0.0,
            error_message=reason,
        )

    @property
    def success(self) -> bool:
        """True if every block was copied."""
        return len(self.failed) == 0


class HandoverEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a hand-over ended on one rank: with which ``peer``, empty if none asked, and how many blocks arrived whole.

    ``waited_seconds`` from its submission to the first read of a fetch, or until decode asked for a send.
    """

    peer: str
    result: str
    blocks: int = 0
    waited_seconds: float = 0.0


class TransferReport(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One rank's report of one finished plan, with a result for each of the plan's transfers.

        manager.apply(controller.poll())

    ``refused``: the rank did not get the plan, and reports none of its tasks. ``handover``: of a ``PeerTask``.
    """

    plan_id: int
    rank: int
    results: tuple[TransferResult, ...]
    refused: bool = False
    handover: HandoverEnd | None = None

    @classmethod
    def refusal(cls, plan: TransferPlan, rank: int, reason: str) -> TransferReport:
        """Return the report of a rank that did not get the plan, for its transfers and its storage tasks.

        For a plan that a ``CacheController`` did get, ``CacheController.poll`` returns the report.
        """
        return cls(
            plan_id=plan.plan_id,
            rank=rank,
            results=tuple(TransferResult.failure(swap, reason) for swap in plan.swaps()),
            refused=True,
        )


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_array(_type: type, value: Any) -> Any:
    dtype, shape, data = value
    if dtype not in {"|u1", "<i4", "<u4", "<u8"}:
        raise ValueError(f"array dtype {dtype!r} is not one that plans and reports use")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_plan_decoder = msgspec.msgpack.Decoder(TransferPlan, dec_hook=_decode_array)
_scan_decoder = msgspec.msgpack.Decoder(StorageScan, dec_hook=_decode_array)
_report_decoder = msgspec.msgpack.Decoder(TransferReport, dec_hook=_decode_array)


def encode(record: TransferPlan | TransferReport | StorageScan) -> bytes:
    """Pack a plan, a report or a scan with msgpack."""
    return _encoder.encode(record)


def decode_plan(data: bytes) -> TransferPlan:
    """Unpack a plan. Raises ``msgspec.DecodeError`` for anything else."""
    return _plan_decoder.decode(data)


def decode_report(data: bytes) -> TransferReport:
    """Unpack a report. Raises ``msgspec.DecodeError`` for anything else."""
    return _report_decoder.decode(data)


def decode_scan(data: bytes) -> StorageScan:
    """Unpack a scan. Raises ``msgspec.DecodeError`` for anything else."""
    return _scan_decoder.decode(data)
