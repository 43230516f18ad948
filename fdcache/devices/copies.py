"""Checks of a block copy before it starts, and its outcome, the same on every device."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from fdcache import _core
from fdcache.errors import PlanError
from fdcache.metadata import CacheSwapMetadata, Int32Array, TransferResult


def check_swap(swap: CacheSwapMetadata, *, device_blocks: int, host_blocks: int) -> None:
    """Raise ``PlanError`` for arrays of wrong type or shape, and for a slot out of range or written twice.

    The error names the pair.
    """
    if not _core.is_sound_transfer(swap, swap.to_host, device_blocks, host_blocks):
        refuse_swap(swap, device_blocks=device_blocks, host_blocks=host_blocks)


def refuse_swap(swap: CacheSwapMetadata, *, device_blocks: int, host_blocks: int) -> NoReturn:
    """Raise the ``PlanError`` of a transfer that the native module found unsound."""
    check_arrays(swap)
    _check_range(swap, "device", swap.device_slots, device_blocks)
    _check_range(swap, "host", swap.host_slots, host_blocks)
    repeated = _first_repeated(swap.dst_block_ids)
    if repeated is None:
        raise PlanError(f"{swap.purpose.value}: the arrays changed while they were checked")
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
    count, purpose = swap.num_blocks, swap.purpose.value
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

NO_POSITIONS: Int32Array = np.empty(0, np.int32)
NO_POSITIONS.flags.writeable = False
_NO_SUMS = np.empty(0, np.uint64)


Outcome = tuple[bytes, bytes, int, float, str]
"""Of a whole batch: a byte for each pair, none if all were copied; eight bytes of checksum for each, none for loads;
the bytes and seconds of the copies; the device's error."""


def make_result(
    swap: CacheSwapMetadata, outcome: Outcome, start: int = 0, stop: int | None = None
) -> TransferResult:
    """Return the result of positions ``start`` to ``stop`` of a batch of equal blocks; positions count from 0."""
    faults, checksums, copied_bytes, seconds, detail = outcome
    count = len(swap)
    stop = count if stop is None else stop
    failed = corrupt = NO_POSITIONS
    message = None
    codes = faults[start:stop]
    num_copied = codes.count(Fault.NONE) if codes else stop - start
    if num_copied < stop - start:
        values = np.frombuffer(codes, np.uint8)
        failed = np.flatnonzero(values).astype(np.int32)
        corrupt = np.flatnonzero(np.isin(values, _BAD_RECORD)).astype(np.int32)
        first = failed[0]
        reason = _TEXT[Fault(values[first])].format(slot=swap.host_slots[start + first], detail=detail)
        message = f"{len(failed)} of {len(codes)} blocks failed; position {first}: {reason}"
    if stop - start < count:
        all_copied = faults.count(Fault.NONE) if faults else count
        copied_bytes = copied_bytes * num_copied // max(all_copied, 1)
        seconds *= (stop - start) / count
    return TransferResult(
        purpose=swap.purpose,
        failed=failed,
        checksums=np.frombuffer(checksums, np.uint64)[start:stop] if checksums else _NO_SUMS,
        copied_bytes=copied_bytes,
        seconds=seconds,
        error_message=message,
        lost=NO_POSITIONS,
        corrupt=corrupt,
        bad_slots=NO_POSITIONS,
        no_room=NO_POSITIONS,
    )
