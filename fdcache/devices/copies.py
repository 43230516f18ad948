"""Checks of a block copy before it starts, and its outcome, the same on every device."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fdcache import _core
from fdcache.errors import PlanError
from fdcache.metadata import CacheSwapMetadata, Int32Array, TransferResult


def check_swap(swap: CacheSwapMetadata, *, device_blocks: int, host_blocks: int) -> None:
    """Raise ``PlanError`` for arrays of wrong type or shape, and for a slot out of range or written twice.

    The error names the pair.
    """
    check_arrays(swap)
    device_slots, host_slots = swap.device_slots, swap.host_slots
    device_sound = _core.are_valid_slots(device_slots, device_blocks, distinct=not swap.to_host)
    host_sound = _core.are_valid_slots(host_slots, host_blocks, distinct=swap.to_host)
    if device_sound and host_sound:
        return
    _check_range(swap, "device", device_slots, device_blocks)
    _check_range(swap, "host", host_slots, host_blocks)
    if (repeated := _first_repeated(swap.dst_block_ids)) is not None:
        first, second = repeated
        raise PlanError(
            f"{swap.purpose.value}: pairs {first} and {second}: both are copied {swap.src_type.value} to "
            f"{swap.dst_type.value} into slot {swap.dst_block_ids[first]}"
        )


def _first_repeated(slots: Int32Array) -> tuple[int, int] | None:
    """Return the positions of a slot that occurs twice, or None."""
    order = np.argsort(slots, kind="stable")
    equal = np.flatnonzero(np.diff(slots[order]) == 0)
    if not len(equal):
        return None
    return int(order[equal[0]]), int(order[equal[0] + 1])


def _check_array(name: str, array: Any, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """Raise ``PlanError`` unless ``array`` is a NumPy array of this type and shape."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise PlanError(f"{name} must be an array of {np.dtype(dtype)}, got {found}")
    if array.shape != shape:
        raise PlanError(f"{name} has shape {array.shape}, but {shape[0]} blocks need {shape}")


def check_arrays(swap: CacheSwapMetadata) -> None:
    """Raise ``PlanError`` naming the array of a transfer that has the wrong type or length."""
    count, purpose = len(swap), swap.purpose.value
    _check_array(f"{purpose}: src_block_ids", swap.src_block_ids, np.int32, (count,))
    _check_array(f"{purpose}: dst_block_ids", swap.dst_block_ids, np.int32, (count,))
    _check_array(f"{purpose}: src_generations", swap.src_generations, np.uint32, (count,))
    _check_array(f"{purpose}: dst_generations", swap.dst_generations, np.uint32, (count,))
    _check_array(f"{purpose}: hash_values", swap.hash_values, np.uint8, (count, 32))
    _check_array(f"{purpose}: parent_hashes", swap.parent_hashes, np.uint8, (count, 32))
    if swap.unverified is not None:
        _check_array(f"{purpose}: unverified", swap.unverified, np.uint8, (count,))


def _check_range(swap: CacheSwapMetadata, kind: str, slots: Int32Array, limit: int) -> None:
    outside = np.flatnonzero((slots < 0) | (slots >= limit))
    if len(outside):
        raise PlanError(
            f"{swap.purpose.value}: pair {outside[0]}: {kind} slot {slots[outside[0]]} is not one of the "
            f"{limit} {kind} blocks"
        )


class Fault(IntEnum):
    """Reason why a block was not copied. The values are those of the native module."""

    NONE = 0
    NO_HEADER = 1
    NOT_READY = 2
    OTHER_GENERATION = 3
    OTHER_HASH = 4
    OTHER_LAYOUT = 5
    CHANGED = 6
    CANCELLED = 7
    ABANDONED = 8
    DEVICE = 9
    CORRUPT = 10


_BAD_RECORD = (
    Fault.NO_HEADER,
    Fault.NOT_READY,
    Fault.OTHER_GENERATION,
    Fault.OTHER_HASH,
    Fault.OTHER_LAYOUT,
    Fault.CHANGED,
    Fault.CORRUPT,
)
"""Faults of the host record itself: a later load of it would fail as well."""

_TEXT = {
    Fault.NO_HEADER: "host slot {slot} has no valid header",
    Fault.NOT_READY: "host slot {slot} is not ready",
    Fault.OTHER_GENERATION: "host slot {slot} was given to new content",
    Fault.OTHER_HASH: "host slot {slot} holds another block",
    Fault.OTHER_LAYOUT: "host slot {slot} holds a record of another layout",
    Fault.CHANGED: "host slot {slot} changed during the copy",
    Fault.CANCELLED: "cancelled",
    Fault.ABANDONED: "abandoned because its stream was closed",
    Fault.DEVICE: "the device failed: {detail}",
    Fault.CORRUPT: "the bytes copied from host slot {slot} differ from the record's checksum",
}

_NO_POSITIONS = np.empty(0, np.int32)


def make_result(
    swap: CacheSwapMetadata,
    part: slice,
    faults: bytes,
    checksums: bytes,
    *,
    copied_bytes: int,
    seconds: float,
    detail: str = "",
) -> TransferResult:
    """Return the result of a part of a batch of equal blocks; positions count from the start of the part.

    ``faults`` has one byte for each pair of the batch, ``checksums`` eight bytes, or none for loads;
    ``copied_bytes`` and ``seconds`` are those of the whole batch.
    """
    codes = faults[part]
    start = part.indices(len(faults))[0]
    num_copied = codes.count(Fault.NONE)
    failed = corrupt = _NO_POSITIONS
    message = None
    if num_copied < len(codes):
        values = np.frombuffer(codes, np.uint8)
        failed = np.flatnonzero(values).astype(np.int32)
        corrupt = np.flatnonzero(np.isin(values, _BAD_RECORD)).astype(np.int32)
        first = failed[0]
        reason = _TEXT[Fault(values[first])].format(slot=swap.host_slots[start + first], detail=detail)
        message = f"{len(failed)} of {len(codes)} blocks failed; position {first}: {reason}"
    if len(codes) < len(faults):
        copied_bytes = copied_bytes * num_copied // max(faults.count(Fault.NONE), 1)
        seconds *= len(codes) / len(faults)
    return TransferResult(
        purpose=swap.purpose,
        failed=failed,
        checksums=np.frombuffer(checksums, np.uint64)[part],
        copied_bytes=copied_bytes,
        seconds=seconds,
        error_message=message,
        corrupt=corrupt,
    )
