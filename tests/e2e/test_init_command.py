"""``fdcache init`` on a machine without a GPU, and the plot of a calibration."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fdcache.devices import topology
from fdcache.devices.calibration import Calibration, Measurement
from fdcache.errors import ConfigurationError
from fdcache.service.server import machine_setup
from fdcache.service.server.arena import Arena
from fdcache.settings import Settings
from fdcache_cli.link_plot import require_plotting, write_plot
from tests.commands import Done, run_command
from tests.gpu.conftest import missing_gpu


def run_init(*options: str, **environment: str) -> Done:
    return run_command(("init", *options), {**os.environ, **environment})


def home(tmp_path: Path) -> dict[str, str]:
    """Return an environment that writes only below ``tmp_path``."""
    return {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "FDCACHE_RUNTIME_DIR": str(tmp_path / "run"),
        "FDCACHE_CALIBRATION_DIR": str(tmp_path / "calibration"),
    }


def test_an_unknown_gpu_is_an_error(tmp_path: Path) -> None:
    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    done = run_init("--device", "GPU-none", **home(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_check_reports_the_machine_and_changes_nothing(tmp_path: Path) -> None:
    folders = {"FDCACHE_ARENA_DIR": str(tmp_path), "FDCACHE_RUNTIME_DIR": str(tmp_path / "run")}
    done = run_init("--check", "--json", **folders)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    names = {each["name"] for each in answer["machine"]}
    what = {"GPU", "memory", "NUMA nodes", "memlock", "huge pages", "arena folder", "runtime folder", "disk"}
    assert names - {"calibration", "swap kernels"} == what
    assert answer["calibrations"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FDCACHE_ARENA_DIR": "/no/such/folder"}, "mount a tmpfs there"),
        ({"FDCACHE_ARENA_DIR": "/sys"}, "choose another one, a tmpfs such as /dev/shm"),
        ({"FDCACHE_NUMA_NODE": "4095"}, "no NUMA node 4095; unset the variable"),
        ({"FDCACHE_RUNTIME_DIR": "/"}, "set FDCACHE_RUNTIME_DIR to another directory"),
    ],
)
def test_every_problem_names_its_remedy(settings: dict[str, str], said: str) -> None:
    done = run_init("--check", **settings)
    assert done.returncode == 1
    (line,) = [each for each in done.stdout.splitlines() if "PROBLEM" in each]
    assert said in line


@pytest.mark.skipif(missing_gpu() is None, reason="a GPU is measured for seconds; tests/gpu has that")
class TestPreparing:
    def test_directories_and_settings_file_are_created_once(self, tmp_path: Path) -> None:
        settings = {
            **home(tmp_path),
            "FD_LOG_DIR": str(tmp_path / "log"),
            "FDCACHE_STORAGE": "local",
            "FDCACHE_STORAGE_DIR": str(tmp_path / "storage"),
        }
        done = run_init(**settings)
        assert done.returncode == 0, done.stdout + done.stderr
        for name in ("run", "calibration", "log", "storage"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o700
            assert f"{tmp_path / name}, created" in done.stdout
        file = tmp_path / "config/fdcache/fdcache.env"
        assert file.stat().st_mode & 0o777 == 0o600
        assert f"FDCACHE_ENV_FILE={file}" in done.stdout
        text = file.read_text()
        assert "# FDCACHE_HOST_MEMORY=" in text
        assert re.search(r"^#   memory: [\d.]+ GiB left", text, re.MULTILINE)
        file.write_text(text + "FDCACHE_DEVICE_BLOCKS=32\n")
        again = run_init("--json", **settings, FDCACHE_ENV_FILE=str(file))
        assert again.returncode == 0, again.stderr
        found = {each["name"]: each["found"] for each in json.loads(again.stdout)["machine"]}
        assert "was not changed" in found["settings file"]
        assert "folder" not in found
        assert file.read_text() == text + "FDCACHE_DEVICE_BLOCKS=32\n"
        assert Settings.load(environ={"FDCACHE_ENV_FILE": str(file)}).cache.device_blocks == 32

    def test_what_cannot_be_created_is_a_problem_with_its_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        where = {**home(tmp_path), "FDCACHE_CALIBRATION_DIR": str(tmp_path / "file/calibration")}
        done = run_init("--env-file", str(tmp_path / "file/settings"), **where)
        assert done.returncode == 1
        folder, file = (line for line in done.stdout.splitlines() if "PROBLEM" in line)
        assert "FDCACHE_CALIBRATION_DIR" in folder and "choose another" in folder
        assert "--env-file" in file and "choose another" in file
        assert "Traceback" not in done.stderr

    def test_check_creates_nothing(self, tmp_path: Path) -> None:
        assert run_init("--check", **home(tmp_path)).returncode == 0
        assert list(tmp_path.iterdir()) == []
        assert run_init("--check", "--env-file", str(tmp_path / "x"), **home(tmp_path)).returncode == 2


@pytest.mark.skipif(missing_gpu() is None, reason="kernels compile here; tests/gpu has those that do not")
@pytest.mark.parametrize("options", [("--check",), ()])
def test_kernels_that_do_not_compile_are_a_problem_of_their_own(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = topology.Gpu(0, "GPU-1", "H200", 13000, "0000:01:00.0", "PCIe 5 x16", 0, 132, 1 << 37)
    for module in (topology, machine_setup):
        monkeypatch.setattr(module, "visible_gpus", lambda: [gpu])

    def init(*more: str) -> Done:
        return run_init(*options, *more, **home(tmp_path))

    done = init()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    (found,) = (number for number, line in enumerate(lines) if line.startswith("swap kernels "))
    assert lines[found].split()[2:] == ["GPU-1:", "not", "compiled"]
    assert "PROBLEM: " in lines[found + 1] and "install fdcache[cuda12]" in lines[found + 1]
    answer = json.loads(init("--json").stdout)
    (kernels,) = (each for each in answer["machine"] if each["name"] == "swap kernels")
    assert "install fdcache[cuda12]" in kernels["problem"]
    assert answer["calibrations"] == [], "a GPU without kernels is not measured"


def test_a_disk_smaller_than_the_storage_is_a_hint(tmp_path: Path) -> None:
    storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "storage")}
    done = run_init("--check", "--json", **storage, FDCACHE_STORAGE_SIZE="1000TiB")
    (disk,) = (each for each in json.loads(done.stdout)["machine"] if each["name"] == "disk")
    assert "more than is free" in disk["hint"]
    assert "created at the start" in disk["found"]


def test_the_storage_folder_is_measured_once_and_shown(tmp_path: Path) -> None:
    places = {**home(tmp_path), "FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_SIZE": "1MiB"}
    places["FDCACHE_STORAGE_DIR"] = str(tmp_path / "storage")

    def speed(*options: str) -> str:
        done = run_init(*options, "--json", **places)
        found = [each for each in json.loads(done.stdout)["machine"] if each["name"] == "storage speed"]
        assert "cannot be measured" not in done.stdout and "too little room" not in done.stdout, done.stdout
        return found[0]["found"] if found else ""

    assert speed("--check") == ""  # there is no folder yet
    first = speed()
    assert re.search(r"[0-9.]+ GB/s, [0-9.]+ ms for a small read", first)
    assert speed() == speed("--check") == first
    assert list((tmp_path / "storage").iterdir()) == []
    (saved,) = (tmp_path / "calibration" / "storage").iterdir()
    saved.unlink()
    assert "not measured" in speed("--check")


def test_dead_arenas_are_shown_and_removed_on_request(tmp_path: Path) -> None:
    dead = Arena(tmp_path, "deaddead", "ipc:///run/x.sock")
    dead.lock()
    dead.create(1 << 20)
    dead.close()
    living = Arena(tmp_path, "11111111")
    living.lock()
    folder = {**home(tmp_path / "home"), "FDCACHE_ARENA_DIR": str(tmp_path)}
    shown = run_init("--check", **folder).stdout
    assert "dead, 1" in shown and "--socket ipc:///run/x.sock takes it over" in shown
    done = run_init("--clean-arenas", **folder)
    assert done.returncode == 0, done.stderr
    assert "removed a dead arena" in done.stdout
    assert [path.name for path in tmp_path.glob("fdcache-*")] == ["fdcache-11111111.arena"]
    living.close(discard=True)
    assert run_init("--check", "--clean-arenas", **folder).returncode == 2


def test_a_calibration_is_plotted(tmp_path: Path) -> None:
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


def test_a_plot_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="must end in one of"):
        require_plotting(tmp_path / "link.text")
    with pytest.raises(ConfigurationError, match="does not exist"):
        require_plotting(tmp_path / "no" / "link.svg")
