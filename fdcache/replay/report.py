"""Report of a replay: its fields, one JSON object, and a plot."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdcache.errors import IntegrityError, ReplayError, ReplayOptionError
from fdcache.groups import CacheGroup
from fdcache.replay.config import ReplayConfig
from fdcache.replay.engine_cache import Cache
from fdcache.replay.statistics import CopyTraffic, Stopwatch, Tally, Timeline
from fdcache.replay.worker import peak_rss_bytes
from fdcache.tiers.pool import TreeNode
from fdcache.tiers.statistics import CacheStats

_HOTTEST = 1000
MANAGER_CALLS = ("match", "allocate", "plan", "apply", "commit", "finish")


@dataclass(frozen=True, slots=True)
class Report:
    """Results of one replay.

    Attributes:
        leaked_slots, leaked_pins: slots and pins that are still held after the last request and the last copy.
        integrity_error: the first broken invariant of the manager, or None.
        manager_us: microseconds per request by manager call: the duration of a call divided by the requests
            (``apply``: reports) of its batch.
        stats, hottest: the manager's statistics at the end, and the hottest blocks of its own host tier.
        peak_rss_bytes: peak memory of this process and the rank processes together.
    """

    tally: Tally
    interrupted: bool
    evictions: int
    host_evictions: int
    stores_dropped: int
    leaked_slots: int
    leaked_pins: int
    integrity_error: str | None
    manager_us: dict[str, dict[str, float]]
    wall_seconds: float
    peak_rss_bytes: int
    timeline: Timeline
    settings: dict[str, Any]
    stats: CacheStats
    hottest: list[TreeNode]

    @property
    def clean(self) -> bool:
        """True if no block was corrupt, nothing leaked and every invariant held."""
        faults = self.tally.corrupt_blocks + self.leaked_slots + self.leaked_pins
        return faults == 0 and self.integrity_error is None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        tally = self.tally
        return {
            "requests": tally.requests,
            "finished": tally.finished,
            "rejected": tally.rejected,
            "interrupted": self.interrupted,
            "prompt_tokens": tally.prompt_tokens,
            "output_tokens": tally.output_tokens,
            "clipped_tokens": tally.clipped_tokens,
            "hit_tokens": tally.hit_tokens,
            "hit_rate": round(tally.hit_rate, 6),
            "verified_blocks": tally.verified_blocks,
            "corrupt_blocks": tally.corrupt_blocks,
            "leaked_slots": self.leaked_slots,
            "leaked_pins": self.leaked_pins,
            "integrity_error": self.integrity_error,
            "preemptions": tally.preemptions,
            "deferred_matches": tally.deferred_matches,
            "longest_deferral": round(tally.longest_deferral, 3),
            "failed_loads": tally.failed_loads,
            "overdue_loads": tally.overdue_loads,
            "recomputed_tokens": tally.recomputed_tokens,
            "evictions": self.evictions,
            "host_evictions": self.host_evictions,
            "swap": {"h2d": _traffic(tally.h2d), "d2h": _traffic(tally.d2h)},
            "storage": self._storage() if tally.storage else None,
            "manager_us": self.manager_us,
            "steps": tally.steps,
            "wall_seconds": round(self.wall_seconds, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
            "settings": self.settings,
        }

    def _storage(self) -> dict[str, Any]:
        """Return the storage counts, summed over ranks."""
        ranks = self.tally.storage
        summed = (
            "hits",
            "misses",
            "corrupt",
            "stored",
            "errors",
            "timeouts",
            "peer_gone",
            "no_room",
            "bad_slots",
            "corrupt_found_on_start",
        )
        return {
            "connector": ranks[0].name,
            "states": [stats.state.value for stats in ranks],
            "errors_seen": [stats.error for stats in ranks if stats.error],
            "restored_blocks": self.tally.storage_restored,
            "dropped_stores": self.stores_dropped,
            **{name: sum(getattr(stats, name) for stats in ranks) for name in summed},
            "read": _traffic(self.tally.from_storage),
            "written": _traffic(self.tally.to_storage),
        }


def build_report(
    config: ReplayConfig,
    manager: Cache,
    tally: Tally,
    watch: Stopwatch,
    timeline: Timeline,
    *,
    wall_seconds: float,
    interrupted: bool,
) -> Report:
    """Build the report; all requests have ended and all copies are reported."""
    stats = manager.get_stats()
    # The statistics of a service's host tier cover all engines.
    shared = config.cache.server is not None
    own_host = None if shared else stats.host
    tiers = [tier for tier in (stats.device, own_host, stats.storage) if tier is not None]
    return Report(
        tally=tally,
        interrupted=interrupted,
        evictions=stats.device.evictions,
        host_evictions=stats.host.evictions if stats.host else 0,
        stores_dropped=stats.counters.stores_dropped,
        leaked_slots=sum(
            tier.blocks - tier.free - tier.ready - tier.quarantined - tier.withheld - tier.orphans
            for tier in tiers
        ),
        leaked_pins=sum(tier.pins + tier.holds + tier.leases for tier in tiers)
        + manager.shared_blocks_in_use,
        integrity_error=_integrity_error(manager),
        manager_us={name: watch.microseconds(name) for name in MANAGER_CALLS},
        wall_seconds=wall_seconds,
        peak_rss_bytes=peak_rss_bytes() + tally.other_rss_bytes,
        timeline=timeline,
        settings=_settings(config),
        stats=stats,
        hottest=manager.hottest_blocks(_HOTTEST),
    )


def _traffic(traffic: CopyTraffic) -> dict[str, float]:
    return {"bytes": traffic.bytes, "seconds": round(traffic.seconds, 6)}


def _integrity_error(manager: Cache) -> str | None:
    try:
        manager.check_integrity()
    except IntegrityError as error:
        return str(error)
    return None


def _group(group: CacheGroup) -> str:
    tokens = f":{group.tokens}" if group.tokens else ""
    return f"{group.reach}{tokens}/{group.block_size}"


def _settings(config: ReplayConfig) -> dict[str, Any]:
    layout = config.layout
    return {
        "block_size": layout.block_size,
        "groups": [_group(each) for each in layout.groups],
        "layers": layout.num_layers,
        "draft_layers": layout.num_draft_layers,
        "planes": len(layout.planes),
        "record_bytes": layout.record_bytes,
        "ranks": layout.tp_size,
        **config.cache.model_dump(mode="json"),
        "storage": config.storage.model_dump(mode="json") if config.storage.is_on else None,
        "concurrency": config.concurrency,
        "chunk_tokens": config.chunk_tokens,
        "speed": config.speed,
        "verify": config.verify.value,
        "seed": config.seed,
        "load_failures": config.load_failures,
    }


def require_plotting(path: Path) -> None:
    """Raise ``ReplayOptionError`` if no plot can be written to ``path``. Cheap enough to check before a run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ReplayOptionError("--plot", "needs matplotlib; install it with: pip install 'fdcache[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in formats:
        raise ReplayOptionError("--plot", f"{path}: the name must end in one of {', '.join(sorted(formats))}")
    if not path.absolute().parent.is_dir():
        raise ReplayOptionError("--plot", f"{path}: the directory {path.parent} does not exist")


def write_plot(report: Report, path: Path) -> None:
    """Plot hit rate and occupancy over time; the file name's suffix chooses the format.

    Raises ``ReplayError`` if the file cannot be written.
    """
    from matplotlib.figure import Figure

    samples = report.timeline.samples
    seconds = [sample.seconds for sample in samples]
    figure = Figure(figsize=(9, 6), layout="constrained")
    rates, tiers = figure.subplots(2, sharex=True)
    rates.plot(seconds, [sample.hit_rate for sample in samples], label="so far")
    recent = [sample.recent_hit_rate for sample in samples]
    rates.plot(seconds, recent, label="recently", linewidth=0.6, alpha=0.6)
    rates.set_ylabel("hit rate (tokens)")
    for tier in samples[-1].occupancy if samples else ():
        tiers.plot(seconds, [sample.occupancy[tier] for sample in samples], label=tier)
    tiers.set_ylabel("occupied share of the tier")
    tiers.set_xlabel("seconds")
    for axes in (rates, tiers):
        axes.set_ylim(0, 1.02)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReplayError(f"--plot: {path} cannot be written: {error.strerror or error}") from error
