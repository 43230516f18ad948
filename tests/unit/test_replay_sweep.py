"""Results of a sweep: hit rates by policy, the share of the gap to the optimum, failures, and the picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from fdcache.errors import ReplayError
from fdcache.replay.capacities import Capacities
from fdcache.replay.config import VerifyBytes, device_block_bytes
from fdcache.replay.parallel import PointFailure
from fdcache.replay.points import PointResult
from fdcache.replay.sweep import Sweep, SweepConfig, SweepPoint, run_sweep
from fdcache.replay.sweep_plot import write_sweep_plot
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.tiers.host import host_block_bytes
from tests.replay_help import small_config


def result(hits: int) -> PointResult:
    return PointResult(
        requests=1,
        rejected=0,
        prompt_tokens=1000,
        hit_tokens={"device": hits, "host": 0},
        evictions=0,
        host_evictions=0,
        verified_blocks=0,
        corrupt_blocks=0,
    )


def sweep_config(text: str, **options: Any) -> SweepConfig:
    return SweepConfig(small_config(host_memory=0, verify=VerifyBytes.OFF), Capacities.parse(text), **options)


def test_the_gap_closed_is_the_way_from_lru_to_the_optimum() -> None:
    point = SweepPoint(1, 1, {"lru": result(200), "better": result(350), "worse": result(100)}, optimum=0.8)
    assert point.gap_closed("better") == pytest.approx(0.25)
    assert point.gap_closed("worse") == pytest.approx(-1 / 6)
    assert point.gap_closed("lru") == 0
    assert point.gap_closed("absent") is None
    assert SweepPoint(1, 1, {"lru": result(800), "better": result(800)}, 0.8).gap_closed("better") is None
    assert SweepPoint(1, 1, {"better": result(800)}, 0.8).gap_closed("better") is None
    assert SweepPoint(1, 1, {"lru": result(1), "better": result(800)}).gap_closed("better") is None


def test_a_sweep_of_device_blocks_has_a_point_for_each_capacity() -> None:
    config = sweep_config("device-blocks=400,100..200/2", optimum=True)
    items = list(generate(WorkloadName.CHAT, 80, 0))
    seen: list[tuple[str, int, int]] = []
    sweep = run_sweep(items, config, on_progress=lambda *progress: seen.append(progress))
    block = device_block_bytes(config.replay.layout)
    assert [(point.blocks, point.memory) for point in sweep.points] == [
        (blocks, blocks * block) for blocks in (100, 200, 400)
    ]
    rates = [point.hit_rate("lru") for point in sweep.points]
    optima = [point.optimum for point in sweep.points]
    assert rates == sorted(set(rates), key=lambda rate: rate or 0)
    assert all(rate and best and rate <= best for rate, best in zip(rates, optima, strict=True))
    assert sweep.clean
    assert not sweep.interrupted
    assert seen[-1] == ("sweep", 4 * 80, 4 * 80)
    assert {name for name, _, _ in seen} == {
        "sweep",
        "optimum",
        *(f"lru, {blocks} device blocks" for blocks in (100, 200, 400)),
    }


def test_a_sweep_of_host_memory_counts_both_tiers_for_the_optimum() -> None:
    block = host_block_bytes(small_config().layout)
    config = sweep_config(f"host-memory=0,{50 * block},{1000 * block}", optimum=True)
    items = list(generate(WorkloadName.CHAT, 80, 0))
    sweep = run_sweep(items, config)
    assert [(point.blocks, point.memory) for point in sweep.points] == [
        (blocks, blocks * block) for blocks in (0, 50, 1000)
    ]
    both = run_sweep(items, sweep_config("device-blocks=200,250,1200", optimum=True))
    assert [point.optimum for point in sweep.points] == [point.optimum for point in both.points]
    first, last = (sweep.points[at].policies["lru"] for at in (0, 2))
    assert isinstance(first, PointResult)
    assert isinstance(last, PointResult)
    assert first.hit_tokens["host"] == 0 < last.hit_tokens["host"]


def test_processes_find_what_one_finds_and_a_failure_stays_alone() -> None:
    items = list(generate(WorkloadName.RAG, 60, 4))
    found = []
    for jobs in (1, 2):
        sweep = run_sweep(items, sweep_config("device-blocks=1,150,300", optimum=True, jobs=jobs))
        assert not sweep.clean
        ((where, reason),) = sweep.failures
        assert where == "lru, 1 device blocks"
        assert "each of the 60 requests is larger than the device tier" in reason
        assert sweep.points[0].policies == {"lru": PointFailure(reason)}
        found.append([point.to_dict() for point in sweep.points])
    assert found[0] == found[1]
    assert [point["policies"]["lru"]["hit_rate"] > 0 for point in found[0][1:]] == [True, True]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_stopped_sweep_keeps_the_points_that_have_ended(jobs: int) -> None:
    items = list(generate(WorkloadName.CHAT, 30, 0))
    ended: list[str] = []

    def note(name: str, done: int, total: int) -> None:
        if name != "sweep" and done == total:
            ended.append(name)

    many = sweep_config("device-blocks=100..400/20", jobs=jobs)
    sweep = run_sweep(items, many, on_progress=note, should_stop=lambda: bool(ended))
    assert sweep.interrupted
    assert 0 < sum(bool(point.policies) for point in sweep.points) < 20
    assert sweep.points[-1].to_dict()["policies"] == {}


class Policies(StrEnum):
    """Policies to draw; no cache has the second."""

    LRU = "lru"
    OTHER = "other"


def drawn(*points: SweepPoint, text: str = "device-blocks=1") -> Sweep:
    return Sweep(sweep_config(text, policies=tuple(Policies)), points)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_has_a_line_for_each_policy_and_the_optimum(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    points = [
        SweepPoint(size, size, {"lru": result(size // 2), "other": result(size)}, optimum=0.9)
        for size in (100, 200, 800)
    ]
    path = tmp_path / f"sweep.{suffix}"
    write_sweep_plot(drawn(*points), path)
    if suffix == "png":
        with Image.open(path) as image:
            assert image.size == (700, 420)
            colors = {color for _, color in image.convert("RGB").getcolors(1 << 24) or ()}
        assert {(0, 0, 0), (0x0B, 0x53, 0x94), (0xB4, 0x5F, 0x06)} <= colors
    elif suffix == "svg":
        words = path.read_text()
        for word in (
            "lru",
            "other",
            "optimum (Belady)",
            "device memory",
            "device blocks of 64 tokens",
            "800",
        ):
            assert f"<!-- {word} -->" in words
    else:
        assert path.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    "points",
    [
        [SweepPoint(100, 1, {"lru": PointFailure("no memory")}), SweepPoint(200, 2, {})],
        [SweepPoint(0, 0, {"lru": result(5)}, 0.3), SweepPoint(2**30, 9, {"other": result(7)}, 0.4)],
        [SweepPoint(2**30, 9, {"lru": result(5)}, 0.3)],
    ],
)
def test_a_picture_of_few_points_is_drawn(tmp_path: Path, points: list[SweepPoint]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.svg"
    write_sweep_plot(drawn(*points, text="host-memory=0"), path)
    assert "host memory" in path.read_text()


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ReplayError, match=r"--plot: .* cannot be written: Is a directory"):
        (tmp_path / "taken.png").mkdir()
        write_sweep_plot(drawn(SweepPoint(1, 1, {"lru": result(5)})), tmp_path / "taken.png")
