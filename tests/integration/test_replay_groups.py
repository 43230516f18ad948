"""Replays of models with windows, chunks and states: every byte compared, with faults, ranks, storage and a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import ReplayOptionError
from fdcache.groups import CacheGroup, PageColumns, Reach
from fdcache.manager import Request
from fdcache.replay import worker
from fdcache.replay.config import LayoutName, ReplayConfig, parse_groups
from fdcache.replay.engine import replay
from fdcache.replay.engine_cache import EngineCache
from fdcache.replay.models import GroupedModel
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import StorageTierSettings, WritePolicy
from tests.integration.test_replay import LateReports, SilentlyWrongDevice
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_help import ServiceProcess, local_service
from tests.storage_help import MIB

KINDS = {
    "full + window": "all/16,last:256/16",
    "full + chunks of other blocks": "all,chunk:512/32",
    "window alone": "last:200/16",
    "states alone": "state,state",
    "full + states": "state,state,all/32",
    "full + window + states": "all/16,last:256/32,state",
}


def grouped(groups: str, **options: Any) -> ReplayConfig:
    """Return a replay that runs out of device blocks."""
    columns = len(PageColumns(parse_groups(groups, 64), 64))
    options = {"device_blocks": 110 * columns, "host_memory": 64 * MIB, **options}
    cache = {"write_policy": WritePolicy.WRITE_THROUGH, **options.pop("cache", {})}
    return small_config(groups=groups, cache=cache, **options)


# Without failures there is less to go wrong.
@pytest.mark.parametrize("groups", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("load_failures", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_every_kind_of_groups_is_clean_with_and_without_failing_loads(
    groups: str, load_failures: float
) -> None:
    report = run_chat(grouped(groups, load_failures=load_failures), 60)
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0 < report.tally.hit_tokens["device"]
    assert report.tally.verified_blocks > 0 < report.evictions
    assert (report.tally.failed_loads > 0) == (load_failures > 0)


@pytest.mark.parametrize("groups", [KINDS["full + window"], KINDS["full + states"]])
def test_write_back_is_clean(groups: str) -> None:
    report = run_chat(grouped(groups, cache={"write_policy": WritePolicy.WRITE_BACK}), 60)
    assert_clean(report)
    assert report.tally.failed_loads == 0
    assert report.tally.hit_tokens["host"] > 0


@pytest.mark.parametrize("groups", [KINDS["full + states"], KINDS["full + window + states"]])
def test_a_small_host_tier_evicts_and_is_clean(groups: str) -> None:
    report = run_chat(grouped(groups, host_memory=4 * MIB), 80)
    assert_clean(report)
    assert report.host_evictions > 0


@pytest.mark.parametrize("groups", [KINDS["full + window"], KINDS["full + states"]])
def test_late_reports_of_loads_are_clean(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdcache.replay.engine.start_ranks", LateReports)
    report = run_chat(grouped(groups, load_failures=0.4), 60)
    assert_clean(report)
    assert report.tally.failed_loads > 0


def test_overdue_loads_keep_their_device_blocks_until_they_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fdcache.replay.engine.start_ranks", LateReports)
    report = run_chat(grouped(KINDS["full + states"], cache={"plan_timeout": 1e-6}), 60)
    assert_clean(report)
    assert report.tally.overdue_loads > 0


@pytest.mark.parametrize("layout", [pytest.param(LayoutName.UNIFORM, marks=pytest.mark.slow), LayoutName.MLA])
def test_two_ranks_in_processes_of_their_own_are_clean(
    layout: LayoutName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDCACHE_ARENA_DIR", str(tmp_path))
    report = run_chat(grouped("state,all", layout=layout, ranks=2, load_failures=0.2), 60)
    assert_clean(report)
    assert report.tally.hit_tokens["host"] > 0 < report.tally.failed_loads
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("groups", ["all,last:256/32", "state,all"])
def test_a_second_run_finds_what_the_first_one_left_in_storage(groups: str, tmp_path: Path) -> None:
    storage = StorageTierSettings(connector="local", directory=tmp_path, size=64 * MIB)
    first, second = (run_chat(grouped(groups, storage=storage), 40) for _ in range(2))
    assert_clean(first)
    assert_clean(second)
    assert second.tally.storage_restored > 0 < second.tally.hit_tokens["storage"]
    assert second.tally.hit_rate > first.tally.hit_rate


def test_engines_of_a_service_share_pages_and_states(tmp_path: Path) -> None:
    with local_service(tmp_path, FDCACHE_HOST_MEMORY="64MiB") as service:
        first, second = (
            run_chat(grouped("state,all", host_memory=0, cache={"server": service.address}), 40)
            for _ in range(2)
        )
    assert_clean(first)
    assert_clean(second)
    assert second.tally.hit_rate > first.tally.hit_rate


@pytest.mark.parametrize("groups", ["state,all", "all,last:256/32,state"])
def test_a_service_that_begins_anew_reads_pages_and_states_from_its_storage(
    groups: str, tmp_path: Path
) -> None:
    kept = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "blocks")}
    reports = []
    for turn in range(2):
        with local_service(tmp_path / f"{turn}", {}, FDCACHE_STORAGE_SIZE="64MiB", **kept) as service:
            config = grouped(groups, host_memory=0, cache={"server": service.address})
            reports.append(run_chat(config, 40))
            assert service.drain()
    first, second = reports
    assert_clean(first)
    assert_clean(second)
    assert second.tally.hit_tokens["storage"] > 0 == first.tally.hit_tokens["storage"]
    assert second.tally.hit_rate > first.tally.hit_rate


def test_a_service_that_is_killed_costs_no_request_and_no_byte(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "service", FDCACHE_HOST_MEMORY="64MiB") as service:
        service.start()
        steps = iter(range(300))

        def kill() -> bool:
            if next(steps, None) is None and service.process is not None and service.process.poll() is None:
                service.process.kill()
                service.process.wait()
            return False

        config = grouped("state,all,last:256/32", host_memory=0, cache={"server": service.address})
        report = replay(generate(WorkloadName.CHAT, 60, 0), config, should_stop=kill)
        assert service.process is not None and service.process.poll() is not None
    tally = report.tally
    assert (tally.corrupt_blocks, report.leaked_slots, report.integrity_error) == (0, 0, None)
    assert tally.finished == tally.requests
    assert tally.verified_blocks > 0


# --- negative controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", KINDS.values(), ids=list(KINDS))
def test_wrong_bytes_loaded_by_a_device_are_detected(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FaultyDevice", lambda *_, **__: SilentlyWrongDevice())
    report = run_chat(grouped(groups, load_failures=1.0), 60)
    assert report.tally.corrupt_blocks > 0
    assert not report.clean


@pytest.mark.parametrize("column", [0, 1])
def test_a_block_that_a_layer_needs_and_the_engine_does_not_have_is_detected(
    column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = GroupedModel._require_needed

    def without_column(self: GroupedModel, segments: np.ndarray, rows: np.ndarray) -> None:
        holes = rows.copy()
        holes[:, column] = -1
        needed(self, segments, holes)

    monkeypatch.setattr(GroupedModel, "_require_needed", without_column)
    with pytest.raises(ValueError, match=rf"needs column {column} of page \d+, and has no block"):
        run_chat(grouped("state,all"), 60)


def test_a_state_of_another_position_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = EngineCache._offer_states

    def one_page_late(self: EngineCache, request: Request, row: np.ndarray, pages: int) -> None:
        if pages * 64 + 64 <= request.num_tokens:
            offer(self, request, row, pages + 1)

    monkeypatch.setattr(EngineCache, "_offer_states", one_page_late)
    assert run_chat(grouped("state,all"), 60).tally.corrupt_blocks > 0


# --- options ----------------------------------------------------------------------------------------------


def test_groups_are_read_from_text() -> None:
    assert parse_groups("all, last:1024/16,chunk:512,state", 64) == (
        CacheGroup(64),
        CacheGroup(16, Reach.LAST, 1024),
        CacheGroup(64, Reach.CHUNK, 512),
        CacheGroup(64, Reach.STATE),
    )


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("", "'' is no group; list groups with commas"),
        ("some", "'some' is no group"),
        ("last", "tokens must be"),
        ("all:5", "tokens must be 0"),
        ("all/48", "must be a multiple"),
        ("state,all/0", "block_size must be"),
    ],
)
def test_groups_out_of_range_are_refused(groups: str, message: str) -> None:
    with pytest.raises(ReplayOptionError, match=f"--groups: .*{message}"):
        small_config(groups=groups)


@pytest.mark.parametrize("groups", ["all,last:256", "state,all"])
def test_the_policy_that_waits_for_a_second_hit_is_refused(groups: str) -> None:
    config = small_config(groups=groups, cache={"write_policy": WritePolicy.WRITE_THROUGH_SELECTIVE})
    with pytest.raises(Exception, match="use write_through"):
        run_chat(config, 1)


def test_one_group_that_attends_to_all_is_a_model_without_groups() -> None:
    assert small_config(groups="all").layout == small_config().layout
