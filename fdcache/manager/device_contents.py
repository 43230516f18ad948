"""Device blocks as arguments of an ``OffloadManager``."""

from __future__ import annotations

import numpy as np

from fdcache import _core
from fdcache.errors import PlanError
from fdcache.metadata import Int32Array

NO_BLOCK = -1
"""Stands for a block that the engine does not have on the device, in a layout with windows."""


def device_ids_of(values: object, *, with_none: bool = False) -> Int32Array:
    """Return device blocks as an int32 array; ``with_none``: ``NO_BLOCK`` may be among them.

    Raises ``PlanError`` for anything else.
    """
    least = NO_BLOCK if with_none else 0
    if isinstance(values, np.ndarray) and _core.are_block_ids(values, least):
        return values
    try:
        given = np.asarray(values)
        ids = np.ascontiguousarray(given, np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(
            f"device_ids: {error}; pass the numbers of device blocks as an int32 array"
        ) from error
    are_integers = given.dtype.kind in "iu" or not given.size
    if not (are_integers and np.array_equal(ids, given) and _core.are_block_ids(ids, least)):
        raise PlanError(f"device_ids must be a list of device blocks, int32 numbers from {least} on")
    return ids


def table_of(values: object) -> Int32Array:
    """Return a block table as an array, of which only the part that is used is looked at. Raises ``PlanError``."""
    return values if isinstance(values, np.ndarray) else device_ids_of(values, with_none=True)


def require_distinct(ids: Int32Array) -> None:
    """Raise ``PlanError`` if a device block is listed twice."""
    if not _core.are_block_ids(ids, NO_BLOCK, distinct=True):
        raise PlanError("device_ids: each device block can take one block; one is listed twice")
