"""Report: what a replay found, as fields and as one JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fdcache.errors import IntegrityError
from fdcache.manager import CacheManager
from fdcache.replay.config import ReplayConfig
from fdcache.replay.stopwatch import Stopwatch
from fdcache.replay.tally import Tally, Traffic
from fdcache.replay.timeline import Timeline
from fdcache.replay.worker import peak_rss_bytes

MANAGER_CALLS = ("match", "allocate", "plan", "apply", "commit", "finish")


@dataclass(frozen=True, slots=True)
class Report:
    """One replay. Bytes and seconds of ``h2d`` and ``d2h`` are summed over ranks.

    ``manager_us`` has microseconds per request of each manager call: a call's time divided by the requests
    (for ``apply``: reports) of its batch. ``leaked_slots`` and ``leaked_pins`` are what the manager still
    holds after every request ended and every copy was reported.
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

    @property
    def clean(self) -> bool:
        """Whether no block was corrupt, nothing leaked and every invariant held."""
        faults = self.tally.corrupt_blocks + self.leaked_slots + self.leaked_pins
        return faults == 0 and self.integrity_error is None

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
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
        """Counts summed over ranks; what was refused for its checksum was recomputed, never served."""
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
    manager: CacheManager,
    tally: Tally,
    watch: Stopwatch,
    timeline: Timeline,
    *,
    wall_seconds: float,
    interrupted: bool,
) -> Report:
    """The report of a replay whose requests have all ended and whose copies were all reported."""
    stats = manager.get_stats()
    # The host tier of a service counts what all engines hold.
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
            tier.blocks - tier.free - tier.ready - tier.quarantined - tier.withheld for tier in tiers
        ),
        leaked_pins=sum(tier.pins + tier.holds + tier.leases for tier in tiers)
        + manager.shared_blocks_in_use,
        integrity_error=_integrity_error(manager),
        manager_us={name: watch.microseconds(name) for name in MANAGER_CALLS},
        wall_seconds=wall_seconds,
        peak_rss_bytes=peak_rss_bytes() + tally.other_rss_bytes,
        timeline=timeline,
        settings=_settings(config),
    )


def _traffic(traffic: Traffic) -> dict[str, float]:
    return {"bytes": traffic.bytes, "seconds": round(traffic.seconds, 6)}


def _integrity_error(manager: CacheManager) -> str | None:
    try:
        manager.check_integrity()
    except IntegrityError as error:
        return str(error)
    return None


def _settings(config: ReplayConfig) -> dict[str, Any]:
    layout = config.layout
    return {
        "block_size": layout.block_size,
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
