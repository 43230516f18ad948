"""The benchmark of vLLM's connectors: sessions of agents, and where the time between tokens goes; without vLLM."""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm import __main__ as benchmark
from benchmarks.vllm import agents, timeline, timing
from benchmarks.vllm.engines import NONE, Places
from benchmarks.vllm.shapes import LOADS, LONGEST, SHAPES

# --- agents --------------------------------------------------------------------------------------------------


def written(path: Path, *requests: tuple[int, int, int, list[int]]) -> Path:
    """Write a trace: time in ms, tokens of prompt and answer, and ids of each request."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    text = "".join(json.dumps(dict(zip(names, request, strict=True))) + "\n" for request in requests)
    with lzma.open(path, "wt") as file:
        file.write(text)
    return path


LOAD = agents.AgentLoad(divisor=2, requests=3, gap=0.1, longest_gap_s=2.0)


def test_sessions_keep_their_ids_and_shrink_alike(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "t.jsonl.xz",
        (0, 128, 10, [1, 2]),
        (500, 64, 1, [9]),
        (10_000, 190, 4, [1, 2, 3]),
        (90_000, 256, 4, [1, 2, 3, 4]),
        (90_500, 64, 1, [9]),
    )
    first, second = agents.read_sessions(trace, LOAD, longest=1000)
    assert [(step.length, step.output) for step in first] == [(64, 5), (95, 2), (128, 2)]
    assert [step.gap_s for step in first] == [0, 1.0, 2.0]
    assert len(second) == 2
    # A session ends before the request that does not fit, and whatever it has later.
    assert [len(steps) for steps in agents.read_sessions(trace, LOAD, longest=97)] == [2, 2]
    assert agents.users_of([first, second], 3) == [first, second, first]


def test_the_ceiling_is_what_a_cache_without_an_end_finds(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "t.jsonl.xz",
        (0, 128, 1, [1, 2]),  # 64 tokens: 4 blocks
        (0, 128, 1, [1, 2]),  # all of them but the last, which has the last token
        (0, 128, 1, [1, 5]),  # 2 found, 2 others
    )
    played = agents.read_sessions(trace, LOAD, longest=1000)
    bounds = agents.Bounds.of([*played, *played], LOAD)
    assert (bounds.prompt_tokens, bounds.ceiling, bounds.working_set) == (2 * 192, 2 * (48 + 32), 2 * 96)


def test_the_ceiling_is_that_of_the_tokens(tmp_path: Path) -> None:
    load = agents.AgentLoad(divisor=64, requests=9, gap=0.0, longest_gap_s=0.0)
    ids = list(range(1, 101))
    trace = written(tmp_path / "t.jsonl.xz", (0, 6_400, 1, ids), (0, 6_000, 1, [*ids[:50], *range(500, 544)]))
    (played,) = agents.read_sessions(trace, load, longest=1000)
    one, other = (agents.prompt_of(step, 0, load, 512).tolist() for step in played)
    same = next(at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    assert agents.Bounds.of([played], load).ceiling == same // 16 * 16 == 48
    assert min(one) >= 3 and max(one) < 512
    assert agents.prompt_of(played[0], 1, load, 512).tolist() != one


def test_the_device_shrinks_with_the_contexts_and_takes_one_that_fills_it() -> None:
    shape = agents.shape_of(SHAPES["8b"], agents.AGENTS["brief"])
    assert (shape.device_blocks, shape.longest) == (2048, 2047 * 16)
    assert agents.shape_of(SHAPES["8b"], agents.AGENTS["full"]).longest <= LONGEST
    assert all(agents.ID_TOKENS % load.divisor == 0 for load in agents.AGENTS.values())
    assert agents.AGENTS.keys() == LOADS.keys()


def test_a_run_without_a_trace_says_so(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []

    class Silent:
        options = benchmark.parse(["--device", "cpu", "--trace", str(tmp_path / "absent")])
        add = said.append

    assert not list(benchmark.played(Silent, SHAPES["tiny"]))  # type: ignore[arg-type]
    assert [record["part"] for record in said] == ["skipped"]
    assert "absent" in said[0]["why"] and "--trace" in said[0]["why"]


def test_host_tiers_are_shares_of_what_is_different_and_the_engine_without_one_plays_once(
    tmp_path: Path,
) -> None:
    trace = written(tmp_path / "t.jsonl.xz", (0, 128, 1, [1, 2]), (0, 128, 1, [1, 2]))
    shape, load = SHAPES["8b"], agents.AGENTS["short"]
    # A prompt of 128 tokens, divided, of each of 3 users.
    different = 3 * 128 // load.divisor
    play = agents.Play.of(shape, "short", trace, 3)
    assert play.host_bytes(0.5) == different // 2 * shape.token_bytes
    labels = play.order(0.5)["agents"]["labels"]
    assert (labels["users"], labels["share"], labels["working_set_tokens"]) == (3, 0.5, different)
    begun: list[tuple[list[str], int]] = []

    class Recorded:
        options = benchmark.parse(["--shares", "0.5", "1", "--together", "9"])
        places = Places(tmp_path, 1)

        @contextmanager
        def started(self, shape: Any, names: list[str], places: Places) -> Iterator[dict[str, Any]]:
            begun.append((names, places.host_bytes))
            yield {}

    benchmark.Run.agents(Recorded(), shape, ["fdcache", NONE], play)  # type: ignore[arg-type]
    assert begun == [(["fdcache", NONE], play.host_bytes(0.5)), (["fdcache"], play.host_bytes(1))]


# --- where the time between tokens goes ------------------------------------------------------------------------


class Mark:
    """Stands for an event of the device, whose clock runs 5 s behind."""

    now = 100.0

    def __init__(self) -> None:
        self.at = Mark.now

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.at <= Mark.now

    def elapsed_time(self, later: Mark) -> float:
        return (later.at - self.at) * 1000


class Scheduled:
    total_num_scheduled_tokens = 9
    num_scheduled_tokens = {"a": 8, "b": 1}  # noqa: RUF012


class Output:
    def get_output(self) -> str:
        Mark.now += 0.5
        return "answer"


def test_a_step_is_written_down_when_its_answer_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline.Forwards, "_mark", staticmethod(Mark))
    monkeypatch.setattr(time, "perf_counter", lambda: Mark.now + 5)
    monkeypatch.setattr(Mark, "now", 100.0)
    trace = timing.Trace(tmp_path)
    forwards = timeline.Forwards(trace)

    def work(*_: Any) -> None:
        Mark.now += 2.0

    execute, sample = forwards.execute(work), forwards.sample(Output)
    execute(None, Scheduled())
    assert sample().get_output() == "answer" and not timeline.forwards(tmp_path)
    trace.is_wanted = True
    execute(None, Scheduled())
    assert sample().get_output() == "answer"
    assert timeline.forwards(tmp_path) == [timeline.Forward(9, 2, 107.5, 107.5, 109.5, 110.0)]


def test_the_time_between_answers_is_waiting_work_and_the_way_of_the_answer() -> None:
    steps = [timeline.Forward(8, 8, at, at, at + 0.005, at + 0.006) for at in (0.0, 0.010, 0.030)]
    steps.append(timeline.Forward(24, 9, 0.035, 0.040, 0.060, 0.066))
    events = [("match", 0.0, 0.011), ("match", 0.0, 0.012), ("report", 0.02, 0.025), ("report", 0.03, 0.031)]
    spans = timeline.loads(events)
    assert spans == [(0.011, 0.025)]
    found = timeline.intervals(steps, spans, 0.0, 1.0, decoders=8)
    assert [one["kind"] for one in found] == ["beside a load", "beside a load", "a prompt's step"]
    assert [one["interval"] for one in found] == pytest.approx([10, 20, 30])
    assert [one["idle"] for one in found] == pytest.approx([5, 15, 5])
    assert [one["work"] for one in found] == pytest.approx([5, 5, 20])
    assert [one["answer"] for one in found] == pytest.approx([1, 1, 6])
    assert timeline.intervals(steps, [], 0.02, 1.0, 8)[0]["kind"] == "a prompt's step"
    told = timeline.timeline(found)
    assert told["kinds"]["beside a load"]["interval"]["count"] == 2
    assert [one["interval"] for one in told["slowest"]] == pytest.approx([30, 20, 10])
