"""ReuseReport: what tables of reuse say of each class; and how often an engine makes it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fdcache import _core
from fdcache.hashing import hash_blocks
from fdcache.metadata import CacheLevel
from fdcache.service.wire.client_views import ClientFigures
from fdcache.service.wire.views import ReuseView
from fdcache.tiers.reuse import GROUPS, RecentReuse, ReuseClass, ReuseReport, chance
from fdcache_cli.inspect_eviction import print_reuse, reuse_lines
from fdcache_cli.inspect_plot import plot_reuse
from tests.unit.test_inspect_plot import texts

BLOCK = 4


def report(policy: str = "learned", gap_ms: int = 20_000, output: int = 200) -> ReuseReport | None:
    """What a tier learns of a path of 4 blocks that is used 3 times."""
    tier = _core.Tier(8, policy)
    hashes = hash_blocks(list(range(4 * BLOCK)), BLOCK, parent=bytes(32))
    for step in range(3):
        tier.set_clock(gap_ms * step)
        lease = tier.open_lease()
        if not step:
            tier.commit(lease, bytes(32), hashes, tier.reserve(lease, 4).slots)
        tier.match(lease, hashes)
        tier.finish(lease, 4 * BLOCK, output, BLOCK)
    tier.set_clock(gap_ms * 3)
    tables = tier.reuse()
    return None if tables is None else ReuseReport.of(tables)


def learned() -> ReuseReport:
    found = report()
    assert found is not None
    return found


def test_every_group_counts_each_reuse_once() -> None:
    found = learned()
    (every,) = found.of_group("all")
    place = max(age for age, begin in enumerate(found.ages) if begin <= 20)
    assert every.reused[place] == pytest.approx(8, rel=0.02) and sum(every.reused) == every.reused[place]
    for group in [each for each in GROUPS if each not in ("hint", "path")]:
        classes = found.of_group(group)
        assert sum(sum(each.reused) for each in classes) == pytest.approx(sum(every.reused), rel=1e-3)
        assert sum(sum(each.seconds) for each in classes) == pytest.approx(sum(every.seconds), rel=1e-3)
    assert [each.name for each in found.of_group("output tokens")] == ["up to 512"]
    assert {each.name for each in found.of_group("role")} == {
        "end of a path, new",
        "end of a path, used before",
    }


def test_what_a_path_left_behind_is_a_class_of_its_own() -> None:
    tier = _core.Tier(16, "learned")
    for step, last in enumerate((3, 4, 4)):
        tier.set_clock(20_000 * step)
        hashes = hash_blocks([*range(2 * BLOCK), *[last] * BLOCK], BLOCK, parent=bytes(32))
        lease = tier.open_lease()
        found = tier.match(lease, hashes)
        parent = hashes[len(found) - 1].tobytes() if len(found) else bytes(32)
        taken = tier.reserve(lease, len(hashes) - len(found))
        tier.commit(lease, parent, hashes[len(found) :], taken.slots)
        tier.finish(lease, len(hashes) * BLOCK, 0, BLOCK)
    tables = tier.reuse()
    assert tables is not None
    (left,) = ReuseReport.of(tables).of_group("path")
    assert left.name == "left behind" and sum(left.reused) == 0
    # One block, last used 40 s ago, by whole ages.
    assert 30 <= sum(left.seconds) <= 60


def test_a_policy_that_does_not_learn_has_no_report() -> None:
    assert report("lru") is None


def test_the_chance_of_a_band_is_that_of_its_rate() -> None:
    found = ReuseClass("role", "x", [0.0, 4.0, 0.0], [1.0, 40.0, 0.0])
    bands = ReuseReport([0.0, 1.0, 11.0, 21.0], [found]).bands(2)
    assert [(begin, end) for begin, end, _ in bands] == [(0.0, 11.0), (11.0, 21.0)]
    assert chance(found, bands[0]) == pytest.approx(1 - np.exp(-4 / 41 * 11))
    assert chance(found, bands[1]) is None


@pytest.mark.parametrize(
    "reported",
    [
        "none",
        {"device": {"ages": [0, 1], "classes": [{"group": "g", "name": "n", "reused": [1], "seconds": []}]}},
        {"device": {"ages": [1, 0], "classes": []}},
        {"device": {"ages": [0, -1], "classes": []}},
    ],
)
def test_what_a_client_reports_may_be_nonsense(reported: Any) -> None:
    assert ClientFigures.of({"reuse": reported}).learned() == {}
    assert ClientFigures.of({"reuse": {"device": msgspec.to_builtins(learned())}}).learned() == {
        "device": learned()
    }


def test_an_engine_reads_its_tables_as_often_as_they_change() -> None:
    now, reads = 100.0, 0
    found = ReuseReport([0.0, 1.0], [])

    def read() -> dict[CacheLevel, ReuseReport]:
        nonlocal reads
        reads += 1
        return {CacheLevel.DEVICE: found}

    recent = RecentReuse(read, lambda: now)
    for _ in range(2):
        assert recent.recent() == {CacheLevel.DEVICE: found}
    assert reads == 2  # nothing was learned so far
    found = learned()
    assert recent.recent() == {CacheLevel.DEVICE: found}
    now += 15.9
    assert recent.recent() == {CacheLevel.DEVICE: found}
    assert reads == 3
    now += 0.2
    recent.recent()
    assert reads == 4


def test_the_table_has_a_row_for_each_class_and_a_column_for_each_age(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = learned()
    header, rows = reuse_lines(found)
    assert header[:5] == ["by", "class", "0s-3s", "3s-15s", "15s-1m"]
    assert [row[1] for row in rows] == [each.name for each in found.classes]
    assert all(len(row) == len(header) for row in rows)
    print_reuse([ReuseView("host", "service", "ab12", None), ReuseView("device", "one", "ab12", found)])
    shown = capsys.readouterr().out
    assert "host of service, namespace ab12: its order of eviction learns nothing" in shown
    assert "device of one, namespace ab12" in shown and "end of a path, new" in shown


def test_the_picture_has_a_panel_for_each_tier_that_learns(tmp_path: Any) -> None:
    views = [
        ReuseView("host", "service", "ab12", learned()),
        ReuseView("device", r"$\frac$", "ab12", learned()),
        ReuseView("storage", "service", "ab12", None),
    ]
    shown = texts(plot_reuse, views, tmp_path)
    assert {"host of service", r"device of $\frac$", "reuses of a block per hour", "blocks"} <= set(shown)
    assert "storage of service" not in shown
    assert any("no tier has learned" in text for text in texts(plot_reuse, views[2:], tmp_path))
