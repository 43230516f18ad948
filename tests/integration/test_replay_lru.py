"""The device tier's hit rate with one request at a time equals that of an exact leaf-first LRU."""

import itertools
from pathlib import Path

import pytest

from fdcache.replay.config import VerifyBytes
from fdcache.replay.engine import replay
from fdcache.replay.report import Report
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import WritePolicy
from tests.replay_help import LeafFirstLru, assert_clean, recorded_trace, small_config

LRU = {"eviction": "lru"}


# Workload and size of the pool act apart: both pools with one workload, and each workload once.
@pytest.mark.parametrize(
    ("workload", "device_blocks"),
    [
        (WorkloadName.CHAT, 150),
        (WorkloadName.CHAT, 600),
        (WorkloadName.AGENT, 600),
        (WorkloadName.RAG, 150),
        pytest.param(WorkloadName.AGENT, 150, marks=pytest.mark.slow),
        pytest.param(WorkloadName.RAG, 600, marks=pytest.mark.slow),
    ],
)
def test_hit_rate_equals_an_exact_simulation(workload: WorkloadName, device_blocks: int) -> None:
    config = small_config(device_blocks=device_blocks, host_memory=0, concurrency=1, cache=LRU)
    report = replay(generate(workload, 300, 0), config)
    assert_clean(report)
    exact = LeafFirstLru(device_blocks, 64).hit_rate(generate(workload, 300, 0), 0)
    assert 0.1 < exact < 0.95
    assert report.tally.hit_rate == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("policy", WritePolicy)
def test_copies_to_the_host_cost_no_device_hits(policy: WritePolicy) -> None:
    cache = {**LRU, "write_policy": policy, "clean_reserve": 150}
    config = small_config(device_blocks=300, layers=1, concurrency=1, verify=VerifyBytes.OFF, cache=cache)
    report = replay(generate(WorkloadName.CHAT, 300, 0), config)
    assert_clean(report)
    exact = LeafFirstLru(300, 64).hit_rate(generate(WorkloadName.CHAT, 300, 0), 0)
    assert exact > 0.1
    assert device_hit_rate(report) == pytest.approx(exact, abs=0.0002)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_copies_to_the_host_cost_no_device_hits_on_the_whole_trace(policy: WritePolicy) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    config = small_config(
        device_blocks=20000,
        host_memory=256 << 20,
        layers=1,
        concurrency=1,
        chunk_tokens=16384,
        verify=VerifyBytes.OFF,
        cache={**LRU, "write_policy": policy},
    )
    report = replay(read_trace(trace), config)
    assert_clean(report)
    exact = LeafFirstLru(20000, 64).hit_rate(read_trace(trace), 0)
    assert device_hit_rate(report) == pytest.approx(exact, abs=0.002)


@pytest.mark.parametrize("device_blocks", [3000])
def test_hit_rate_on_the_recorded_trace_equals_an_exact_simulation(device_blocks: int) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    report, exact = compare(trace, device_blocks, requests=250)
    assert report == pytest.approx(exact, abs=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize("device_blocks", [20000])
def test_hit_rate_on_the_whole_trace_equals_an_exact_simulation(device_blocks: int) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    report, exact = compare(trace, device_blocks, requests=None)
    assert report == pytest.approx(exact, abs=0.02)


def device_hit_rate(report: Report) -> float:
    return report.tally.hit_tokens["device"] / report.tally.prompt_tokens


def compare(trace: Path, device_blocks: int, requests: int | None) -> tuple[float, float]:
    config = small_config(
        device_blocks=device_blocks, host_memory=0, concurrency=1, chunk_tokens=16384, cache=LRU
    )
    report = replay(itertools.islice(read_trace(trace), requests), config)
    assert_clean(report)
    exact = LeafFirstLru(device_blocks, 64).hit_rate(itertools.islice(read_trace(trace), requests), 0)
    return report.tally.hit_rate, exact
