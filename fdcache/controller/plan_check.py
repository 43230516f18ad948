"""What every plan must fulfil before any of it is put on a stream."""

from __future__ import annotations

import numpy as np

from fdcache import _core
from fdcache.devices.base import Direction
from fdcache.devices.validation import check_array
from fdcache.errors import PlanError
from fdcache.metadata import CacheLevel, CacheSwapMetadata, Int32Array, SwapPurpose, TransferPlan

DIRECTIONS = {
    SwapPurpose.EVICT: Direction.TO_HOST,
    SwapPurpose.LOAD: Direction.TO_DEVICE,
    SwapPurpose.BACKUP: Direction.TO_HOST,
}
"""Which way each purpose copies."""

_LEVELS = {
    Direction.TO_HOST: (CacheLevel.DEVICE, CacheLevel.HOST),
    Direction.TO_DEVICE: (CacheLevel.HOST, CacheLevel.DEVICE),
}


def check_plan(plan: TransferPlan) -> None:
    """Raise ``PlanError`` for transfers that do not suit their place or each other."""
    fields = (
        (plan.evictions, SwapPurpose.EVICT),
        (plan.loads, SwapPurpose.LOAD),
        (plan.backups, SwapPurpose.BACKUP),
    )
    for swap, purpose in fields:
        if swap is None:
            continue
        _check_arrays(swap)
        levels = _LEVELS[DIRECTIONS[purpose]]
        if swap.purpose is not purpose or (swap.src_type, swap.dst_type) != levels:
            raise PlanError(
                f"{purpose.value}: the transfer is a {swap.purpose.value} from {swap.src_type.value} to "
                f"{swap.dst_type.value}, not one from {levels[0].value} to {levels[1].value}"
            )
    if plan.backups is None:
        return
    if plan.evictions is not None:
        _check_disjoint("host slot", plan.backups.dst_block_ids, plan.evictions.dst_block_ids, "evicted into")
        _check_disjoint("device slot", plan.backups.src_block_ids, plan.evictions.src_block_ids, "emptied")
    if plan.loads is not None:
        _check_disjoint("device slot", plan.backups.src_block_ids, plan.loads.dst_block_ids, "loaded")


def _check_arrays(swap: CacheSwapMetadata) -> None:
    count, purpose = len(swap), swap.purpose.value
    check_array(f"{purpose}: src_block_ids", swap.src_block_ids, np.int32, (count,))
    check_array(f"{purpose}: dst_block_ids", swap.dst_block_ids, np.int32, (count,))
    check_array(f"{purpose}: src_generations", swap.src_generations, np.uint32, (count,))
    check_array(f"{purpose}: dst_generations", swap.dst_generations, np.uint32, (count,))
    check_array(f"{purpose}: hash_values", swap.hash_values, np.uint8, (count, 32))
    check_array(f"{purpose}: parent_hashes", swap.parent_hashes, np.uint8, (count, 32))
    if swap.unverified is not None:
        check_array(f"{purpose}: unverified", swap.unverified, np.uint8, (count,))


def _check_disjoint(kind: str, backups: Int32Array, others: Int32Array, what: str) -> None:
    if _core.are_disjoint_slots(backups, others):
        return
    position = int(np.flatnonzero(np.isin(backups, others))[0])
    raise PlanError(f"backup: pair {position}: {kind} {backups[position]} is {what} by the same plan")
