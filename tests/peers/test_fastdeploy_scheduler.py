"""FastDeploy's scheduler, from its pinned source, on fdcache's tiers, configured by the environment alone.

Every prefill checks all the KV that it finds against the tokens that it stands for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.peers.fastdeploy_scenarios import SCENARIOS
from tests.peers.fastdeploy_source import missing
from tests.service_help import service_process

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SWAPPED = [name for name in SCENARIOS if name.startswith("swapped")]


def drive(
    *runs: str | dict[str, Any], manager: str = "fdcache", folder: Path, **environment: str
) -> dict[str, dict[str, Any]]:
    """Run scenarios in a new process; return the results by name."""
    return {
        result["scenario"]: result for result in run(*runs, manager=manager, folder=folder, **environment)
    }


def run(
    *runs: str | dict[str, Any], manager: str = "fdcache", folder: Path, **environment: str
) -> list[dict[str, Any]]:
    """Run scenarios in a new process that the environment alone configures; return their results in order."""
    arguments = [run if isinstance(run, str) else json.dumps(run) for run in runs]
    done = subprocess.run(
        [sys.executable, "-m", "tests.peers.fastdeploy_main", manager, *arguments],
        env={**os.environ, "FDCACHE_RUNTIME_DIR": str(folder / "run"), **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"scenario"')]


def storage_in(folder: Path, policy: str) -> dict[str, str]:
    """Return the environment of an engine with storage of its own."""
    return {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(folder / "storage"),
        "FDCACHE_STORAGE_SIZE": "64MiB",
        "FDCACHE_PREFETCH_POLICY": policy,
    }


def check(results: dict[str, dict[str, Any]], names: list[str]) -> None:
    """Assert that all of them ran to their end and no prefill found wrong KV."""
    assert list(results) == names
    for name, result in results.items():
        assert not result["stalled"], name
        assert result["wrong"] == [], name
        assert result["wrong_answers"] == [], name
        assert result["errors"] == [], name
        assert result["tracebacks"] == [], name
        assert result["finished"] and result["checked"], name


TWO_PROCESSES = "swapped, write_back"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of every scenario with one rank, and of ``TWO_PROCESSES`` with two ranks in processes of their own."""
    last = {"scenario": TWO_PROCESSES, "ranks": 2, "processes": True}
    return run(*SCENARIOS, last, folder=tmp_path_factory.mktemp("fastdeploy"))


def test_no_scenario_finds_wrong_kv(results: list[dict[str, Any]]) -> None:
    by_name = {result["scenario"]: result for result in results[:-1]}
    check(by_name, list(SCENARIOS))
    for name in SWAPPED:
        assert by_name[name]["finished"] == 24
        assert by_name[name]["host_hits"], name
        assert by_name[name]["token_seconds"] > 0, name
    assert by_name["mixed"]["finished"] == by_name["delayed workers"]["finished"] == 60
    assert (by_name["aborts"]["finished"], by_name["aborts"]["aborted"]) == (9, 9)
    assert by_name["preempted"]["preempted"]
    assert by_name["failed loads"]["host_hits"]


def test_two_ranks_in_processes_of_their_own_find_no_wrong_kv(results: list[dict[str, Any]]) -> None:
    check({TWO_PROCESSES: results[-1]}, [TWO_PROCESSES])
    assert results[-1]["host_hits"]


def test_the_plug_in_names_the_missing_variable(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ENABLE_V1_KVCACHE_MANAGER is not 1"):
        drive("exact", folder=tmp_path, ENABLE_V1_KVCACHE_MANAGER="0")


def test_an_option_that_fdcache_has_no_part_in_ends_the_start_with_its_remedy(tmp_path: Path) -> None:
    """Each option has its case in ``tests/integration/test_fastdeploy_engine.py``."""
    remedy = "kvcache_storage_backend='mooncake'.*set FDCACHE_STORAGE=mooncake"
    with pytest.raises(AssertionError, match=f"ConfigurationError.*{remedy}"):
        drive({"scenario": "exact", "storage_backend": "mooncake"}, folder=tmp_path)


def test_blocks_go_on_to_the_device_while_later_ones_are_read(tmp_path: Path) -> None:
    results = drive(
        "streams alone",
        {"scenario": "streams beside others", "behind": True},
        folder=tmp_path,
        **storage_in(tmp_path, "wait_complete"),
    )
    check(results, ["streams alone", "streams beside others"])
    assert all(result["ahead"] for result in results.values())
    assert results["streams beside others"]["preempted"]


def test_late_tokens_of_a_request_that_decode_has_preempted_reach_nobody(tmp_path: Path) -> None:
    """They failed for the slot without a request, with the tokens of every other request of that step."""
    (result,) = drive("late tokens", folder=tmp_path, FDCACHE_TRANSFER="ipc").values()
    assert result["errors"] == []
    assert result["finished"] == 4


def test_a_request_that_waits_for_storage_is_no_error_in_the_log(tmp_path: Path) -> None:
    """FastDeploy logs a traceback for each request whose match raises."""
    results = drive("images in storage", folder=tmp_path, **storage_in(tmp_path, "wait_complete"))
    check(results, ["images in storage"])
    assert results["images in storage"]["storage_hits"]


@pytest.mark.slow
def test_two_ranks_load_ahead(tmp_path: Path) -> None:
    run = {"scenario": "streams beside others", "ranks": 2}
    results = drive(run, folder=tmp_path, **storage_in(tmp_path, "wait_complete"))
    check(results, ["streams beside others"])
    assert results["streams beside others"]["ahead"]


@pytest.mark.slow
def test_the_driver_detects_wrong_kv(tmp_path: Path) -> None:
    (result,) = drive("swapped, write_back", manager="fastdeploy", folder=tmp_path).values()
    assert result["wrong"]


@pytest.mark.slow
def test_two_ranks_run_every_scenario(tmp_path: Path) -> None:
    check(drive(*({"scenario": name, "ranks": 2} for name in SCENARIOS), folder=tmp_path), list(SCENARIOS))


@pytest.mark.slow
def test_the_host_tier_of_a_service_serves_every_scenario(tmp_path: Path) -> None:
    with service_process(tmp_path / "service") as service:
        results = drive(folder=tmp_path, FDCACHE_SERVER=service.address)
        check(results, list(SCENARIOS))
        assert all(results[name]["host_hits"] for name in SWAPPED)


@pytest.mark.slow
def test_the_death_of_the_service_costs_only_hits(tmp_path: Path) -> None:
    with service_process(tmp_path / "service") as service:
        assert service.process is not None
        environment = {"FDCACHE_SERVER": service.address, "SERVICE_PID": str(service.process.pid)}
        check(drive("killed service", folder=tmp_path, **environment), ["killed service"])


@pytest.mark.slow
def test_the_death_of_a_worker_leaves_no_wrong_kv(tmp_path: Path) -> None:
    check(drive("killed worker", folder=tmp_path), ["killed worker"])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_a_restarted_engine_reads_its_storage(tmp_path: Path, policy: str) -> None:
    results = drive("restart with storage", folder=tmp_path, **storage_in(tmp_path, policy))
    check(results, ["restart with storage"])
    if policy != "best_effort":  # best_effort waits for no read
        assert results["restart with storage"]["storage_hits"]
