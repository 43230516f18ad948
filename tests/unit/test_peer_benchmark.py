"""The benchmark beside other engines: traffic, what is missing, and the figures that are made of what was measured."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import setup
from benchmarks.peers.environments import (
    ENVIRONMENTS,
    MARKER,
    PEERS,
    MissingError,
    build_minimal,
    default_home,
    interpreter,
    requirements,
    version,
)
from benchmarks.peers.report import Figures, Target, faults, table, tables, targets
from benchmarks.peers.rounds import Cost, fastest
from benchmarks.peers.scenarios import Memory, Slice
from benchmarks.peers.traffic import Traffic, record
from fdcache.replay.workloads import WorkloadName, generate

VLLM = next(peer for peer in PEERS if peer.name == "vllm")


def make_environment(home: Path, environment: str, pins: str) -> Path:
    """Make the files by which an environment is found; its Python is empty."""
    python = home / environment / "bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    (home / environment / MARKER).write_text(pins)
    return python


# --- traffic ------------------------------------------------------------------------------------------------


def test_traffic_has_the_tokens_of_its_workload(tmp_path: Path) -> None:
    items = list(generate(WorkloadName.CHAT, 20, 3))
    assert record(items, tmp_path) == 20
    traffic = Traffic.load(tmp_path)
    assert len(traffic) == 20
    for index, item in enumerate(items):
        prompt, output = traffic.request(index)
        assert (
            traffic.lengths(index) == (len(prompt), len(output)) == (item.prompt_length, item.output_length)
        )
        assert [*prompt, *output] == item.tokens(0).tolist()
    assert traffic.longest == max(item.prompt_length + item.output_length for item in items)


def test_without_a_trace_chats_are_generated_and_named_so(tmp_path: Path) -> None:
    assert peers.write_traffic(None, 5, tmp_path).startswith("5 requests of generated chats")
    assert len(Traffic.load(tmp_path)) == 5


def test_a_trace_is_cut_to_the_requests_asked_for(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]})
    (tmp_path / "t.jsonl").write_text(f"{line}\n" * 4)
    assert peers.write_traffic(tmp_path / "t.jsonl", 3, tmp_path) == "3 requests of t.jsonl"


@pytest.mark.parametrize(
    ("text", "words"), [(None, "cannot be read"), ("", "has no request"), ("x", "line 1")]
)
def test_a_trace_that_cannot_be_used_is_one_line(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "t.jsonl").write_text(text)
    assert peers.main(["--trace", str(tmp_path / "t.jsonl"), "--peers", "fdcache-int32"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "t.jsonl" in line
    assert words in line


# --- what is missing ----------------------------------------------------------------------------------------


def test_a_missing_environment_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(
        MissingError, match=r"no environment .*vllm: run python -m benchmarks.peers.setup --home"
    ):
        interpreter(tmp_path, "vllm")


def test_an_environment_with_other_versions_is_not_used(tmp_path: Path) -> None:
    python = make_environment(tmp_path, "vllm", requirements("vllm").read_text())
    assert interpreter(tmp_path, "vllm") == python
    (tmp_path / "vllm" / MARKER).write_text("vllm==0.1.0\n")
    with pytest.raises(MissingError, match="other versions"):
        interpreter(tmp_path, "vllm")


def test_the_environments_are_in_the_cache_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_home() == tmp_path / "fdcache-peers"
    with pytest.raises(MissingError, match=r"run python -m benchmarks.peers.setup$"):
        interpreter(default_home(), "sglang")


def test_peers_that_cannot_run_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = peers.runnable(None, tmp_path)
    assert {peer.adapter for peer in found} == {"fdcache"}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in lines] == [peer.name for peer in PEERS if peer not in found]
    assert "install g++" in lines[-1]


def test_a_peer_that_was_asked_for_has_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--peers", "vllm", "--quick", "--home", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("there is no environment")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("#include <absent/xxhash.h>\n", "install libxxhash-dev"),
        ("int main( {\n", r"list.cpp does not compile with"),
    ],
)
def test_code_that_does_not_compile_names_the_remedy(code: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "list.cpp").write_text(code)
    try:
        with pytest.raises(MissingError, match=words):
            build_minimal(tmp_path, tmp_path / "list.cpp")
    finally:
        assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_package_has_one_exact_version_and_no_address(environment: str) -> None:
    lines = [line for line in requirements(environment).read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "://" not in line and "@" not in line for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert len(set(names)) == len(names)
    assert {"torch", environment} <= set(names)
    assert version(next(peer for peer in PEERS if peer.environment == environment))


def test_setup_leaves_complete_environments_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for environment in ENVIRONMENTS:
        make_environment(tmp_path, environment, requirements(environment).read_text())
    assert setup.main(["--home", str(tmp_path)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(ENVIRONMENTS)
    assert not any((tmp_path / environment / "bin/pip").exists() for environment in ENVIRONMENTS)


def test_setup_refuses_an_unknown_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        setup.main(["vlm", "--home", str(tmp_path)])
    assert "no environment vlm: there are vllm, sglang" in capsys.readouterr().err


@pytest.mark.slow
def test_setup_without_an_index_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert setup.main(["vllm", "--home", str(tmp_path)]) == 1
    assert "vllm: pip failed: ERROR: No matching distribution" in capsys.readouterr().err
    with pytest.raises(MissingError):
        interpreter(tmp_path, "vllm")


# --- figures ------------------------------------------------------------------------------------------------


def test_of_each_call_the_least_time_counts() -> None:
    rounds = [
        Slice({"hash": [5, 90], "free": [1]}, left_out_ns=7, requests=2, prompt_tokens=10, hit_tokens=4),
        Slice({"hash": [80, 6], "free": [2]}, left_out_ns=9, requests=2, prompt_tokens=10, hit_tokens=4),
    ]
    assert fastest(rounds) == Cost(Counter(hash=11, free=1), 7, 2, 10, 4)


@pytest.mark.parametrize("other", [Slice(requests=1), Slice(prompt_tokens=1), Slice(hit_tokens=1)], ids=repr)
def test_slices_of_different_work_are_not_compared(other: Slice) -> None:
    with pytest.raises(ValueError, match="different work"):
        fastest([Slice(), other])


def test_costs_of_one_slice_after_the_other_add_up() -> None:
    first = Cost(Counter(hash=3000), 100, 1, 10, 5)
    second = Cost(Counter(hash=1000, free=2000), 50, 3, 30, 25)
    both = sum([first, second], Cost())
    assert both == Cost(Counter(hash=4000, free=2000), 150, 4, 40, 30)
    assert (both.us(), both.us("free"), both.us_without_hashing, both.hit_rate) == (1.5, 0.5, 0.5, 0.75)


def test_a_target_that_was_not_measured_is_neither_met_nor_missed() -> None:
    assert [Target("x", value, 2, True).is_met for value in (None, 1.9, 2, 3)] == [None, False, True, True]
    assert [Target("x", value, 2, False).is_met for value in (None, 1.9, 2, 3)] == [None, True, True, False]


def cost(hashing: int, rest: int, hits: int = 5) -> Cost:
    return Cost(Counter(hash=hashing, match=rest), requests=1, prompt_tokens=10, hit_tokens=hits)


def measured(hits: int = 5) -> Figures:
    replays = {
        "vllm": cost(1000, 500),
        "sglang": cost(0, 400),
        "fdcache-int32": cost(20, 30, hits),
        "fdcache-list": cost(70, 30),
        "minimal": cost(5, 20),
    }
    return Figures(
        {10: replays, 100: {"fdcache-int32": cost(25, 50)}},
        {"vllm": 1500.0, "fdcache-int32": 30.0, "minimal": 20.0},
        {"vllm": cost(9, 6000, 10), "fdcache-int32": cost(7, 100, 10)},
        {"fdcache-int32": Memory(150, 96)},
    )


def test_the_ratios_are_those_of_the_figures() -> None:
    found = [(aim.name, round(aim.value or 0, 9), aim.is_met) for aim in targets(measured(), 10, 100)]
    assert found == [
        ("a request, int32 tokens: vLLM / fdcache", 30, True),
        ("a request, lists: vLLM / fdcache", 15, True),
        ("a request: SGLang / fdcache", 8, True),
        ("a request without hashing: fdcache / minimal", 1.5, True),
        ("a decode step of 256: vLLM / fdcache", 50, True),
        ("a decode step of 256: fdcache / minimal", 1.5, False),
        ("a cached prompt without hashing: vLLM / fdcache", 60, True),
        ("a request, 100 blocks / 10 blocks", 1.5, False),
        ("bytes of an entry beside its hash", 96, True),
    ]
    assert {aim.value for aim in targets(Figures(), 10, 100)} == {None}


def test_hits_that_differ_from_the_minimal_list_are_a_fault() -> None:
    assert list(faults(measured())) == []
    (fault,) = faults(measured(hits=4))
    assert fault == "fdcache-int32 hits 40.0% with 10 blocks, minimal 50.0%"


def test_a_cached_prompt_that_is_not_found_is_a_fault() -> None:
    assert list(faults(Figures(hits={"vllm": cost(1, 1, hits=9)}))) == ["vllm found 9 of 10 cached tokens"]


def test_the_tables_show_every_figure_and_verdict() -> None:
    figures = measured()
    text = "\n\n".join(tables(figures, targets(figures, 10, 100)))
    assert "| us per request, 10 blocks | hash | match | total | without hash | left out | hit rate |" in text
    row = next(line for line in text.splitlines() if line.startswith("| a decode step of 256: fdcache"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["1.50", "at most 1.3", "not met"]


def test_every_line_of_a_table_has_the_same_width() -> None:
    lines = table(["name", "us"], [["a", "1.0"], ["a long one", "12.5"]]).splitlines()
    assert lines[0] == "| name       |   us |"
    assert lines[1] == "| ---------- | ---: |"
    assert {len(line) for line in lines} == {len(lines[0])}


def test_json_has_what_the_tables_have() -> None:
    found = json.loads(json.dumps(measured().as_json()))
    assert found["us_per_request"]["10"]["vllm"]["total"] == 1.5
    assert found["us_per_decode_step"]["minimal"] == 20
    assert found["bytes_per_block"] == {"fdcache-int32": {"resident": 150, "counted_beside_hash": 96}}
    assert set(itertools.chain(*(costs for costs in found["us_per_request"].values()))) == set(
        measured().replays[10]
    )
