"""What every device checks before it copies a block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fdcache import _core
from fdcache.errors import PlanError
from fdcache.metadata import CacheSwapMetadata, Int32Array


def check_swap(swap: CacheSwapMetadata, *, device_blocks: int, host_blocks: int) -> None:
    """Raise ``PlanError`` for arrays of other types or lengths, naming the pair for a slot out of range or written
    twice.
    """
    check_arrays(swap)
    device_slots, host_slots = swap.device_slots, swap.host_slots
    device_sound = _core.are_valid_slots(device_slots, device_blocks, distinct=not swap.to_host)
    host_sound = _core.are_valid_slots(host_slots, host_blocks, distinct=swap.to_host)
    if device_sound and host_sound:
        return
    _check_range(swap, "device", device_slots, device_blocks)
    _check_range(swap, "host", host_slots, host_blocks)
    if (repeated := first_repeated(swap.dst_block_ids)) is not None:
        first, second = repeated
        raise PlanError(
            f"{swap.purpose.value}: pairs {first} and {second}: both are copied {swap.src_type.value} to "
            f"{swap.dst_type.value} into slot {swap.dst_block_ids[first]}"
        )


def first_repeated(slots: Int32Array) -> tuple[int, int] | None:
    """The positions of a slot that occurs twice, or None."""
    order = np.argsort(slots, kind="stable")
    equal = np.flatnonzero(np.diff(slots[order]) == 0)
    if not len(equal):
        return None
    return int(order[equal[0]]), int(order[equal[0] + 1])


def check_array(name: str, array: Any, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """Raise ``PlanError`` unless it is a NumPy array of that type and shape: another type would be cut to size."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise PlanError(f"{name} must be an array of {np.dtype(dtype)}, got {found}")
    if array.shape != shape:
        raise PlanError(f"{name} has shape {array.shape}, but {shape[0]} blocks need {shape}")


def check_arrays(swap: CacheSwapMetadata) -> None:
    """Raise ``PlanError`` naming the array of a transfer that has another type or length."""
    count, purpose = len(swap), swap.purpose.value
    check_array(f"{purpose}: src_block_ids", swap.src_block_ids, np.int32, (count,))
    check_array(f"{purpose}: dst_block_ids", swap.dst_block_ids, np.int32, (count,))
    check_array(f"{purpose}: src_generations", swap.src_generations, np.uint32, (count,))
    check_array(f"{purpose}: dst_generations", swap.dst_generations, np.uint32, (count,))
    check_array(f"{purpose}: hash_values", swap.hash_values, np.uint8, (count, 32))
    check_array(f"{purpose}: parent_hashes", swap.parent_hashes, np.uint8, (count, 32))
    if swap.unverified is not None:
        check_array(f"{purpose}: unverified", swap.unverified, np.uint8, (count,))


def _check_range(swap: CacheSwapMetadata, kind: str, slots: Int32Array, limit: int) -> None:
    outside = np.flatnonzero((slots < 0) | (slots >= limit))
    if len(outside):
        raise PlanError(
            f"{swap.purpose.value}: pair {outside[0]}: {kind} slot {slots[outside[0]]} is not one of the "
            f"{limit} {kind} blocks"
        )
