"""Why a block was not copied, on whatever device."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from fdcache.metadata import CacheSwapMetadata, TransferResult


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
