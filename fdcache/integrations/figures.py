"""The figures of a manager that engines tell in metrics of their own, by name, with what they mean."""

from __future__ import annotations

import msgspec

from fdcache.tiers.statistics import CacheStats, Direction

INTERVAL = 1.0
"""Seconds between two looks at them: a step pays for none."""

COUNTERS = {
    "host_hit_tokens": "Tokens that were loaded from host memory.",
    "storage_hit_tokens": "Tokens that were loaded from storage.",
    "matches_ended_by_all": "Prompts of which the layers that attend to all tokens had no more.",
    "matches_ended_by_last": "Prompts of which the layers with a sliding window had no more.",
    "matches_ended_by_chunk": "Prompts of which the layers with chunked attention had no more.",
    "matches_ended_by_state": "Prompts of which the layers with states had none further on.",
    "loads_confirmed": "Loads of requests that every rank completed.",
    "loads_failed": "Loads of requests that failed; their tokens were computed.",
    "loads_overdue": "Loads of requests that missed their deadline.",
    "loads_cut_short": "Loads whose last blocks did not come from storage in time, or whose request ended before.",
    "blocks_loaded": "Blocks copied from host memory to the device.",
    "blocks_backed_up": "Blocks copied from the device to host memory.",
    "blocks_evicted_to_host": "Blocks copied to host memory before the engine gave them away.",
    "blocks_stored": "Blocks written to storage.",
    "blocks_prefetched": "Blocks read from storage.",
    "blocks_sent": "Blocks handed over to decode engines.",
    "blocks_fetched": "Blocks fetched from prefill engines.",
    "blocks_corrupt_from_peer": "Blocks whose bytes differed from those of the prefill engine; never used.",
    "fetches_skipped": "Hand-overs that were computed, as reads that nobody waited for held blocks.",
    "backups_dropped": "Blocks that found no room in host memory.",
    "copies_failed": "Copies of blocks that failed.",
    "blocks_corrupt_in_host": "Blocks whose bytes in host memory were wrong; never used.",
    "blocks_corrupt_in_storage": "Blocks whose bytes in storage were wrong; never used.",
}
BYTES = {
    Direction.HOST_TO_DEVICE: ("bytes_loaded", "Bytes copied from host memory to the device."),
    Direction.DEVICE_TO_HOST: ("bytes_saved", "Bytes copied from the device to host memory."),
}
GAUGES = {
    "host_blocks": "Blocks of the host tier.",
    "host_blocks_ready": "Blocks of the host tier that can be found.",
    "plans_in_flight": "Plans that some rank has not reported.",
}


def totals(stats: CacheStats) -> dict[str, int]:
    """Return the counters of a manager, by name."""
    counters = msgspec.structs.asdict(stats.counters)
    copied = stats.traffic.copied
    sizes = {name: copied[way].bytes for way, (name, _) in BYTES.items() if way in copied}
    return {name: counters[name] for name in COUNTERS} | sizes


def gauges(stats: CacheStats) -> dict[str, int]:
    """Return what a manager has now, by name."""
    host = stats.host
    return {
        "host_blocks": host.blocks if host is not None else 0,
        "host_blocks_ready": host.ready if host is not None else 0,
        "plans_in_flight": stats.plans_in_flight,
    }
