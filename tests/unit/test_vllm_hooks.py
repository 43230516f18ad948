"""Both sides of the vLLM connector with the records and requests of vLLM's wheel, without its engine.

Skipped without vLLM: ``python -m tests.vllm.setup`` makes environments with it, ``make test-vllm`` runs in them.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: python -m tests.vllm.setup")

import prometheus_client
import torch
from prometheus_client import CollectorRegistry
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import RequestStatus

from fdcache.errors import ConfigurationError
from fdcache.integrations.vllm.connector import FdcacheConnector
from fdcache.integrations.vllm.keys import request_of
from fdcache.integrations.vllm.metadata import WorkerReports
from fdcache.integrations.vllm.planes import planes_of
from fdcache.integrations.vllm.stats import FdcacheMetrics, FdcacheStats, StatsDelta
from fdcache.integrations.vllm.worker import _Arrivals
from fdcache.metadata import TransferReport
from fdcache.tiers import storage_reads
from tests.handover_engine import Engine as Handing
from tests.service_help import until
from tests.vllm_sides import (
    BLOCK,
    PAGE,
    WINDOWS,
    Engine,
    continued,
    host_memory,
    image,
    request,
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def test_whole_blocks_are_stored_and_loaded_elsewhere(engine: Engine) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    assert engine.load(request("b"), [8, 9]) == 2 * BLOCK
    assert engine.content(8) == engine.content(9) == {7}
    assert engine.worker.take_bad_blocks() == set()


def test_a_prompt_of_whole_blocks_is_loaded_whole_and_its_last_block_alone_is_computed(
    engine: Engine,
) -> None:
    tokens = list(range(2 * BLOCK))
    engine.compute(request("a", tokens), [3, 4], fill=7)
    assert engine.load(request("b", tokens), [8, 9]) == 2 * BLOCK
    assert engine.content(8) == engine.content(9) == {7}
    assert engine.side.matched(request("c", tokens), BLOCK) == 0


def test_the_same_tokens_with_other_inputs_share_no_block(engine: Engine) -> None:
    inputs: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_request": LoRARequest("a", 1, "/x")},
        {"lora_request": LoRARequest("a", 1, "/y")},
        {"lora_request": LoRARequest("b", 2, "/x")},
        {"mm_features": image("p", 1, 2)},
        {"mm_features": image("q", 1, 2)},
        {"mm_features": image("p", 1, 3)},
        {"mm_features": image("p", 2, 2)},
    ]
    for i, given in enumerate(inputs):
        engine.compute(request(f"first{i}", **given), [1, 2, 3], fill=i + 1)
    for i, given in enumerate(inputs):
        assert engine.load(request(f"second{i}", **given), [8, 9]) == 2 * BLOCK
        assert engine.content(8) == engine.content(9) == {i + 1}


def test_blocks_that_may_have_left_their_window_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells which blocks a request gets, and not which ones it has given up."""
    engine = Engine(WINDOWS)
    source = request("a", list(range(30)))
    offered: list[list[int]] = []
    monkeypatch.setattr(engine.manager, "offer", lambda _, tokens, table: offered.append(table.tolist()))
    assert engine.side.matched(source, 0) == 0
    new = replace(NewRequestData.from_request(source, ([1], [2])), num_computed_tokens=0)
    engine.step(
        replace(SchedulerOutput.make_empty(), scheduled_new_reqs=[new], num_scheduled_tokens={"a": 3})
    )
    engine.step(continued("a", 3, 13, ([3, 5, 7], [4, 6, 8])))
    engine.step(continued("a", 16, 14, ([9, 11, 13, 15], [10, 12, 14, 16])))
    gone = -1
    assert offered == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, gone, 3, gone, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
    ]
    source.num_computed_tokens = 32
    source.append_output_token_ids([1, 2])
    engine.side.finished(source, ([1, 3, 5, 7, 9, 11, 13, 15], [0, 0, 0, 0, 0, 0, 14, 16]))
    assert offered[-1] == [1, gone, 3, gone, 5, gone, 7, gone, 9, gone, 11, gone, 13, 14, 15, 16]
    engine.close()


def test_the_blocks_of_the_windows_alone_are_loaded_and_a_failure_is_told_by_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(WINDOWS)
    tokens = list(range(17))
    first = request("a", tokens)
    assert engine.side.matched(first, 0) == 0
    full, sliding = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    new = replace(NewRequestData.from_request(first, (full, sliding)), num_computed_tokens=0)
    engine.step(
        replace(SchedulerOutput.make_empty(), scheduled_new_reqs=[new], num_scheduled_tokens={"a": 17}),
        fill=7,
    )
    for pages in engine.pages.values():
        for block in sliding:
            pages[block] = 8
    first.num_computed_tokens = 17
    engine.side.finished(first, (full, sliding))
    engine.settle()
    table = ([11, 12, 13, 14, 19], [0, 0, 15, 16, 20])
    for name in ("b", "c"):
        source = request(name, tokens)
        assert engine.side.matched(source, 0) == 4 * BLOCK
        engine.side.allocated(source, table, 4 * BLOCK)
        assert engine.arrived() == {name}
        assert engine.worker.take_failed() == ({name} if name == "c" else set())
        assert engine.worker.take_bad_blocks() == set()
        if name == "b":
            assert [engine.content(block) for block in (0, 11, 12, 13, 14, 15, 16)] == [
                {0},
                {7},
                {7},
                {7},
                {7},
                {8},
                {8},
            ]
            memory = host_memory(engine)
            memory[memory == 8] = 9
    engine.settle()
    (said,) = [line for line in caplog.messages if "failed load" in line]
    assert said.startswith("failed load 1: request c is computed from token") and "None" not in said
    engine.close()


def test_planes_are_the_bytes_of_a_block_of_all_layers_that_lie_there() -> None:
    """Two layers of attention side by side in each block, and over them a layer with a state in two tensors."""
    blocks, stride, begin = 6, 96, 32
    raw = torch.zeros(begin + blocks * stride, dtype=torch.uint8)
    attention = [
        torch.as_strided(
            raw.view(torch.bfloat16), (blocks, 2, 8), (stride // 2, 8, 1), (begin + 32 * layer) // 2
        )
        for layer in range(2)
    ]
    state = [
        torch.as_strided(raw, (blocks, 3, 8), (stride, 8, 1), begin),
        torch.as_strided(raw, (blocks, 40), (stride, 1), begin + 24),
    ]
    placed = [
        SimpleNamespace(layers=["0", "1"], offset=0, layer_stride=32, block_stride=stride),
        SimpleNamespace(layers=["2"], offset=0, layer_stride=stride, block_stride=stride),
    ]
    given = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=placed)
    (plane,) = planes_of(given, {"0": attention[0], "1": attention[1], "2": state})
    assert plane.shape == (blocks, stride)
    for value, part in enumerate((attention[0].view(torch.uint8), attention[1].view(torch.uint8), *state)):
        part[3] = value + 1
        assert bool((plane[3] == value + 1).any())
        assert not bool((plane[[0, 1, 2, 4, 5]] == value + 1).any())
    with pytest.raises(ConfigurationError, match=r"is not 6 pages of 32 bytes.*VLLM_KV_CACHE_LAYOUT"):
        planes_of(given, {"0": torch.zeros(blocks, 4, 16), "1": attention[1], "2": state})


def test_planes_are_the_tensors_that_layers_of_several_groups_share() -> None:
    """A layer that attends in two kernel's blocks for each of vLLM's, and over it one with a state in two tensors."""
    blocks, page = 6, 96
    spec = SimpleNamespace(page_size_bytes=page)
    given = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[name]) for name in "01"],
    )
    raw = torch.zeros(blocks * page, dtype=torch.uint8)
    attention = raw.view(torch.bfloat16).view(2 * blocks, 2, 12)
    state = [
        torch.as_strided(raw, (blocks, 3, 8), (page, 8, 1), 0),
        torch.as_strided(raw.view(torch.float32), (blocks, 16), (page // 4, 1), 6),
    ]
    layers = {"0": attention, "1": state}
    for names in (["0", "1"], ["1", "0"]):
        given.kv_cache_tensors = [SimpleNamespace(size=blocks * page, shared_by=names)]
        (plane,) = planes_of(given, layers)
        assert (plane.shape, plane.stride(), plane.data_ptr()) == ((blocks, page), (page, 1), raw.data_ptr())
        raw.zero_()
        attention[6:8] = 1
        assert plane.any(dim=1).tolist() == [False, False, False, True, False, False]
        raw.zero_()
        for value, part in enumerate(state):
            part[2] = value + 1
        assert plane[2].tolist() == [1] * 24 + torch.full((16,), 2.0).view(torch.uint8).tolist() + [0] * 8
    with pytest.raises(ConfigurationError, match=r"is not 6 pages of 96 bytes.*another attention backend"):
        given.kv_cache_tensors[0].shared_by.reverse()
        planes_of(given, layers | {"0": torch.zeros(2, 2 * blocks, 24)})


def test_an_image_changes_its_own_block_and_those_after_it(engine: Engine) -> None:
    engine.compute(request("a", mm_features=image("p", 5, 2)), [1, 2, 3], fill=1)
    assert engine.side.matched(request("b", mm_features=image("q", 5, 2)), 0) == BLOCK


def test_requests_whose_tokens_do_not_name_their_kv_are_not_cached() -> None:
    assert request_of(request("a", prompt_embeds=torch.zeros(10, 4))) is None
    assert request_of(request("b", resumable=True)) is None
    inplace = LoRARequest("a", 1, "/x", load_inplace=True)
    assert request_of(request("c", lora_request=inplace)) is None


def test_a_block_that_is_given_away_is_copied_before_it_is_overwritten() -> None:
    engine = Engine(FDCACHE_WRITE_POLICY="write_back")
    first, second = request("a"), request("b", list(range(100, 110)))
    engine.compute(first, [3, 4, 5], fill=7)
    engine.side.arrived(second)
    engine.step(engine.admit(second, [4, 3, 6]), fill=9)
    engine.settle()
    assert engine.load(request("c"), [8, 9]) == 2 * BLOCK
    assert engine.content(8) == engine.content(9) == {7}
    engine.close()


def test_blocks_of_a_preempted_request_are_those_of_its_new_table(engine: Engine) -> None:
    """In one step it loses its blocks, another gets them, and it comes back with others."""
    first, second = request("a"), request("b", list(range(100, 110)))
    assert engine.side.matched(first, 0) == 0
    engine.step(engine.admit(first, [3, 4, 5]), fill=7)
    taken = engine.admit(second, [3, 4, 5])
    engine.side.arrived(second)
    engine.step(replace(taken, preempted_req_ids={"a"}), fill=9)
    resumed = CachedRequestData.make_empty()
    resumed.req_ids, resumed.resumed_req_ids = ["a"], {"a"}
    resumed.new_block_ids, resumed.num_computed_tokens, resumed.num_output_tokens = (
        [([10, 11, 12],)],
        [0],
        [0],
    )
    engine.step(
        replace(SchedulerOutput.make_empty(), scheduled_cached_reqs=resumed, num_scheduled_tokens={"a": 10})
    )
    assert list(engine.side._running["a"].blocks.by_groups[0]) == [10, 11, 12]
    engine.settle()
    assert engine.load(request("c"), [20, 21]) == 2 * BLOCK
    assert engine.content(20) == engine.content(21) == {7}
    assert engine.load(request("d", list(range(100, 110))), [22, 23]) == 2 * BLOCK
    assert engine.content(22) == {9}
    assert engine.side.inconsistencies == 0


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_nothing_wrong_is_stored_after_a_step_without_its_plan(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(FDCACHE_WRITE_POLICY=policy)
    first, second = request("a"), request("b", list(range(100, 110)))
    assert engine.side.matched(first, 0) == 0
    engine.step(engine.admit(first, [3, 4, 5]), fill=7)

    def fail() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(engine.manager, "take_plans", fail)
        engine.side.arrived(second)
        engine.step(engine.admit(second, [3, 4, 5]), fill=9)
    engine.settle()
    assert engine.side.inconsistencies == 1
    found = engine.load(request("c"), [8, 9])
    assert not found or engine.content(8) == engine.content(9) == {7}
    for source, blocks in ((first, []), (second, [3, 4, 5])):
        source.num_computed_tokens = 10
        engine.side.finished(source, (blocks,))
    engine.settle()
    assert engine.load(request("d", list(range(100, 110))), [10, 11]) == 0  # of that time nothing is stored
    engine.compute(request("e", list(range(50, 60))), [3, 4, 5], fill=5)
    engine.compute(request("f", list(range(60, 70))), [3, 4, 5], fill=6)
    assert engine.load(request("g", list(range(50, 60))), [10, 11]) == 2 * BLOCK
    assert engine.content(10) == engine.content(11) == {5}
    engine.close()


def test_a_load_that_a_step_without_its_plan_loses_is_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    source = request("b")
    assert engine.side.matched(source, 0) == 2 * BLOCK
    engine.side.allocated(source, ([8, 9, 10],), 2 * BLOCK)

    def fail() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(engine.manager, "take_plans", fail)
        assert engine.step() == set()
    assert engine.arrived() == {"b"}
    assert engine.worker.take_bad_blocks() == {8, 9}
    assert engine.side.matched(source, 0) == 0
    engine.settle()


def test_copies_that_a_step_without_its_plan_may_have_overwritten_do_not_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy out is in flight while the step that would wait for it goes without its plan."""
    first = request("a")
    assert engine.side.matched(first, 0) == 0
    engine.step(engine.admit(first, [3, 4, 5]), fill=7)
    poll = engine.worker._controller.poll  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(engine.worker._controller, "poll", list)
        engine.step()
        assert engine.steps[-1].plans
        patched.setattr(engine.manager, "take_plans", lambda **_: 1 / 0)
        second = request("b", list(range(100, 110)))
        engine.side.arrived(second)
        engine.step(engine.admit(second, [3, 4, 5]), fill=9)
    assert engine.worker._controller.poll == poll  # type: ignore[union-attr]
    engine.settle()
    assert engine.load(request("c"), [8, 9]) == 0


def test_what_storage_held_at_the_start_is_told_once(tmp_path: Path) -> None:
    """vLLM asks for it again when it wakes up: by then other blocks are there."""
    make = functools.partial(
        Engine, FDCACHE_STORAGE="local", FDCACHE_STORAGE_DIR=str(tmp_path), FDCACHE_STORAGE_SIZE="64KiB"
    )
    first = make()
    first.side.restore([first.worker.take_scan()])
    first.compute(request("a"), [3, 4, 5], fill=7)
    first.close()
    engine = make()
    engine.side.restore([engine.worker.take_scan()])
    source = request("b")
    until(lambda: engine.side.matched(source, 0) == 2 * BLOCK or engine.step(), "the end of the reads")
    assert engine.side.sources_of("b", 2 * BLOCK) == (0, 2 * BLOCK, 0)
    engine.side.reset()
    engine.compute(request("c", list(range(50, 60))), [3, 4, 5], fill=8)
    engine.side.restore([engine.worker.take_scan()])
    assert engine.manager.get_stats().storage.ready == 2  # type: ignore[union-attr]
    engine.close()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_request_has_no_part_in_the_former_load_of_its_name(
    comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former one ends while its load waits for storage. Which device blocks that leaves is not the other's."""
    monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 1)  # each read brings one block
    make = functools.partial(
        Engine, FDCACHE_STORAGE="local", FDCACHE_STORAGE_DIR=str(tmp_path), FDCACHE_STORAGE_SIZE="64KiB"
    )
    tokens, blocks = list(range(8 * BLOCK)), list(range(3, 11))
    first = make()
    first.side.restore([first.worker.take_scan()])
    first.compute(request("a", tokens), blocks, fill=7)
    first.close()
    engine = make()
    engine.side.restore([engine.worker.take_scan()])
    side, former, reports = engine.side, request("b", tokens), list[TransferReport]()
    side.arrived(former)

    def is_promised() -> bool:
        """Count one report more."""
        engine.worker.submit(side.step(SchedulerOutput.make_empty()))
        engine.worker.poll()
        reports.extend(engine.worker.take_reports())
        side.reported([reports.pop(0)] if reports else [])
        return bool(side.matched(former, 0))

    until(is_promised, "the first block has come")
    side.allocated(former, (blocks,), 8 * BLOCK)
    made = [side.step(SchedulerOutput.make_empty())]
    former.status = RequestStatus.FINISHED_ABORTED
    if comes_back:
        side.arrived(request("b", tokens))
    else:
        side.finished(former, (blocks,))
    engine.worker.submit(made[0])

    def has_ended() -> bool:
        engine.worker.poll()
        side.reported([*reports, *engine.worker.take_reports()])
        reports.clear()
        made.append(side.step(SchedulerOutput.make_empty()))
        engine.worker.submit(made[-1])
        return not side.has_pending_work

    until(has_ended, "the end of the load")
    told = [block for step in made for block in step.unloaded.get("b", [])]
    assert told == ([] if comes_back else blocks[-len(told) :])
    assert comes_back or told
    engine.close()


def test_statistics_are_differences_that_add_up(engine: Engine) -> None:
    seconds = iter(range(0, 100, 2))
    delta = StatsDelta(engine.manager, lambda: float(next(seconds)))
    assert delta.take(0) is not None
    assert delta.take(0) is None
    engine.compute(request("a"), [3, 4, 5], fill=7)
    first = delta.take(0)
    engine.load(request("b"), [8, 9])
    second = delta.take(1)
    assert first is not None and second is not None
    assert first.data["blocks_backed_up"] == 2
    assert first.data["bytes_saved"] == 2 * 2 * PAGE
    assert second.data["host_hit_tokens"] == 2 * BLOCK
    assert "blocks_backed_up" not in second.data
    assert second.data["inconsistencies"] == 1
    total = FdcacheConnector.build_kv_connector_stats(first.data)
    assert isinstance(total, FdcacheStats) and not total.is_empty()
    summed = total.aggregate(second)
    assert summed.reduce()["blocks_backed_up"] == 2
    assert summed.reduce()["host_blocks_ready"] == second.data["host_blocks_ready"]


def test_statistics_of_the_last_steps_before_an_engine_is_idle_are_told_at_once(engine: Engine) -> None:
    delta = StatsDelta(engine.manager, lambda: 5.0)
    assert delta.take(0) is not None
    engine.compute(request("a"), [3, 4, 5], fill=7)
    assert not engine.side.has_requests
    assert delta.take(0) is None
    told = delta.take(0, is_idle=True)
    assert told is not None and told.data["blocks_backed_up"] == 2
    assert delta.take(0, is_idle=True) is None


def test_plans_that_end_without_anything_to_count_are_told(tmp_path: Path) -> None:
    """So does the hand-over of a request whose client has gone."""
    with Handing("prefill", tmp_path, "p") as prefill, Handing("decode", tmp_path, "d") as decode:
        delta = StatsDelta(decode.manager)
        decode.handovers.decline([prefill.source("unwanted")])
        (plan,) = decode.manager.take_plans()
        told = delta.take(0, is_idle=True)
        assert told is not None and told.data["plans_in_flight"] > 0
        decode.controller.submit_swap_tasks(plan)
        decode.until(lambda: decode.is_clean)
        told = delta.take(0, is_idle=True)
        assert told is not None and told.data["plans_in_flight"] == 0
        assert not told.is_empty()


def test_the_metrics_of_the_guide_exist() -> None:
    guide = (Path(__file__).parents[2] / "docs/vllm.md").read_text()
    named = set(re.findall(r"vllm:fdcache_(?!tier_)(\w+)", guide))
    registry = CollectorRegistry()
    kinds = {
        kind: functools.partial(kind, registry=registry)
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    }
    metrics = FdcacheMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    metrics.observe({"host_hit_tokens": 3, "host_blocks": 5})
    metrics.observe({"host_hit_tokens": 4, "host_blocks": 6})
    samples = {each.name: each.value for family in registry.collect() for each in family.samples}
    assert samples["vllm:fdcache_host_hit_tokens_total"] == 7
    assert samples["vllm:fdcache_host_blocks"] == 6
    there = {name.removeprefix("vllm:fdcache_") for name in samples}
    assert len(named) > 8
    assert named <= there | {name.removesuffix("_total") for name in there}


def test_one_wrong_byte_in_host_memory_costs_its_block_alone(engine: Engine) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    memory = host_memory(engine)
    (places,) = np.nonzero(memory == 7)
    memory[places[-1]] ^= 1  # a bit of the last plane of the second record
    assert engine.load(request("b"), [8, 9]) == 2 * BLOCK
    assert engine.content(8) == {7}
    assert engine.worker.take_bad_blocks() == {9}
    assert engine.manager.get_stats().counters.blocks_corrupt_in_host == 1
    assert engine.side.matched(request("c"), 0) == BLOCK


def test_reports_of_ranks_are_aggregated() -> None:
    first, second = (TransferReport(plan_id=7, rank=rank, results=()) for rank in (0, 1))
    ranks = [pickle.loads(pickle.dumps(WorkerReports([each]))) for each in (first, second)]  # noqa: S301
    assert ranks[0].aggregate(ranks[1]).reports == [first, second]


def test_a_request_is_received_when_the_last_of_its_plans_has_ended_in_any_order() -> None:
    arrivals = _Arrivals()
    for request_id in ("a", "a", "b"):
        arrivals.waits(request_id)
    arrivals.ended("a")
    assert arrivals.take() == set(), "more of it will be planned"
    arrivals.waits("a")
    arrivals.planned("a")
    arrivals.ended("a")
    assert arrivals.take() == set(), "an earlier plan is in flight"
    arrivals.ended("a")
    arrivals.planned("b")
    assert arrivals.take() == {"a"}
    arrivals.ended("b")
    arrivals.planned("never loaded")
    assert arrivals.take() == {"b", "never loaded"}
