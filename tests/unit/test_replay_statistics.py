"""Statistics of a replay: its timeline, and hits by tier."""

from __future__ import annotations

import math

from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, MatchResult, MatchStatus
from fdcache.replay.jobs import Job
from fdcache.replay.statistics import Tally, Timeline
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import CacheSettings


def test_the_recent_hit_rate_without_prompts_is_nan() -> None:
    layout = KVLayout.uniform(
        model="m", revision="1", num_layers=1, block_size=4, kv_heads=1, head_dim=8, dtype="uint8"
    )
    manager = CacheManager(CacheSettings(device_blocks=8), layout)
    timeline, tally = Timeline(interval=1.0), Tally()
    for second in range(60):
        if second < 20:
            tally.prompt_tokens += 10
            tally.hit_tokens["device"] += 5
        timeline.record(float(second), tally, manager)
    recent = [sample.recent_hit_rate for sample in timeline.samples]
    assert recent[:39] == [0.5] * 39
    assert all(math.isnan(rate) for rate in recent[40:])
    assert timeline.samples[-1].hit_rate == 0.5


def test_blocks_loaded_ahead_count_for_the_tier_that_had_them() -> None:
    job = Job(next(generate(WorkloadName.CHAT, 1, seed=0)), 0, block_size=4)
    found = MatchResult(
        "request",
        MatchStatus.MATCHED,
        num_device_blocks=9,
        num_host_blocks=2,
        num_storage_blocks=1,
        num_ahead_blocks=5,
        num_ahead_from_storage=2,
    )
    tally = Tally()
    tally.count_first_match(job, found)
    assert tally.hit_tokens == {"device": 4 * 4, "host": (2 + 3) * 4, "storage": (1 + 2) * 4}
