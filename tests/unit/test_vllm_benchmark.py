"""The benchmark of vLLM's connectors, as far as it needs no vLLM: order, faults on purpose, figures, tables, times."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import percentiles
from benchmarks.vllm import __main__ as benchmark
from benchmarks.vllm import grouped, timing
from benchmarks.vllm.driver import Answer, in_turn
from benchmarks.vllm.engines import (
    BESIDE,
    CONTROLS,
    NONE,
    RESTARTED,
    Places,
    StartError,
    arguments,
    make,
    probe,
)
from benchmarks.vllm.faults import corrupt, failing, made, spoiling
from benchmarks.vllm.meeting import Meeting
from benchmarks.vllm.processes import CutError, JobError, Processes, cause
from benchmarks.vllm.shapes import LOADS, SHAPES, model_folder
from benchmarks.vllm.steps import Times
from benchmarks.vllm.worker import Job
from fdcache_cli.slab_files import Damaged, read_file
from tests.storage_help import Records, open_store, path_hashes, storage_layout


def test_pages_have_the_sizes_that_the_shapes_are_for() -> None:
    assert SHAPES["8b"].page_bytes == 64 << 10
    assert SHAPES["70b-tp8"].page_bytes == 8 << 10
    assert SHAPES["8b"].token_bytes * 8192 == 1 << 30
    assert SHAPES["mla"].token_bytes == SHAPES["deepseek-v3"].token_bytes == 61 * (512 + 64) * 2


def test_a_hybrid_has_blocks_that_hold_a_state() -> None:
    """vLLM 0.26 says 1,040 tokens of Nemotron-H 8B, and a page that is 0.10% larger than a state."""
    shape = SHAPES["nemotron-h-8b"]
    assert shape.states is not None
    convolved, scanned = 3 * (128 * 64 + 2 * 8 * 128) * 2, 128 * 64 * 128 * 4
    assert (shape.states.layers, shape.states.nbytes) == (24, convolved + scanned)
    assert (shape.block, shape.page_bytes) == (1040, 1040 * 8 * 128 * 2 * 2)
    assert 1 < shape.page_bytes / shape.states.nbytes < 1.0015
    assert shape.loaded_bytes(2080) == 4 * 2 * shape.page_bytes + 24 * shape.page_bytes
    assert shape.options["mamba_cache_mode"] == "align"
    assert "block_size" not in shape.options
    assert SHAPES["8b"].loaded_bytes(16) == 16 * SHAPES["8b"].token_bytes


def test_a_step_of_every_shape_reaches_the_end_of_a_block() -> None:
    for shape in SHAPES.values():
        told = arguments(shape, Path("m"), device="cuda", eager=True)
        assert told["max_num_batched_tokens"] >= max(shape.block, told["max_num_seqs"])


def test_states_are_named_at_the_ends_of_blocks_alone() -> None:
    class MambaSpec(SimpleNamespace):
        pass

    class FullAttentionSpec(SimpleNamespace):
        pass

    groups = [SimpleNamespace(kv_cache_spec=kind(block_size=16)) for kind in (FullAttentionSpec, MambaSpec)]
    scheduler = SimpleNamespace(
        requests={"a": SimpleNamespace(num_computed_tokens=16)},
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda request: ([1, 2, 3], [0, 0, 7])),
    )
    assert list(grouped._states(scheduler, "a", 32)) == [(1, 7, 48)]
    assert list(grouped._states(scheduler, "a", 31)) == []


def test_models_with_states_have_the_connector_of_several_groups() -> None:
    places = Places(Path("none"), 1 << 20)
    for has_states, name in ((False, "FdcacheConnector"), (True, "GroupedConnector")):
        connector = make("fdcache", places, has_states=has_states).connector
        assert connector is not None
        assert connector["kv_connector"] == name


def test_a_model_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(SHAPES["tiny"], tmp_path)
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    assert model_folder(SHAPES["tiny"], tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files
    (folder / "config.json").write_text("{}")
    model_folder(SHAPES["tiny"], tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_conversation_comes_back_after_its_blocks_left_the_device(load: Any) -> None:
    shape = SHAPES["tiny" if load is LOADS["small"] else "8b"]
    turn = load.first_turn + load.reply
    assert load.conversations > 2 * load.in_flight
    assert (
        load.beside_prompts * load.beside_length + load.decoders * load.decoder_prompt
        > 16 * shape.device_blocks
    )
    if load in (LOADS["full"], LOADS["small"]):
        later = turn + (load.turns - 1) * (load.later_turn + load.reply)
        assert load.conversations * later > 16 * shape.device_blocks
    assert turn + (load.turns - 1) * (load.later_turn + load.reply) <= shape.longest


def test_the_engine_without_a_connector_is_first_and_last_and_the_others_rotate() -> None:
    names = [NONE, "a", "b", "c"]
    assert list(benchmark.order(names, 2, 1)) == [NONE, "b", "c", "a", "c", "a", "b", NONE]
    assert list(benchmark.order(names, 1, 0, once=True)) == [NONE, "a", "b", "c"]
    assert list(benchmark.order(["a"], 1, 3)) == ["a"]
    assert list(benchmark.order([NONE], 1, 0)) == [NONE]


@given(
    names=st.lists(st.sampled_from("abcde"), max_size=12),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_waves_are_all_engines_in_their_order_and_none_twice_at_a_time(
    names: list[str], sizes: list[int]
) -> None:
    found = list(benchmark.waves(names, sizes))
    assert [name for wave in found for name in wave] == names
    assert all(len(set(wave)) == len(wave) for wave in found)
    assert all(1 <= len(wave) <= sizes[min(at, len(sizes) - 1)] for at, wave in enumerate(found))


def test_every_engine_gets_the_same_host_memory(tmp_path: Path) -> None:
    places = Places(tmp_path, 3 << 30, {"FDCACHE_EVICTION": "lru"})
    for name in (*BESIDE, *RESTARTED, *CONTROLS):
        engine = make(name, places)
        text = json.dumps([engine.connector, engine.environment])
        if name == "fdcache-service":
            assert engine.environment["FDCACHE_SERVER"] == places.address
        elif name == "lmcache":
            assert engine.environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "3"
        elif name != NONE:
            assert str(3 << 30) in text
        assert ("FDCACHE_EVICTION" in engine.environment) == name.startswith(("fdcache", "least"))
        assert engine.environment.items() >= CONTROLS.get(name, {}).items()
    with pytest.raises(ValueError, match="no engine"):
        make("other", places)


def test_jobs_are_begun_in_their_order_so_many_at_a_time() -> None:
    running, most, begun = 0, 0, []

    async def job(index: int) -> Answer:
        nonlocal running, most
        begun.append(index)
        running += 1
        most = max(most, running)
        for _ in range(index % 3):
            await asyncio.sleep(0)
        running -= 1
        return Answer(0.0, [float(index)], [index], [], 0)

    found = asyncio.run(in_turn([partial(job, index) for index in range(9)], 3))
    assert [answer.tokens for answer in found] == [[index] for index in range(9)]
    assert begun == list(range(9))
    assert most == 3


def test_percentiles_of_nothing_are_not_numbers() -> None:
    assert percentiles([]) == {"count": 0}
    assert percentiles([1.0, 2.0, 3.0]) == {"p50": 2.0, "p99": 2.98, "max": 3.0, "count": 3}


# --- times ---------------------------------------------------------------------------------------------------


def test_times_of_all_processes_add_up_and_waiting_is_not_counted(tmp_path: Path) -> None:
    sums = timing.Sums(tmp_path)
    timing.timed(partial(time.sleep, 0.01), sums, "hooks_ns")()
    sums.add("steps", 2)
    sums.add("schedule_ns", 3_000_000)
    (tmp_path / "1.times").write_bytes(timing.FORMAT.pack(2, 1_000_000, 0, 0))
    found = timing.read(tmp_path)
    assert (found.steps, found.schedule_ns) == (4, 4_000_000)
    assert 0 < found.hooks_ns < 10_000_000
    assert (found - found).us_per_step == 0


def test_the_phases_of_a_load_are_between_its_events(tmp_path: Path) -> None:
    (tmp_path / timing.TRACING).touch()
    trace = timing.Trace(tmp_path)
    answers = iter([0, 16])
    match = timing.traced(lambda: next(answers), trace, "match", bool, renews=True)
    sent = time.perf_counter()
    assert [match(), match()] == [0, 16]
    trace.add("submit", 0)
    came = time.perf_counter()
    assert [name for name, _, _ in timing.events(tmp_path)] == ["match", "submit"]
    assert list(timing.phases(timing.events(tmp_path), sent, came)) == ["to match", "step"]
    found = [
        ("submit", 0.0, 0.9),
        ("arrival", 0.96, 0.97),
        ("match", 1.0, 1.1),
        ("submit", 1.1, 1.2),
        ("step", 1.2, 1.3),
    ]
    found += [("report", 1.4, 1.5), ("step", 1.6, 1.8), ("step", 2.0, 2.4)]
    times = timing.phases(found, 0.95, 2.0)
    assert list(times) == list(timing.PHASES)
    assert list(times.values()) == pytest.approx([20, 30, 200, 300, 300, 200])
    (tmp_path / timing.TRACING).unlink()
    trace.renew()
    assert not trace.is_wanted


def test_a_call_that_raises_is_timed_and_raises(tmp_path: Path) -> None:
    sums = timing.Sums(tmp_path)
    with pytest.raises(ZeroDivisionError):
        timing.timed(lambda: 1 / 0, sums, "update_ns")()
    assert timing.read(tmp_path).update_ns > 0


# --- processes -----------------------------------------------------------------------------------------------


def processes(tmp_path: Path, script: str, deadline: float | None = None) -> Processes:
    """Return processes whose interpreter runs a script instead of an engine."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return Processes(str(python), tmp_path, tmp_path / "logs", deadline, {"PATH": "/usr/bin:/bin"})


def test_results_come_as_they_are_written(tmp_path: Path) -> None:
    found = processes(tmp_path, """printf '{"part": "a"}\\n{"par'; printf 't": "b"}\\n'""")
    with found.started("x", Job("tiny", "small"), {}) as process:
        assert list(process.results()) == [{"part": "a"}, {"part": "b"}]


def test_an_engine_waits_for_orders_and_says_when_each_is_done(tmp_path: Path) -> None:
    script = """echo '{"part": "start"}'
while read -r order; do
echo "{\\"part\\": \\"got\\", \\"order\\": $order}"
echo '{"part": "done"}'; done; touch left"""
    with processes(tmp_path, script).started("x", Job("tiny", "small"), {}) as process:
        assert list(process.results("start")) == [{"part": "start"}]
        for order in ({"parts": ["chat"]}, {"ask": [{"settle": True}]}):
            assert list(process.order(order)) == [{"part": "got", "order": order}]
        process.leave(10)
        assert (tmp_path / "left").exists()


def test_an_engine_that_ends_before_it_is_ready_has_failed(tmp_path: Path) -> None:
    with (
        processes(tmp_path, "echo 'ValueError: no' >&2").started("x", Job("tiny", "small"), {}) as process,
        pytest.raises(JobError, match="ValueError: no"),
    ):
        list(process.results("start"))


def test_an_engine_that_does_not_become_ready_is_given_up(tmp_path: Path) -> None:
    with (
        processes(tmp_path, "exec sleep 600", time.monotonic() + 600).started(
            "x", Job("tiny", "small"), {}
        ) as process,
        pytest.raises(JobError, match=r"nothing for 0.1 s"),
    ):
        list(process.results("start", 0.1))


def test_an_order_to_an_engine_that_has_failed_names_the_cause(tmp_path: Path) -> None:
    script = """echo '{"part": "start"}'; exec 0<&-; echo 'TypeError: late' >&2; exit 1"""
    with processes(tmp_path, script).started("x", Job("tiny", "small"), {}) as process:
        assert list(process.results("start")) == [{"part": "start"}]
        with pytest.raises(JobError, match="TypeError: late"):
            list(process.order({"parts": ["chat"] * 100_000}))


def test_an_engine_that_fails_is_named_with_its_cause_after_its_results(tmp_path: Path) -> None:
    script = """echo '{"part": "a"}'; echo '(EngineCore pid=1) ERROR [core.py:1] Exception: no GPU' >&2
echo 'RuntimeError: failed. See root cause above.' >&2; exit 1"""
    with processes(tmp_path, script).started("x", Job("tiny", "small"), {}) as process:
        results = process.results()
        assert next(results) == {"part": "a"}
        with pytest.raises(JobError, match=r"^Exception: no GPU \(all of it in .*x\.log\)"):
            next(results)


def test_an_engine_is_ended_at_the_deadline_with_what_it_started(tmp_path: Path) -> None:
    script = """echo '{"part": "a"}'; sleep 600 & echo $! > child; wait"""
    with processes(tmp_path, script, time.monotonic() + 0.5).started(
        "x", Job("tiny", "small"), {}
    ) as process:
        results = process.results()
        assert next(results) == {"part": "a"}
        with pytest.raises(CutError):
            next(results)
    stat = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_the_cause_is_the_last_error_that_is_none_of_another() -> None:
    assert cause("") == "no output"
    assert cause("a\nb") == "b"
    assert cause("x ValueError: one\nTypeError: two\nRuntimeError: See root cause above") == "TypeError: two"


def test_an_interpreter_without_the_benchmark_is_one_line(tmp_path: Path) -> None:
    python = processes(tmp_path, "echo \"No module named 'benchmarks'\" >&2; exit 1").python
    with pytest.raises(StartError, match="python: No module named 'benchmarks'"):
        probe(python, {}, tmp_path)


# --- faults --------------------------------------------------------------------------------------------------


def test_the_middle_block_of_the_storage_is_corrupted(tmp_path: Path) -> None:
    layout = storage_layout()
    hashes = path_hashes(9)
    store = open_store(tmp_path, layout)
    assert store.put(Records(layout).full_batch(hashes, slots=range(9)), 10).ok.all()
    store.close()
    path = corrupt(tmp_path)
    found = read_file(path, verify=True)
    assert not isinstance(found, Damaged)
    (slot,) = found.corrupt.tolist()
    (index,) = np.flatnonzero(found.slots == slot)
    assert found.hashes[index].tobytes() == hashes[4].tobytes()


def test_a_folder_without_storage_cannot_be_corrupted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no slab file"):
        corrupt(tmp_path)


def meet(folder: Path, stages: int, arrived: Any) -> None:
    """Another run, which begins so many stages and leaves."""
    meeting = Meeting(folder, 2, lambda: None)
    for stage in range(stages):
        meeting.arrive()
        arrived.put(stage)
    meeting.leave()


def test_runs_begin_each_stage_together_and_wait_for_none_that_has_left(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    arrived: Any = processes.SimpleQueue()
    other = processes.Process(target=meet, args=(tmp_path, 2, arrived))
    meeting = Meeting(tmp_path, 2, lambda: None)
    other.start()
    for stage in range(2):
        assert arrived.empty()
        meeting.arrive()
        assert arrived.get() == stage
    meeting.arrive()  # the other begins no third
    other.join()
    assert other.exitcode == 0


def test_a_run_whose_time_is_over_waits_for_no_other(tmp_path: Path) -> None:
    Meeting(tmp_path, 2, lambda: 0.0).arrive()


def test_runs_that_share_a_device_measure_in_turn(tmp_path: Path) -> None:
    one, other = Meeting(tmp_path, 2, lambda: None), Meeting(tmp_path, 2, lambda: None)
    held, ended = threading.Event(), []

    def later() -> None:
        held.set()
        with other.turn():
            ended.append("other")

    thread = threading.Thread(target=later)
    with one.turn():
        thread.start()
        held.wait()
        thread.join(0.2)
        assert not ended
        ended.append("one")
    thread.join()
    assert ended == ["one", "other"]


def test_a_run_whose_time_is_over_waits_for_no_turn(tmp_path: Path) -> None:
    late = Meeting(tmp_path, 2, lambda: 0.0)
    with Meeting(tmp_path, 2, lambda: None).turn(), late.turn():
        pass


def test_copies_are_submitted_by_the_hook_that_a_connector_has() -> None:
    class Base:
        def bind_connector_metadata(self, metadata: object) -> None:
            raise NotImplementedError

    class Early(Base):
        def bind_connector_metadata(self, metadata: object) -> None:
            raise NotImplementedError

    class Late(Base):
        pass

    assert timing.hook_of("submit", Early, Base) == "bind_connector_metadata"
    assert timing.hook_of("submit", Late, Base) == "start_load_kv"


class Blocks:
    """The ids of a request's blocks, as the scheduler gives them."""

    def __init__(self, blocks: tuple[list[int], ...]) -> None:
        self.blocks = blocks

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.blocks


class Asked:
    """A request."""

    request_id = "r"


class Page:
    """A block of a layer."""

    is_clear = False

    def zero_(self) -> None:
        self.is_clear = True


class Connector:
    """The hooks of a connector that the faults use."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.kv_caches = kv_caches

    def get_num_new_matched_tokens(self, request: object, computed: int) -> tuple[int, bool]:
        return 64, True

    def update_state_after_alloc(self, request: object, blocks: Blocks, tokens: int) -> None:
        self.given = blocks.get_block_ids()

    def get_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


@pytest.fixture
def fault_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(timing.FOLDER, str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("fault_folder")
def test_the_first_load_fails_once_in_its_middle_when_it_has_finished() -> None:
    scheduler, worker = failing(Connector)(), failing(Connector)()
    scheduler.get_num_new_matched_tokens(Asked(), 32)
    scheduler.update_state_after_alloc(Asked(), Blocks(([9, 8, 7, 6, 5, 4],)), 64)
    worker.get_finished({"other"})
    assert worker.get_block_ids_with_load_errors() == set()
    assert not made()
    worker.get_finished({"r"})
    assert worker.get_block_ids_with_load_errors() == {5}
    assert made()
    worker.get_finished({"r"})
    assert worker.get_block_ids_with_load_errors() == set()


@pytest.mark.usefixtures("fault_folder")
def test_the_middle_block_of_the_first_load_is_cleared_in_all_layers() -> None:
    scheduler, worker = spoiling(Connector)(), spoiling(Connector)()
    layers = {str(layer): [Page() for _ in range(10)] for layer in range(2)}
    worker.register_kv_caches(layers)
    scheduler.get_num_new_matched_tokens(Asked(), 0)
    scheduler.update_state_after_alloc(Asked(), Blocks(([9, 8, 7],)), 0)
    worker.get_finished({"r"})
    assert not made()
    scheduler.update_state_after_alloc(Asked(), Blocks(([9, 8, 7],)), 48)
    worker.get_finished({"r"})
    assert made()
    for pages in layers.values():
        assert [block for block, page in enumerate(pages) if page.is_clear] == [8]


def test_the_least_time_of_each_step_counts_if_rounds_made_the_same_steps() -> None:
    first = Times(2, [4000, 1000], [1000, 1000], [0, 500])
    second = Times(2, [2000, 3000], [2000, 500], [0, 500])
    assert first.least(second).us_per_step() == [2.5, 1.5, 0.75, 0.25]
    other = Times(3, [100, 100, 100], [0, 0, 0], [0, 0, 0])
    assert first.least(other) is other and other.least(first) is other


@pytest.mark.parametrize(("device", "is_left_out"), [("cpu", True), ("cuda", False)])
def test_an_engine_that_caches_nothing_on_a_cpu_is_left_out_there(
    device: str, is_left_out: bool, tmp_path: Path
) -> None:
    found = json.dumps(dict.fromkeys((*BESIDE, *RESTARTED, *CONTROLS)))
    python = processes(tmp_path, f"echo '{found}'").python
    reasons = probe(python, {}, tmp_path, device)
    assert [name for name, why in reasons.items() if why] == (["lmcache"] if is_left_out else [])
    assert not is_left_out or "CPU" in str(reasons["lmcache"])
