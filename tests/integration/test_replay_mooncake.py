"""Replays with Mooncake and a real master: engines share the blocks that one of them computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.replay.engine import replay
from fdcache.replay.statistics import Tally
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings
from fdcache.testing.storage import KnownRecords, conformance_layout
from tests.mooncake_master import Master, find_master
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_help import TIMEOUT, service_process

REPLAY = (
    *("replay", "--requests", "100", "--device-blocks", "150", "--host-memory", "2MiB", "--json"),
    *("--write-policy", "write_through"),
)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(find_master(), tmp_path_factory.mktemp("mooncake"))
    yield master
    master.kill()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Master]:
    """A master that the test freezes or kills."""
    master = Master(find_master(), tmp_path)
    yield master
    master.kill()


def start(master: Master) -> subprocess.Popen[str]:
    program = "from fdcache_cli.main import run; run()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *REPLAY],
        env={**os.environ, **master.environment()},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(output)
    assert report["corrupt_blocks"] == report["leaked_slots"] == report["leaked_pins"] == 0
    assert report["verified_blocks"] > 0
    return report


def test_two_processes_share_a_store(master: Master) -> None:
    # A node that stays: blocks in an engine's own segment are lost when the engine leaves.
    layout = conformance_layout("a node of its own")
    node = master.connect(layout)
    node.register(KnownRecords(layout, 1).table)
    together = [start(master), start(master)]
    reports = [finish(process) for process in together]
    assert sum(report["storage"]["stored"] for report in reports) > 0
    assert sum(report["hit_tokens"]["storage"] for report in reports) > 0
    assert all(report["storage"]["corrupt"] == 0 for report in reports)
    node.close()


def test_a_master_that_dies_does_not_stop_the_engine(mortal: Master) -> None:
    mooncake = MooncakeSettings(master=mortal.address, protocol="tcp", global_segment_size=32 << 20)
    tier = StorageTierSettings(connector="mooncake", retry_after=0.2)
    config = small_config(device_blocks=150, host_memory=2 << 20, storage=tier, storage_options=mooncake)
    assert_clean(run_chat(config, requests=40))
    mortal.kill()
    report = run_chat(config, requests=40)
    assert_clean(report)
    assert report.tally.hit_tokens["storage"] == 0
    assert report.to_dict()["storage"]["states"] == ["off"]


@pytest.mark.slow
def test_a_master_that_freezes_under_traffic_costs_its_deadline(mortal: Master) -> None:
    """Requests that wait for their whole read continue; the host slots of its call are kept until it has ended."""
    mooncake = MooncakeSettings(master=mortal.address, protocol="tcp", global_segment_size=32 << 20)
    tier = StorageTierSettings(
        connector="mooncake", retry_after=600.0, timeout=2.0, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE
    )
    config = small_config(
        device_blocks=150,
        host_memory=2 << 20,
        storage=tier,
        storage_options=mooncake,
        cache={"write_policy": "write_through"},
    )
    happens = {20: mortal.freeze, 55: mortal.kill}

    def disturb(tally: Tally) -> None:
        for moment in [each for each in happens if tally.finished >= each]:
            happens.pop(moment)()

    report = replay(generate(WorkloadName.CHAT, 60, config.seed), config, on_progress=disturb)
    assert not happens, "both happened while requests were served"
    assert_clean(report)
    storage = report.to_dict()["storage"]
    assert storage["stored"] > 0
    assert storage["states"] == ["off"]
    assert storage["timeouts"] + storage["peer_gone"] > 0


@pytest.mark.slow
def test_services_share_a_store_that_outlives_each_of_them(master: Master, tmp_path: Path) -> None:
    layout = conformance_layout("a node of its own")
    node = master.connect(layout)
    node.register(KnownRecords(layout, 1).table)
    hits = []
    for turn in range(2):
        settings = {**master.environment(), "FDCACHE_HOST_MEMORY": "4MiB"}
        with service_process(tmp_path / f"s{turn}", **settings) as service:
            report = run_chat(
                small_config(
                    device_blocks=150,
                    host_memory=0,
                    cache={
                        "server": service.address,
                        "rpc_timeout": TIMEOUT,
                        "write_policy": "write_through",
                    },
                    storage=StorageTierSettings(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE),
                )
            )
            assert_clean(report)
            hits.append(report.tally.hit_tokens["storage"])
            assert service.ask("integrity") == []
            (stored,) = service.ask("storage")["layouts"]
            assert stored["totals"]["stored_blocks"] > 0
            assert stored["totals"]["corrupt_blocks"] == 0
            assert service.terminate() == 0
    assert hits[1] > 0
    node.close()
