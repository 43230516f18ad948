"""The end of a plan: every rank has spoken."""

from __future__ import annotations

import numpy as np

from fdcache.manager.ledger import InFlightPlan
from fdcache.manager.stats import Counters
from fdcache.metadata import SwapPurpose
from fdcache.tiers import BlockPool, HostTier

_NO_CHECKSUMS = np.empty(0, np.uint64)


def settle(flight: InFlightPlan, device: BlockPool, host: HostTier | None, counters: Counters) -> None:
    """Give back what the plan's copies held, and let what arrived be found.

    Afterwards ``flight.copied`` says of each block whether its tier has it, which after a reset it has not.
    """
    assert host is not None, "a plan without a host tier copies nothing"
    for swap in flight.plan.swaps():
        copied = flight.copied[swap.purpose]
        swap.success = bool(copied.all())
        swap.error_message = None if swap.success else "; ".join(flight.errors)
        loads = swap.purpose is SwapPurpose.LOAD
        if loads:
            arrived = device.complete(swap.dst_block_ids, copied.view(np.uint8), _NO_CHECKSUMS)
            host.end_load(swap.src_block_ids, swap.hash_values, copied.view(np.uint8))
        else:
            checksums = flight.checksums.get(swap.purpose, _NO_CHECKSUMS)
            arrived = host.complete(swap.dst_block_ids, copied.view(np.uint8), checksums)
            device.unhold(swap.src_block_ids)
        flight.copied[swap.purpose] = arrived.view(np.bool_)
        _count(counters, swap.purpose, int(copied.sum()), len(swap))


def _count(counters: Counters, purpose: SwapPurpose, copied: int, planned: int) -> None:
    counters.copies_failed += planned - copied
    if purpose is SwapPurpose.LOAD:
        counters.blocks_loaded += copied
    elif purpose is SwapPurpose.EVICT:
        counters.blocks_evicted_to_host += copied
    else:
        counters.blocks_backed_up += copied
