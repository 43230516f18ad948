"""The storage tier as plain values, for tools, HTTP and metrics."""

from __future__ import annotations

from typing import Any

from fdcache.metadata import SwapPurpose
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.storage import ServiceStorage
from fdcache.storage.connector import StorageState, StorageStats
from fdcache.tiers.storage_index import LocalIndex

_WORST = (StorageState.OFF, StorageState.READ_ONLY, StorageState.FULL, StorageState.READY)
_SUMS = (
    "blocks",
    "capacity_blocks",
    "bytes",
    "quarantined",
    "withheld",
    "evictions",
    "queued_blocks",
    "reading_blocks",
    "writing_blocks",
)


def storage_figures(storage: ServiceStorage | None) -> dict[str, Any] | None:
    """The tier as a whole and each layout's part of it; None without one."""
    if storage is None:
        return None
    done, total = storage.progress
    layouts = [layout_figures(each) for each in storage.layouts.values()]
    layouts += [
        {"namespace": name, "state": StorageState.OFF.value, "error": error}
        for name, error in storage.errors().items()
    ]
    states = [each["state"] for each in layouts]
    return {
        "connector": storage.settings.connector,
        "state": next((state.value for state in _WORST if state.value in states), StorageState.READY.value),
        "loading": {"active": storage.is_loading, "done": done, "total": total},
        **{name: sum(each.get(name) or 0 for each in layouts) for name in _SUMS},
        "layouts": layouts,
    }


def layout_figures(storage: LayoutStorage) -> dict[str, Any]:
    """One layout: what is stored, what is under way, what was done. ``blocks`` are None where others store too."""
    ranks = [queue.stats for queue in storage.queues]
    tier = storage.index.pool.stats() if isinstance(storage.index, LocalIndex) else None
    states = [rank.state for rank in ranks]
    error = next((rank.error for rank in ranks if rank.error), None)
    cleared = next((queue.clear_error for queue in storage.queues if queue.clear_error), None)
    layout = storage.layout
    return {
        "namespace": storage.id,
        "model": layout.model,
        "revision": layout.revision,
        "ranks": layout.tp_size,
        "state": next(state for state in _WORST if state in states).value,
        "error": error or cleared,
        "blocks": tier.ready if tier else None,
        "capacity_blocks": tier.slots if tier else None,
        "bytes": tier.ready * layout.record_bytes * layout.tp_size if tier else None,
        "quarantined": tier.quarantined if tier else 0,
        "withheld": tier.withheld if tier else 0,
        "evictions": tier.evictions if tier else 0,
        "restored_blocks": storage.restored,
        "queued_blocks": storage.queued,
        "reading_blocks": storage.blocks_in_flight(SwapPurpose.PREFETCH),
        "writing_blocks": storage.blocks_in_flight(SwapPurpose.STORE),
        "erasures_queued": sum(queue.erasures_queued for queue in storage.queues),
        "totals": _totals(storage, ranks),
    }


def _totals(storage: LayoutStorage, ranks: list[StorageStats]) -> dict[str, Any]:
    """Since the service started; seconds and bytes are those of all ranks together."""
    read, written = storage.moved[SwapPurpose.PREFETCH], storage.moved[SwapPurpose.STORE]
    counters = storage.counters
    return {
        "hit_blocks": storage.hit_blocks,
        "read_blocks": counters.blocks_prefetched,
        "stored_blocks": counters.blocks_stored,
        "dropped_blocks": storage.counters.stores_dropped,
        "shared_reads": counters.prefetches_shared,
        "timed_out_reads": counters.prefetches_timed_out,
        "corrupt_blocks": counters.blocks_corrupt_in_storage,
        "resets": storage.resets,
        "read_bytes": read.bytes,
        "read_seconds": read.seconds,
        "written_bytes": written.bytes,
        "written_seconds": written.seconds,
        **{
            name: sum(getattr(rank, name) for rank in ranks)
            for name in ("misses", "errors", "timeouts", "peer_gone", "no_room", "bad_slots")
        },
    }


def stored_keys(storage: LayoutStorage | None, hashes: Any) -> set[bytes]:
    """Which of these blocks are known to be stored; of a store that others use too, those that went through here."""
    if storage is None:
        return set()
    absent = storage.index.is_absent(hashes).tolist()
    return {row.tobytes() for row, gone in zip(hashes, absent, strict=True) if not gone}
