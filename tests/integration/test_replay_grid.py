"""Long runs: small replays of random shape, and the recorded trace."""

import random
from typing import Any

import pytest

from fdcache.replay.config import LayoutName
from fdcache.replay.engine import replay
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkloadName
from fdcache.settings.cache import WritePolicy
from tests.replay_help import assert_clean, recorded_trace, run_chat, small_config
from tests.seeds import budget


def random_options(seed: int) -> dict[str, Any]:
    choose = random.Random(seed).choice
    block_size = choose([16, 32, 64])
    return {
        "device_blocks": choose([40, 80, 150, 300]) * 64 // block_size,
        "block_size": block_size,
        "host_memory": choose([0, 1 << 18, 1 << 20, 16 << 20]),
        "concurrency": choose([1, 4, 16, 40]),
        "chunk_tokens": choose([64, 512, 4096]),
        "load_failures": choose([0.0, 0.0, 0.1, 0.5, 1.0]),
        "layout": choose(list(LayoutName)),
        "layers": choose([1, 2, 5]),
        "draft_layers": choose([0, 1]),
        "seed": seed,
        "cache": {
            "write_policy": choose(list(WritePolicy)),
            "clean_reserve": choose([0, 8, 64]),
            "write_through_threshold": choose([1, 2, 3]),
            "defer_timeout": choose([0.0, 0.001, 1.0]),
            "plan_timeout": choose([30.0, 30.0, 0.0005]),
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(budget(200)))
def test_a_replay_of_any_shape_is_clean(seed: int) -> None:
    workload = random.Random(seed).choice(list(WorkloadName))
    assert_clean(run_chat(small_config(**random_options(seed)), requests=60, workload=workload))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(budget(60)))
def test_a_replay_of_any_shape_on_several_ranks_is_clean(seed: int) -> None:
    options = random_options(seed) | {"ranks": 2 + seed % 2, "load_failures": (seed % 3) / 4}
    assert_clean(run_chat(small_config(**options), requests=60))


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize(("ranks", "load_failures"), [(1, 0.0), (1, 0.1), (2, 0.05)])
def test_the_recorded_trace_is_clean_with_every_policy(
    policy: WritePolicy, ranks: int, load_failures: float
) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    config = small_config(
        device_blocks=20_000,
        host_memory=1 << 30,
        ranks=ranks,
        concurrency=32,
        load_failures=load_failures,
        cache={"write_policy": policy},
    )
    report = replay(read_trace(trace, limit=max(budget(2000), 600)), config)
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0
    assert (report.tally.failed_loads > 0) == (load_failures > 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 16, "device_blocks": 80_000},
        {"layout": LayoutName.FP8},
        {"layout": LayoutName.MLA},
        {"draft_layers": 1},
    ],
    ids=["block16", "fp8", "mla", "draft"],
)
def test_the_recorded_trace_is_clean_in_every_layout(ranks: int, shape: dict[str, Any]) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    options: dict[str, Any] = {"device_blocks": 20_000, "host_memory": 1 << 30, "concurrency": 32}
    config = small_config(ranks=ranks, load_failures=0.05, **(options | shape))
    report = replay(read_trace(trace, limit=1000), config)
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0
