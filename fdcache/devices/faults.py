"""Why a block was not copied, on whatever device."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from fdcache.devices.base import BlockPairs, CopyOutcome
from fdcache.metadata import UInt64Array


class Fault(IntEnum):
    """The values are those of the core."""

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
"""What is wrong with the host record itself: the next load of it would fail as well."""

_TEXT = {
    Fault.NO_HEADER: "host slot {slot} has no valid header",
    Fault.NOT_READY: "host slot {slot} is not ready",
    Fault.OTHER_GENERATION: "host slot {slot} was given to new content",
    Fault.OTHER_HASH: "host slot {slot} holds another block",
    Fault.OTHER_LAYOUT: "host slot {slot} holds a record of another layout",
    Fault.CHANGED: "host slot {slot} changed during the copy",
    Fault.CANCELLED: "cancelled",
    Fault.ABANDONED: "abandoned, its stream was closed",
    Fault.DEVICE: "the device failed: {detail}",
    Fault.CORRUPT: "what arrived from host slot {slot} does not have the record's checksum",
}


def make_outcome(
    pairs: BlockPairs,
    faults: bytes,
    checksums: bytes,
    *,
    copied_bytes: int,
    seconds: float,
    detail: str = "",
) -> CopyOutcome:
    """The outcome of a batch from the core's faults, one byte per pair, and checksums, eight bytes each."""
    codes = np.frombuffer(faults, dtype=np.uint8)
    failed = np.flatnonzero(codes).astype(np.int32)
    sums: UInt64Array = np.frombuffer(checksums, dtype=np.uint64)
    message = None
    if len(failed):
        first = int(failed[0])
        reason = _TEXT[Fault(codes[first])].format(slot=pairs.host_slots[first], detail=detail)
        message = f"{len(failed)} of {len(codes)} blocks failed; position {first}: {reason}"
    corrupt = np.flatnonzero(np.isin(codes, _BAD_RECORD)).astype(np.int32)
    return CopyOutcome(failed, sums, copied_bytes, seconds, message, corrupt=corrupt)
