"""Replays through the real manager and controllers are clean for every policy, layout and workload."""

from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.devices.base import ArenaRecords, DevicePlanes, PlannedCopy
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import ReplayError, ReplayOptionError
from fdcache.manager import CacheManager, Request
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferReport
from fdcache.replay import engine, worker
from fdcache.replay.config import LayoutName, VerifyBytes
from fdcache.replay.engine import replay
from fdcache.replay.messages import StepResult
from fdcache.replay.ranks import LocalRank
from fdcache.replay.report import build_report
from fdcache.replay.statistics import Stopwatch, Tally, Timeline
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings.cache import EvictionPolicy, WritePolicy
from tests.replay_help import assert_clean, kills_rank_one, rank_processes, run_chat, small_config

POLICIES = list(WritePolicy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("load_failures", [0.0, 0.4])
def test_every_write_policy_is_clean_with_and_without_failing_loads(
    policy: WritePolicy, load_failures: float
) -> None:
    report = run_chat(small_config(cache={"write_policy": policy}, load_failures=load_failures))
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0
    assert report.tally.h2d.bytes > 0
    assert report.tally.d2h.bytes > 0
    assert report.evictions > 0
    assert (report.tally.failed_loads > 0) == (load_failures > 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_tier_smaller_than_the_device_tier_is_clean(policy: WritePolicy) -> None:
    config = small_config(device_blocks=120, host_memory=1 << 20, cache={"write_policy": policy})
    report = run_chat(config, requests=150)
    assert_clean(report)
    assert report.host_evictions > 0
    assert report.tally.preemptions > 0


def test_traffic_is_counted_by_direction() -> None:
    config = small_config(concurrency=1, cache={"write_policy": WritePolicy.WRITE_THROUGH})
    report = run_chat(config, requests=20, workload=WorkloadName.UNIQUE)
    assert report.tally.d2h.bytes > 0
    assert report.tally.h2d.bytes == 0


class LateReports:
    """A rank whose reports arrive two steps late."""

    def __init__(self, spec: worker.WorkerSpec, _count: int, _on_start: worker.StartProgress | None) -> None:
        self._rank = LocalRank(spec)
        self._held: deque[list[TransferReport]] = deque([[], []])
        self.send = self._rank.send
        self.close = self._rank.close

    def receive(self) -> list[StepResult]:
        (result,) = self._rank.receive()
        self._held.append(result.reports)
        return [replace(result, reports=self._held.popleft())]


@pytest.mark.parametrize("policy", POLICIES)
def test_late_reports_of_loads_are_clean(policy: WritePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "start_ranks", LateReports)
    items = [
        replace(item, output_length=min(item.output_length, 2))
        for item in generate(WorkloadName.CHAT, 100, 0)
    ]
    report = replay(iter(items), small_config(cache={"write_policy": policy}, load_failures=0.4))
    assert_clean(report)
    assert report.tally.failed_loads > 0
    assert report.tally.hit_tokens["host"] > 0


@pytest.mark.parametrize("workload", [WorkloadName.AGENT, WorkloadName.CHAT])
def test_late_and_failing_loads_do_not_block_requests_forever(workload: WorkloadName) -> None:
    config = small_config(
        device_blocks=300,
        load_failures=1.0,
        cache={"plan_timeout": 1e-6, "write_policy": WritePolicy.WRITE_THROUGH},
    )
    report = run_chat(config, workload=workload)
    assert_clean(report)
    assert 0 < report.tally.overdue_loads <= report.tally.requests, "loads of one request were late twice"


def test_slots_and_pins_that_are_still_held_count_as_leaked() -> None:
    config = small_config()
    manager = CacheManager(config.cache, config.layout)
    held, matched = Request("held", [1, 2]), Request("matched", [3])
    manager.match_prefix([held, matched])
    manager.allocate_device_blocks([(held, 2)])
    report = build_report(
        config, manager, Tally(), Stopwatch(), Timeline(), wall_seconds=0.0, interrupted=False
    )
    assert (report.leaked_slots, report.leaked_pins) == (1, 1 + 2)
    assert not report.clean


@pytest.mark.parametrize("layout", list(LayoutName))
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("draft_layers", [0, 2])
def test_every_layout_and_block_size_is_clean(layout: LayoutName, block_size: int, draft_layers: int) -> None:
    config = small_config(
        layout=layout,
        block_size=block_size,
        layers=3,
        draft_layers=draft_layers,
        device_blocks=200 * 64 // block_size,
        load_failures=0.1,
    )
    report = run_chat(config, requests=60)
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0


# What ranks in processes have of their own is the same with every policy.
@pytest.mark.parametrize(
    "policy",
    [WritePolicy.WRITE_BACK, *(pytest.param(each, marks=pytest.mark.slow) for each in POLICIES[:-1])],
)
def test_two_ranks_in_processes_of_their_own_are_clean(policy: WritePolicy) -> None:
    config = small_config(ranks=2, cache={"write_policy": policy}, load_failures=0.2)
    report = run_chat(config)
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0
    assert report.tally.failed_loads > 0
    assert report.tally.verified_blocks % 2 == 0


@pytest.mark.parametrize("workload", list(WorkloadName))
def test_every_workload_is_clean_and_all_but_unique_reuse_blocks(workload: WorkloadName) -> None:
    report = run_chat(small_config(device_blocks=400), requests=120, workload=workload)
    assert_clean(report)
    if workload not in (WorkloadName.LOOP, WorkloadName.MIXED):  # lru finds little of loops in so few blocks
        assert (report.tally.hit_rate > 0.2) == (workload is not WorkloadName.UNIQUE)


def test_all_prompt_and_output_tokens_are_counted() -> None:
    items = list(generate(WorkloadName.CHAT, 80, 0))
    report = replay(iter(items), small_config())
    assert report.tally.prompt_tokens == sum(item.prompt_length for item in items)
    assert report.tally.output_tokens == sum(item.output_length for item in items)


def test_one_token_steps_and_one_request_at_a_time_are_clean() -> None:
    assert_clean(run_chat(small_config(concurrency=1, chunk_tokens=1), requests=4))


def test_requests_larger_than_the_pool_are_rejected_and_the_run_goes_on() -> None:
    items = list(generate(WorkloadName.CHAT, 60, 0))
    config = small_config(device_blocks=30)
    too_large = sum(config.blocks_for(item.computed_length) > 30 for item in items)
    report = replay(iter(items), config)
    assert_clean(report)
    assert report.tally.rejected == too_large > 0
    assert report.tally.finished == 60 - too_large > 0


def test_requests_as_large_as_the_pool_finish() -> None:
    def item(index: int) -> WorkItem:
        streams = np.array([index], dtype=np.uint64)
        return WorkItem(index, 0.0, streams, np.array([600]), (1 << 62) + index, 681)

    report = replay((item(index) for index in range(6)), small_config(device_blocks=20, concurrency=4))
    assert_clean(report)
    assert report.tally.finished == 6
    assert report.tally.preemptions > 0


def test_speed_follows_the_timestamps() -> None:
    items = list(generate(WorkloadName.RAG, 20, 0))
    report = replay(iter(items), small_config(speed=50.0))
    assert_clean(report)
    assert report.wall_seconds >= items[-1].timestamp_ms / 1000 / 50


@pytest.mark.parametrize("eviction", ["lru", "learned"])
def test_a_replay_at_the_speed_of_its_workload_evicts_by_the_real_clock(eviction: str) -> None:
    items = [
        replace(item, timestamp_ms=item.timestamp_ms / 100, think_ms=item.think_ms / 100)
        for item in generate(WorkloadName.CHAT, 200, 0)
    ]
    config = small_config(speed=1.0, device_blocks=100, cache={"eviction": eviction})
    report = replay(iter(items), config)
    assert_clean(report)
    assert report.wall_seconds >= items[-1].timestamp_ms / 1000
    assert report.tally.hit_tokens["device"] > 0


def test_verify_sample_compares_fewer_blocks_and_off_none() -> None:
    everything, sample, nothing = (
        run_chat(small_config(verify=verify, concurrency=1)).tally.verified_blocks
        for verify in (VerifyBytes.ALL, VerifyBytes.SAMPLE, VerifyBytes.OFF)
    )
    assert everything > sample > nothing == 0


@pytest.mark.parametrize("eviction", EvictionPolicy)
def test_equal_seeds_give_equal_hits_without_a_host_tier(eviction: EvictionPolicy) -> None:
    config = small_config(host_memory=0, seed=5, cache={"eviction": eviction})
    first, again = (run_chat(config).tally for _ in range(2))
    assert first.hit_tokens == again.hit_tokens
    assert first.preemptions == again.preemptions


def test_an_interrupted_replay_is_clean_and_marked_as_interrupted() -> None:
    config = small_config()
    asked = iter(range(400))
    report = replay(
        generate(WorkloadName.CHAT, 100, 0), config, should_stop=lambda: next(asked, None) is None
    )
    assert report.interrupted
    assert report.clean
    assert 0 < report.tally.finished < 100


class SilentlyWrongDevice(CpuDevice):
    """Device that loads the previous pair's block and reports success."""

    def copy_blocks(self, planes: DevicePlanes, arena: ArenaRecords, swap: CacheSwapMetadata) -> PlannedCopy:
        if not swap.to_host and len(swap) > 1:
            order = np.roll(np.arange(len(swap)), 1)
            swap = msgspec.structs.replace(
                swap,
                src_block_ids=swap.src_block_ids[order],
                src_generations=swap.src_generations[order],
                hash_values=swap.hash_values[order],
                parent_hashes=swap.parent_hashes[order],
            )
        return super().copy_blocks(planes, arena, swap)


def test_wrong_bytes_loaded_by_a_device_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FaultyDevice", lambda *_, **__: SilentlyWrongDevice())
    report = run_chat(small_config(load_failures=1.0))
    assert report.tally.corrupt_blocks > 0
    assert not report.clean


def test_hidden_failed_loads_are_detected_as_corrupt_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def poll_without_failures(controller: CacheController) -> list[TransferReport]:
        return [forgive(report) for report in poll(controller)]

    def forgive(report: TransferReport) -> TransferReport:
        nothing = np.empty(0, dtype=np.int32)
        results = (
            msgspec.structs.replace(result, failed=nothing) if result.purpose is SwapPurpose.LOAD else result
            for result in report.results
        )
        return msgspec.structs.replace(report, results=tuple(results))

    poll = CacheController.poll
    monkeypatch.setattr(CacheController, "poll", poll_without_failures)
    report = run_chat(small_config(load_failures=0.5))
    assert report.tally.failed_loads == 0
    assert report.tally.corrupt_blocks > 0


def test_missing_memory_is_reported_with_the_option_and_a_size_that_fits() -> None:
    with pytest.raises(ReplayOptionError, match=r"--device-blocks: .* at most \d+ would fit"):
        run_chat(small_config(device_blocks=10**12), requests=1)
    with pytest.raises(ReplayOptionError, match=r"--host-memory: .* at most \S+ would fit"):
        run_chat(small_config(host_memory=1 << 50), requests=1)


def test_more_ranks_than_may_be_processes_are_refused_before_one_starts() -> None:
    with pytest.raises(ReplayOptionError, match=r"--ranks: 65 ranks .* at most 64"):
        run_chat(small_config(ranks=65, host_memory=0), requests=1)


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("concurrency", 0, "--concurrency"),
        ("chunk_tokens", 15, "--chunk-tokens"),
        ("speed", 0.0, "--speed"),
        ("load_failures", 1.5, "--load-failures"),
    ],
)
def test_an_option_out_of_range_is_reported(option: str, value: float, name: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ReplayOptionError, match=name):
        small_config(**options)


def test_the_death_of_a_rank_ends_the_run_with_an_error_naming_it() -> None:
    with pytest.raises(ReplayError, match=r"rank 1 .* ended by signal 9"):
        replay(generate(WorkloadName.CHAT, 100, 0), small_config(ranks=2), should_stop=kills_rank_one())
    assert not rank_processes()


def test_a_replay_ends_with_a_host_tier_smaller_than_one_path() -> None:
    cache = {"write_policy": WritePolicy.WRITE_BACK, "clean_reserve": 8}
    config = small_config(
        device_blocks=1200, block_size=16, host_memory=1 << 20, concurrency=1, seed=97, layers=1, cache=cache
    )
    report = run_chat(config, requests=80, workload=WorkloadName.UNIQUE)
    assert_clean(report)
