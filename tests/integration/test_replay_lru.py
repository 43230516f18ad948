"""Without a host tier and with one request at a time the hit rate is that of an exact leaf-first LRU."""

import itertools
from pathlib import Path

import pytest

from fdcache.replay.engine import replay
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkloadName, generate
from tests.replay_help import LeafFirstLru, assert_clean, recorded_trace, small_config


@pytest.mark.parametrize("workload", [WorkloadName.CHAT, WorkloadName.AGENT, WorkloadName.RAG])
@pytest.mark.parametrize("device_blocks", [150, 600])
def test_hit_rate_is_that_of_an_exact_simulation(workload: WorkloadName, device_blocks: int) -> None:
    config = small_config(device_blocks=device_blocks, host_memory=0, concurrency=1)
    report = replay(generate(workload, 300, 0), config)
    assert_clean(report)
    exact = LeafFirstLru(device_blocks, 64).hit_rate(generate(workload, 300, 0), 0)
    assert 0.1 < exact < 0.95
    assert report.tally.hit_rate == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("device_blocks", [3000])
def test_hit_rate_on_the_recorded_trace_is_that_of_an_exact_simulation(device_blocks: int) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    report, exact = compare(trace, device_blocks, requests=800)
    assert report == pytest.approx(exact, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("device_blocks", [20000])
def test_hit_rate_on_the_whole_trace_is_that_of_an_exact_simulation(device_blocks: int) -> None:
    trace = recorded_trace()
    if trace is None:
        pytest.skip("the recorded trace is not there")
    report, exact = compare(trace, device_blocks, requests=None)
    assert report == pytest.approx(exact, abs=0.02)


def compare(trace: Path, device_blocks: int, requests: int | None) -> tuple[float, float]:
    config = small_config(device_blocks=device_blocks, host_memory=0, concurrency=1, chunk_tokens=16384)
    report = replay(itertools.islice(read_trace(trace), requests), config)
    assert_clean(report)
    exact = LeafFirstLru(device_blocks, 64).hit_rate(itertools.islice(read_trace(trace), requests), 0)
    return report.tally.hit_rate, exact
