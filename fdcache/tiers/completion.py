"""The end of a plan: every rank has spoken."""

from __future__ import annotations

import numpy as np

from fdcache.metadata import CacheSwapMetadata, SwapPurpose
from fdcache.plans.ledger import InFlightPlan, StorageOrder
from fdcache.tiers.host import HostTier, LocalHostTier
from fdcache.tiers.pool import BlockPool
from fdcache.tiers.statistics import Counters
from fdcache.tiers.storage_index import StorageIndex

_NO_CHECKSUMS = np.empty(0, np.uint64)
_WITH_STORAGE = (SwapPurpose.STORE, SwapPurpose.PREFETCH)


def settle(
    flight: InFlightPlan,
    device: BlockPool,
    host: HostTier | None,
    storage: StorageIndex | None,
    counters: Counters,
) -> None:
    """Give back what the plan's copies held, and let what arrived be found.

    Afterwards ``flight.copied`` says of each block whether its tier has it, which after a reset it has not.
    """
    for swap in flight.plan.swaps():
        assert host is not None, "a plan without a host tier copies nothing"
        if swap.purpose in _WITH_STORAGE:
            assert storage is not None and isinstance(host, LocalHostTier)
            settle_storage(flight, host, storage, counters)
            continue
        copied = _note(flight, swap, counters)
        checksums = flight.checksums.get(swap.purpose, _NO_CHECKSUMS)
        if swap.purpose is SwapPurpose.LOAD:
            _drop_bad_records(flight, swap, host, counters)
            arrived = device.complete(swap.dst_block_ids, copied.view(np.uint8), checksums).view(np.bool_)
            host.end_load(swap.src_block_ids, swap.hash_values, copied.view(np.uint8))
        else:
            arrived = host.complete(swap.dst_block_ids, copied.view(np.uint8), checksums).view(np.bool_)
            device.unhold(swap.src_block_ids)
        flight.copied[swap.purpose] = arrived


def settle_storage(flight: InFlightPlan, host: BlockPool, storage: StorageIndex, counters: Counters) -> None:
    """As ``settle``, for a transfer between host and storage."""
    (swap,) = flight.plan.swaps()
    copied = _note(flight, swap, counters)
    checksums = flight.checksums.get(swap.purpose, _NO_CHECKSUMS)
    if swap.purpose is SwapPurpose.STORE:
        bad, no_room = flight.bad_slots[swap.purpose], flight.no_room[swap.purpose]
        counters.bad_storage_slots += int(bad.sum())
        arrived = storage.end_writes(swap, copied, checksums, bad, no_room)
        _drop_bad_records(flight, swap, host, counters)
        host.unhold(swap.src_block_ids)
    else:
        lost, corrupt = flight.lost[swap.purpose], flight.corrupt[swap.purpose]
        bad = flight.bad_slots[swap.purpose]
        counters.blocks_corrupt_in_storage += int(corrupt.sum())
        counters.bad_storage_slots += int(bad.sum())
        arrived = host.complete(swap.dst_block_ids, copied.view(np.uint8), checksums).view(np.bool_)
        storage.end_reads(swap, lost, corrupt | bad)
    flight.copied[swap.purpose] = arrived


def _note(flight: InFlightPlan, swap: CacheSwapMetadata, counters: Counters) -> np.ndarray:
    """Say in the transfer what came of it, and count; returns which blocks every rank copied."""
    copied = flight.copied[swap.purpose]
    swap.success = bool(copied.all())
    swap.error_message = None if swap.success else "; ".join(flight.errors)
    _count(counters, swap.purpose, int(copied.sum()), len(swap))
    return copied


def _drop_bad_records(
    flight: InFlightPlan, swap: CacheSwapMetadata, host: HostTier | BlockPool, counters: Counters
) -> None:
    """Host records that a copy out of them found wrong, while it holds them still: nobody is to read them again."""
    bad = swap.src_block_ids[flight.corrupt[swap.purpose]]
    if len(bad):
        host.discard(bad)
        counters.blocks_corrupt_in_host += len(bad)


def withdraw(order: StorageOrder, host: BlockPool, storage: StorageIndex) -> None:
    """Give back what a transfer holds that no rank has heard of."""
    swap = order.build(0).swap
    nothing = np.zeros(len(swap), np.bool_)
    if swap.purpose is SwapPurpose.STORE:
        storage.end_writes(swap, nothing, _NO_CHECKSUMS, nothing, nothing)
        host.unhold(swap.src_block_ids)
    else:
        host.complete(swap.dst_block_ids, nothing.view(np.uint8), _NO_CHECKSUMS)
        storage.end_reads(swap, nothing, nothing)
    order.failed = True


_COUNTERS = {
    SwapPurpose.LOAD: "blocks_loaded",
    SwapPurpose.EVICT: "blocks_evicted_to_host",
    SwapPurpose.BACKUP: "blocks_backed_up",
    SwapPurpose.STORE: "blocks_stored",
    SwapPurpose.PREFETCH: "blocks_prefetched",
}


def _count(counters: Counters, purpose: SwapPurpose, copied: int, planned: int) -> None:
    counters.copies_failed += planned - copied
    name = _COUNTERS[purpose]
    setattr(counters, name, getattr(counters, name) + copied)
