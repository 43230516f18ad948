"""One point of a sweep: hits equal those of an exact cache, with and without bytes; nothing is left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fdcache._core import PatternModel
from fdcache.errors import ReplayError, ReplayOptionError
from fdcache.manager import CacheManager
from fdcache.replay import models
from fdcache.replay.config import VerifyBytes
from fdcache.replay.engine import replay
from fdcache.replay.optimum import BlockStream, optimal_hit_rate
from fdcache.replay.points import run_point
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import WritePolicy
from tests.replay_help import LeafFirstLru, recorded_trace, small_config


@pytest.mark.parametrize("workload", [WorkloadName.CHAT, WorkloadName.AGENT, WorkloadName.RAG])
@pytest.mark.parametrize("device_blocks", [80, 150, 600])
def test_one_request_at_a_time_finds_what_an_exact_lru_finds(
    workload: WorkloadName, device_blocks: int
) -> None:
    config = small_config(
        device_blocks=device_blocks,
        host_memory=0,
        concurrency=1,
        verify=VerifyBytes.OFF,
        cache={"eviction": "lru"},
    )
    point = run_point(generate(workload, 200, 3), config)
    exact = LeafFirstLru(device_blocks, 64).hit_rate(generate(workload, 200, 3), 0)
    assert 0.05 < exact < 0.95
    assert point.hit_rate == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("write", WritePolicy)
def test_a_point_agrees_with_a_whole_replay_of_one_request_at_a_time(write: WritePolicy) -> None:
    # What `learned` evicts depends on the copies that have ended, and these on the machine.
    cache = {"write_policy": write, "eviction": "lru"}
    options: dict[str, Any] = {"device_blocks": 150, "host_memory": 2 << 20, "cache": cache}
    config = small_config(concurrency=1, chunk_tokens=65536, **options)
    whole = replay(generate(WorkloadName.CHAT, 120, 0), config).tally.hit_tokens
    point = run_point(generate(WorkloadName.CHAT, 120, 0), config)
    assert point.hit_tokens["host"] > 0
    assert sum(point.hit_tokens.values()) == pytest.approx(sum(whole.values()), rel=0.03)


@pytest.mark.parametrize(
    ("ranks", "write"), [*((1, policy) for policy in WritePolicy), (2, WritePolicy.WRITE_THROUGH)]
)
def test_bytes_make_no_difference_to_the_hits(ranks: int, write: WritePolicy) -> None:
    options: dict[str, Any] = {"device_blocks": 150, "ranks": ranks, "cache": {"write_policy": write}}
    without = run_point(generate(WorkloadName.CHAT, 60, 0), small_config(verify=VerifyBytes.OFF, **options))
    compared = run_point(generate(WorkloadName.CHAT, 60, 0), small_config(verify=VerifyBytes.ALL, **options))
    assert without.verified_blocks == 0
    assert compared.verified_blocks > 0
    assert compared.corrupt_blocks == 0
    assert compared.hit_tokens == without.hit_tokens
    assert without.hit_tokens["host"] > 0
    assert without.host_evictions == compared.host_evictions


def test_without_bytes_the_tiers_may_be_larger_than_the_machine() -> None:
    config = small_config(device_blocks=2_000_000, layers=1024, host_memory=0, verify=VerifyBytes.OFF)
    assert run_point(generate(WorkloadName.CHAT, 30, 0), config).hit_rate > 0.3


def test_bytes_need_the_memory() -> None:
    config = small_config(device_blocks=2_000_000, layers=1024, host_memory=0, verify=VerifyBytes.ALL)
    with pytest.raises(ReplayOptionError, match="would fit"):
        run_point(generate(WorkloadName.CHAT, 30, 0), config)


def test_a_turn_finds_the_answer_before_it() -> None:
    config = small_config(device_blocks=20_000, host_memory=0, concurrency=64, verify=VerifyBytes.OFF)
    items = list(generate(WorkloadName.CHAT, 100, 0))
    optimum = optimal_hit_rate(BlockStream.of(items, config), 20_000, 20_000)
    assert run_point(items, config).hit_rate == pytest.approx(optimum, abs=0.005)


def test_requests_larger_than_the_device_tier_are_left_out() -> None:
    items = list(generate(WorkloadName.CHAT, 60, 0))
    config = small_config(device_blocks=30, host_memory=0, concurrency=2, verify=VerifyBytes.OFF)
    point = run_point(items, config)
    fitting = [item for item in items if config.blocks_for(item.computed_length) <= 30]
    assert 0 < point.rejected == len(items) - len(fitting) < len(items)
    assert point.requests == len(items)
    assert point.prompt_tokens == sum(item.prompt_length for item in fitting)


def test_no_request_that_fits_is_an_error() -> None:
    with pytest.raises(ReplayError, match="each of the 20 requests is larger than the device tier, 2 blocks"):
        run_point(generate(WorkloadName.CHAT, 20, 0), small_config(device_blocks=2, verify=VerifyBytes.OFF))


class WrongModel:
    """Model that writes a wrong byte into every layer."""

    def __init__(self, *arguments: Any) -> None:
        self.model = PatternModel(*arguments)
        self.planes = arguments[0]

    def run_layer(self, layer: int) -> Any:
        differing = self.model.run_layer(layer)
        self.planes[1][:, 5] = 77
        return differing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_corrupt_blocks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PatternModel", WrongModel)
    assert run_point(generate(WorkloadName.CHAT, 30, 0), small_config()).corrupt_blocks > 0


def test_what_is_left_over_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    finish: Callable[..., None] = CacheManager.finish

    def finish_all_but_one(manager: CacheManager, requests: Any) -> None:
        finish(manager, [request for request in requests if request.request_id != "7"])

    monkeypatch.setattr(CacheManager, "finish", finish_all_but_one)
    with pytest.raises(ReplayError, match="are left after the last request"):
        run_point(
            generate(WorkloadName.CHAT, 20, 0), small_config(device_blocks=2000, verify=VerifyBytes.OFF)
        )


def test_the_clock_of_the_manager_shows_the_time_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = []
    make = CacheManager.__init__

    def remember(manager: CacheManager, *arguments: Any, clock: Callable[[], float], **options: Any) -> None:
        clocks.append(clock)
        make(manager, *arguments, clock=clock, **options)

    monkeypatch.setattr(CacheManager, "__init__", remember)
    items = list(generate(WorkloadName.CHAT, 20, 0))
    seen: list[float] = []
    run_point(items, small_config(verify=VerifyBytes.OFF), lambda _: seen.append(clocks[0]()))
    assert seen == [item.timestamp_ms / 1000 for item in items]


REFERENCE = {
    1000: (0.044, 0.191),
    2000: (0.054, 0.255),
    5000: (0.112, 0.341),
    10000: (0.212, 0.366),
    20000: (0.288, 0.366),
}
"""Hit rates of LRU and of Belady by blocks of 512 tokens, where an incomplete block counts as one, outputs do not."""


@pytest.mark.nightly
@pytest.mark.parametrize("block_size", [512, 64])
def test_the_recorded_trace_has_its_known_hit_rates(block_size: int) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    items = list(read_trace(trace))
    for blocks, (lru, belady) in REFERENCE.items():
        capacity = blocks * 512 // block_size
        config = small_config(
            device_blocks=capacity,
            block_size=block_size,
            host_memory=0,
            concurrency=1,
            verify=VerifyBytes.OFF,
            cache={"eviction": "lru"},
        )
        if blocks == 1000:
            stream = BlockStream.of(items, config)
        assert run_point(items, config).hit_rate == pytest.approx(lru, abs=0.01)
        assert optimal_hit_rate(stream, capacity, capacity) == pytest.approx(belady, abs=0.01)
