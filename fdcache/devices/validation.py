"""What every device checks before it copies a block."""

from __future__ import annotations

import numpy as np

from fdcache import _core
from fdcache.devices.base import BlockPairs, Direction
from fdcache.errors import PlanError
from fdcache.metadata import Int32Array


def check_pairs(pairs: BlockPairs, direction: Direction, *, device_blocks: int, host_blocks: int) -> None:
    """Raise ``PlanError`` naming the pair for unequal lengths, a slot out of range or written twice."""
    count = len(pairs)
    _check_lengths(pairs, count)
    to_host = direction is Direction.TO_HOST
    device_sound = _core.are_sound_slots(pairs.device_slots, device_blocks, distinct=not to_host)
    host_sound = _core.are_sound_slots(pairs.host_slots, host_blocks, distinct=to_host)
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


def _check_lengths(pairs: BlockPairs, count: int) -> None:
    shapes = {
        "device slots": (pairs.device_slots.shape, (count,)),
        "host slots": (pairs.host_slots.shape, (count,)),
        "host generations": (pairs.generations.shape, (count,)),
        "hash values": (pairs.hashes.shape, (count, 32)),
        "parent hashes": (pairs.parents.shape, (count, 32)),
    }
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            raise PlanError(f"{name} have shape {shape}, but {count} pairs need {expected}")


def _check_range(kind: str, slots: Int32Array, limit: int) -> None:
    outside = np.flatnonzero((slots < 0) | (slots >= limit))
    if len(outside):
        raise PlanError(
            f"pair {outside[0]}: {kind} slot {slots[outside[0]]} is not one of the {limit} {kind} blocks"
        )
