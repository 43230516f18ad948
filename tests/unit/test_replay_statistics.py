"""Statistics of a replay: its timeline."""

from __future__ import annotations

import math

from fdcache.layout import KVLayout
from fdcache.manager import CacheManager
from fdcache.replay.statistics import Tally, Timeline
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
