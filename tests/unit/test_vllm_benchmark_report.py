"""Tables of the benchmark of vLLM's connectors, and the comparison of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm import __main__ as benchmark
from benchmarks.vllm import report
from benchmarks.vllm.comparisons import Comparisons
from benchmarks.vllm.engines import NONE, Places
from benchmarks.vllm.report import Results
from benchmarks.vllm.shapes import SHAPES

# --- figures -------------------------------------------------------------------------------------------------


def records() -> list[dict[str, Any]]:
    """Return the records of a run with two engines beside none."""
    found: list[dict[str, Any]] = [
        {"shape": "8b", "part": "link", "device": "x", "bytes": 1 << 20, "ms": 1.0}
    ]
    for engine, loaded, seconds in ((NONE, None, 10.0), ("offloading", 30.0, 10.4), ("fdcache", 22.0, 10.05)):
        single: dict[str, Any] = {
            "part": "single",
            "computed_ms": [200.0],
            "device_ms": [10.0],
            "tokens": [[1]],
        }
        if loaded:
            single |= {"loaded_ms": [loaded, loaded, 99.0], "loaded_cached": [16], "loaded_bytes": 10 << 20}
            single |= {"wrong": 0}
        found += [
            {"shape": "8b", "engine": engine, **single},
            {"shape": "8b", "engine": engine, "part": "unique", "seconds": seconds},
        ]
    return found


def test_ratios_are_of_medians_and_means_of_runs() -> None:
    again = {"shape": "8b", "engine": NONE, "part": "unique", "seconds": 10.1}
    aims = {aim.name: aim for aim in report.targets(Results([*records(), again]), "8b")}
    first = aims["first token from the host / (bytes over the link + a step)"]
    assert first.value == pytest.approx(22 / 20) and not first.is_met
    assert aims["first token from the host beyond a step: fdcache / offloading"].value == pytest.approx(
        12 / 20
    )
    assert aims["unique prompts: fdcache / none"].value == pytest.approx(10.05 / 10.05)
    assert aims["TTFT p50 after a restart: fdcache-storage / tiering"].is_met is None


def test_a_run_that_was_cut_has_tables_of_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records()))
    assert benchmark.main(["--report", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "one prompt at a time" in printed and "unique prompts (8b, pages of 64 KiB)" in printed
    assert "conversations, ms" not in printed


def test_wrong_tokens_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(one | {"wrong": 2}) + "\n" for one in records()))
    assert benchmark.main(["--report", str(path)]) == 1
    assert "fdcache gave other tokens 2 times from the host" in capsys.readouterr().err


def test_hits_that_come_sooner_than_their_bytes_fail_the_run() -> None:
    fast = {"shape": "8b", "engine": "other", "part": "single", "loaded_ms": [9.0], "loaded_bytes": 10 << 20}
    (fault,) = report.faults(Results([*records(), fast]))
    assert fault.startswith("8b: other had the first token after 9.0 ms, and its bytes take 10.0 ms")


class Kept:
    """Keeps the records of comparisons."""

    places = Places(Path(), 1 << 40)

    def __init__(self) -> None:
        self.added: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any]) -> None:
        self.added.append(record)


@pytest.mark.parametrize(
    ("change", "equal", "is_right"),
    [
        ({}, True, True),
        ({"tokens": [1, 3]}, True, False),
        ({"logprobs": [-1.0, -2.001]}, True, False),
        ({"cached": 16}, True, False),
        ({"logprobs": [-1.0, -2.001]}, False, True),
        ({}, False, False),
    ],
)
def test_answers_are_compared_by_tokens_logprobs_and_what_was_cached(
    change: dict[str, Any], equal: bool, is_right: bool
) -> None:
    wanted = {"tokens": [1, 2], "logprobs": [-1.0, -2.0], "cached": 32}
    kept: Any = Kept()
    Comparisons(kept, SHAPES["tiny"]).expect("x", wanted | change, wanted, equal=equal)
    (record,) = kept.added
    assert record["is_right"] is is_right
    assert list(report.faults(Results([record]))) == ([] if is_right else ["tiny: x"])
    assert "right tokens" in (report.compared([record]) or "")
    assert "x" in report.line(record)


def test_a_plot_needs_conversations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        report.plot(Results(records()), tmp_path / "x.svg")
    figures = {"p50": 10.0, "p99": 20.0}
    chat = {"shape": "8b", "engine": "fdcache", "part": "chat", "ttft_ms": {"later": figures}}
    report.plot(Results([chat]), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 1000


def test_agents_are_compared_at_equal_users_and_tiers() -> None:
    def one(engine: str, share: float | None, p50: float, rate: float) -> dict[str, Any]:
        later = {"p50": p50, "p99": 2 * p50, "count": 9}
        head = {"shape": "8b", "engine": engine, "part": "agents", "users": 8, "share": share}
        return head | {
            "ttft_ms": {"later": later},
            "itl_ms": {"p50": 5.0, "p99": 9.0},
            "requests_per_s": rate,
            "cached_tokens": 90,
            "ceiling_tokens": 100,
        }

    measured = [one(NONE, None, 50.0, 4.0), one("offloading", 0.5, 80.0, 5.0), one("fdcache", 0.5, 60.0, 6.0)]
    aims = list(report.agent_targets(measured))
    assert [aim.value for aim in aims] == pytest.approx([60 / 50, 60 / 50, 6 / 5])
    assert [aim.is_met for aim in aims] == [False, False, True]
    text = "\n".join(report.report(Results(measured)))
    assert "90.0%" in text and "8 users, host tier 0.5" in text
