"""``fdcache init`` on a machine without a GPU, and the picture of a calibration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdcache.devices.calibration import Calibration, Measurement
from fdcache.devices.link_plot import require_plotting, write_plot
from fdcache.errors import ConfigurationError
from fdcache.server.arena import Arena
from tests.gpu.conftest import missing_gpu


def run_init(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from fdcache_cli.main import run; run()", "init", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error() -> None:
    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    done = run_init("--device", "GPU-none")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_it_says_what_the_machine_has_and_changes_nothing(tmp_path: Path) -> None:
    folders = {"FDCACHE_ARENA_DIR": str(tmp_path), "FDCACHE_RUNTIME_DIR": str(tmp_path / "run")}
    done = run_init("--check", "--json", **folders)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    names = {each["name"] for each in answer["machine"]}
    assert names == {"GPU", "memory", "NUMA nodes", "memlock", "huge pages", "arena folder", "runtime folder"}
    assert answer["calibrations"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FDCACHE_ARENA_DIR": "/no/such/folder"}, "make it a tmpfs"),
        ({"FDCACHE_NUMA_NODE": "4095"}, "no NUMA node 4095; unset it"),
        ({"FDCACHE_RUNTIME_DIR": "/"}, "chmod 700 /"),
    ],
)
def test_what_would_make_serving_fail_is_named_with_its_remedy(settings: dict[str, str], said: str) -> None:
    done = run_init("--check", **settings)
    assert done.returncode == 1
    (line,) = [each for each in done.stdout.splitlines() if "PROBLEM" in each]
    assert said in line


def test_dead_arenas_are_shown_and_removed_on_request(tmp_path: Path) -> None:
    dead = Arena(tmp_path, "dead", "ipc:///run/x.sock")
    dead.lock()
    dead.create(1 << 20, 1 << 16)
    dead.abandon()
    living = Arena(tmp_path, "living")
    living.lock()
    folder = {"FDCACHE_ARENA_DIR": str(tmp_path)}
    shown = run_init("--check", **folder).stdout
    assert "dead, 1" in shown and "--socket ipc:///run/x.sock takes it over" in shown
    done = run_init("--clean-arenas", **folder)
    assert done.returncode == 0, done.stderr
    assert "removed a dead arena" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fdcache-living.arena"]
    living.close()
    assert run_init("--check", "--clean-arenas", **folder).returncode == 2


def test_a_calibration_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = tuple(
        Measurement(direction, method, 1 << size, 2, 40.0 + size)
        for direction in ("host to device", "device to host")
        for method in ("direct", "staged", "kernel")
        for size in (14, 16)
    )
    write_plot(Calibration(measurements=found), tmp_path / "link.svg")
    text = (tmp_path / "link.svg").read_text()
    assert "<svg" in text and len(text) > 5000


def test_a_picture_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="must end in one of"):
        require_plotting(tmp_path / "link.text")
    with pytest.raises(ConfigurationError, match="does not exist"):
        require_plotting(tmp_path / "no" / "link.svg")
