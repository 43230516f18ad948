"""What every device checks before it copies a block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fdcache import _core
from fdcache.devices.base import BlockPairs, Direction
from fdcache.errors import PlanError
from fdcache.metadata import Int32Array


def check_pairs(pairs: BlockPairs, direction: Direction, *, device_blocks: int, host_blocks: int) -> None:
    """Raise ``PlanError`` for arrays of other types or lengths, naming the pair for a slot out of range or written
    twice.
    """
    _check_arrays(pairs)
    to_host = direction is Direction.TO_HOST
    device_sound = _core.are_valid_slots(pairs.device_slots, device_blocks, distinct=not to_host)
    host_sound = _core.are_valid_slots(pairs.host_slots, host_blocks, distinct=to_host)
    if device_sound and host_sound:
        return
    _check_range("device", pairs.device_slots, device_blocks)
    _check_range("host", pairs.host_slots, host_blocks)
    written = pairs.host_slots if to_host else pairs.device_slots
    if (repeated := first_repeated(written)) is not None:
        first, second = repeated
        raise PlanError(
            f"pairs {first} and {second}: both are copied {direction.value} into slot {written[first]}"
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


def _check_arrays(pairs: BlockPairs) -> None:
    count = len(pairs)
    check_array("device_slots", pairs.device_slots, np.int32, (count,))
    check_array("host_slots", pairs.host_slots, np.int32, (count,))
    check_array("generations", pairs.generations, np.uint32, (count,))
    check_array("hashes", pairs.hashes, np.uint8, (count, 32))
    check_array("parents", pairs.parents, np.uint8, (count, 32))
    if pairs.verify is not None:
        check_array("verify", pairs.verify, np.uint8, (count,))


def _check_range(kind: str, slots: Int32Array, limit: int) -> None:
    outside = np.flatnonzero((slots < 0) | (slots >= limit))
    if len(outside):
        raise PlanError(
            f"pair {outside[0]}: {kind} slot {slots[outside[0]]} is not one of the {limit} {kind} blocks"
        )
