"""The storage tier's figures in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = {
    "blocks": ("blocks", "Blocks stored."),
    "capacity_blocks": ("capacity_blocks", "Blocks that there is room for."),
    "bytes": ("bytes", "Bytes of the blocks stored, on all ranks."),
    "quarantined": (
        "quarantined_blocks",
        "Places that held a corrupt record, or cannot be read or written, and are not used again.",
    ),
    "withheld": ("withheld_blocks", "Places that the disk has no room for now."),
    "queued_blocks": ("queued_blocks", "Blocks that wait to be written."),
    "reading_blocks": ("reading_blocks", "Blocks on their way to the host tier."),
    "writing_blocks": ("writing_blocks", "Blocks on their way from the host tier."),
    "erasures_queued": ("queued_erasures", "Resets that the files have not followed yet."),
}
_COUNTERS = {
    "read_bytes": ("read_bytes", "Bytes read, on all ranks."),
    "read_seconds": ("read_seconds", "Time spent reading, summed over the ranks."),
    "written_bytes": ("written_bytes", "Bytes written, on all ranks."),
    "written_seconds": ("written_seconds", "Time spent writing, summed over the ranks."),
    "read_blocks": ("read_blocks", "Blocks that came to the host tier."),
    "stored_blocks": ("stored_blocks", "Blocks written."),
    "dropped_blocks": ("dropped_blocks", "Blocks not written for want of room."),
    "corrupt_blocks": ("corrupt_blocks", "Blocks refused for their checksum."),
    "shared_reads": ("shared_reads", "Reads that a second request joined."),
    "timed_out_reads": ("timed_out_reads", "Requests that went on without what was being read for them."),
    "resets": ("resets", "Resets."),
}
_FAILURES = {
    "errors": "error",
    "timeouts": "timeout",
    "peer_gone": "peer_gone",
    "misses": "gone",
    "no_room": "no_room",
    "bad_slots": "bad_slot",
}
_STATES = ("ready", "full", "read_only", "off")


def storage_metrics(storage: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Every metric family of the tier; none without one."""
    if storage is None:
        return
    layouts = storage["layouts"]
    open_layouts = [each for each in layouts if "totals" in each]
    labels = ["namespace"]
    for key, (name, text) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"fdcache_storage_{name}", text, labels=labels)
        for each in open_layouts:
            if each[key] is not None:
                gauge.add_metric([each["namespace"]], each[key])
        yield gauge
    for key, (name, text) in _COUNTERS.items():
        counter = CounterMetricFamily(f"fdcache_storage_{name}", text, labels=labels)
        for each in open_layouts:
            counter.add_metric([each["namespace"]], each["totals"][key])
        yield counter
    evictions = CounterMetricFamily("fdcache_storage_evicted_blocks", "Blocks evicted.", labels=labels)
    failures = CounterMetricFamily(
        "fdcache_storage_failed_blocks", "Blocks not read or written.", labels=["namespace", "reason"]
    )
    hits = CounterMetricFamily("fdcache_storage_hit_blocks", "Blocks found by requests.", labels=labels)
    for each in open_layouts:
        evictions.add_metric([each["namespace"]], each["evictions"])
        hits.add_metric([each["namespace"]], each["totals"]["hit_blocks"])
        for key, reason in _FAILURES.items():
            failures.add_metric([each["namespace"], reason], each["totals"][key])
    state = GaugeMetricFamily(
        "fdcache_storage_state", "1 for the state of a layout's storage.", labels=["namespace", "state"]
    )
    for each in layouts:
        for name in _STATES:
            state.add_metric([each["namespace"], name], float(each["state"] == name))
    loading = GaugeMetricFamily(
        "fdcache_storage_loading", "1 while the index is loaded.", value=float(storage["loading"]["active"])
    )
    yield from (evictions, hits, failures, state, loading)
