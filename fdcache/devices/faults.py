"""Why a block was not copied, on whatever device."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from fdcache.devices.base import BlockPairs, CopyOutcome
from fdcache.metadata import Int32Array, UInt64Array


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
    sums: UInt64Array = np.frombuffer(checksums, dtype=np.uint64)
    if faults.count(Fault.NONE) == len(faults):
        return CopyOutcome(np.empty(0, np.int32), sums, copied_bytes, seconds, None)
    codes = np.frombuffer(faults, dtype=np.uint8)
    failed = np.flatnonzero(codes).astype(np.int32)
    reasons = tuple(
        _TEXT[Fault(codes[each])].format(slot=pairs.host_slots[each], detail=detail) for each in failed
    )
    corrupt = np.flatnonzero(np.isin(codes, _BAD_RECORD)).astype(np.int32)
    message = _message(failed, len(codes), reasons)
    return CopyOutcome(failed, sums, copied_bytes, seconds, message, corrupt=corrupt, reasons=reasons)


def part_of_outcome(
    whole: CopyOutcome, start: int, stop: int, *, count: int, block_bytes: int
) -> CopyOutcome:
    """What came of positions ``start`` to ``stop``, counted from 0, of a load of ``count`` equal blocks.

    ``seconds`` is their share, so that parts add up to the whole.
    """
    inside = (whole.failed >= start) & (whole.failed < stop)
    failed = (whole.failed[inside] - start).astype(np.int32)
    reasons = tuple(whole.reasons[each] for each in np.flatnonzero(inside)) if whole.reasons else ()
    corrupt = whole.corrupt[(whole.corrupt >= start) & (whole.corrupt < stop)] - start
    return CopyOutcome(
        failed=failed,
        checksums=np.empty(0, np.uint64),
        copied_bytes=(stop - start - len(failed)) * block_bytes,
        seconds=whole.seconds * (stop - start) / count,
        error_message=_message(failed, stop - start, reasons)
        or (whole.error_message if len(failed) else None),
        corrupt=corrupt.astype(np.int32),
        reasons=reasons,
    )


def _message(failed: Int32Array, count: int, reasons: Sequence[str]) -> str | None:
    if not reasons:
        return None
    return f"{len(failed)} of {count} blocks failed; position {failed[0]}: {reasons[0]}"
