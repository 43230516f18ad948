"""``fdcache init`` and ``fdcache doctor`` on a machine without a GPU, and the plot of a calibration."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fdcache.devices import topology
from fdcache.errors import ConfigurationError
from fdcache.machine.calibration import Calibration, Measurement
from fdcache.service.server import machine_findings
from fdcache.service.server.arena import Arena
from fdcache.settings import VARIABLES, Settings
from fdcache_cli.link_plot import require_plotting, write_plot
from tests.commands import Done, run_command
from tests.gpu.conftest import missing_gpu
from tests.terminals import interrupted_at_a_question, on_terminal


def run_init(*options: str, **environment: str) -> Done:
    return run_command(("init", "--yes", *options), {**os.environ, **environment})


def run_doctor(*options: str, **environment: str) -> Done:
    return run_command(("doctor", *options), {**os.environ, **environment})


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


@pytest.mark.parametrize("options", [("--device", "GPU-none"), ("--plot", "link.svg")])
def test_a_gpu_that_is_not_here_is_refused_before_a_file_is_written(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    done = run_init(*options, **home(tmp_path))
    assert done.returncode == 1, done.stderr
    assert list(tmp_path.rglob("fdcache*")) == []


def test_doctor_reports_the_machine_and_changes_nothing(tmp_path: Path) -> None:
    folders = {"FDCACHE_ARENA_DIR": str(tmp_path), "FDCACHE_RUNTIME_DIR": str(tmp_path / "run")}
    done = run_doctor("--json", **folders)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    names = {each["name"] for each in answer["machine"]}
    what = {"GPU", "memory", "NUMA nodes", "memlock", "huge pages", "arena folder", "runtime folder"}
    what |= {"HTTP address", "disk", "engine"}
    assert names - {"calibration", "swap kernels", "driver", "CuPy", "GPU devices"} == what
    assert answer["ok"] is True
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"FDCACHE_ARENA_DIR": "/no/such/folder"}, "mount a tmpfs there"),
        ({"FDCACHE_ARENA_DIR": "/sys"}, "choose another one, a tmpfs such as /dev/shm"),
        ({"FDCACHE_NUMA_NODE": "4095"}, "no NUMA node 4095; unset the variable"),
        ({"FDCACHE_RUNTIME_DIR": "/"}, "set FDCACHE_RUNTIME_DIR to another directory"),
        ({"FDCACHE_HTTP_ADDRESS": "0.0.0.0:9470"}, "set FD_API_KEY, or use 127.0.0.1"),
        ({"FDCACHE_HOST_MEMORY": "much"}, "FDCACHE_HOST_MEMORY"),
    ],
)
def test_every_problem_names_its_remedy(settings: dict[str, str], said: str) -> None:
    done = run_doctor(**settings)
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
        assert re.search(r"^FDCACHE_HOST_MEMORY=\d+[GM]iB$", text, re.MULTILINE)
        assert "# FDCACHE_WRITE_POLICY=" in text
        assert all(bool(each.used_in) == (f"{each.name}=" in text) for each in VARIABLES.values())
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

    def test_doctor_creates_nothing(self, tmp_path: Path) -> None:
        assert run_doctor(**home(tmp_path)).returncode == 0
        assert list(tmp_path.iterdir()) == []


class TestTheSettingsOfAnEngine:
    def test_without_a_terminal_init_wants_yes(self, tmp_path: Path) -> None:
        done = run_command(("init",), {**os.environ, **home(tmp_path)})
        assert done.returncode == 2
        assert "no terminal to ask on; give --yes" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_size_that_is_none_is_named_by_where_it_was_given(self, tmp_path: Path) -> None:
        done = run_init(**home(tmp_path), FDCACHE_HOST_MEMORY="foo")
        assert done.returncode == 78
        assert "FDCACHE_HOST_MEMORY (environment): 'foo' is not a size" in done.stderr
        done = run_init("--host-memory", "bar", **home(tmp_path))
        assert done.returncode == 78
        assert "FDCACHE_HOST_MEMORY (--host-memory of fdcache init): 'bar' is not a size" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_ctrl_c_at_a_question_is_ctrl_c(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in home(tmp_path).items():
            monkeypatch.setenv(name, value)
        status, seen = interrupted_at_a_question("init", question="Which engine")
        assert status == 130
        assert "Aborted" not in seen and "Traceback" not in seen

    def test_a_shell_completes_the_engines(self, tmp_path: Path) -> None:
        asked = {
            "_FDCACHE_COMPLETE": "complete_bash",
            "COMP_WORDS": "fdcache init --engine v",
            "COMP_CWORD": "3",
        }
        done = run_command((), {**os.environ, **home(tmp_path), **asked})
        assert done.stdout.split() == ["vllm"]

    def test_a_hint_quotes_the_path_of_the_file(self, tmp_path: Path) -> None:
        file = tmp_path / "with space" / "fdcache" / "fdcache.env"
        file.parent.mkdir(parents=True)
        file.touch()
        place = {"XDG_CONFIG_HOME": str(tmp_path / "with space")}
        (line,) = (
            each for each in run_command((), {**os.environ, **place}).stdout.splitlines() if "export" in each
        )
        assert f"FDCACHE_ENV_FILE={file}" in shlex.split(line)

    def test_an_unknown_engine_is_refused(self, tmp_path: Path) -> None:
        done = run_init("--engine", "vlm", **home(tmp_path))
        assert done.returncode == 2
        assert "none of vllm, sglang, fastdeploy, own" in done.stderr

    def test_storage_on_a_disk_without_room_is_refused(self, tmp_path: Path) -> None:
        done = run_init("--storage", "/proc/blocks", **home(tmp_path))
        assert done.returncode == 2
        assert "--storage" in done.stderr and "0 bytes left; name a folder of another one" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_the_last_line_starts_the_engine_with_the_settings(self, tmp_path: Path) -> None:
        options = ("--engine", "vllm", "--model", "/models/a b", "--host-memory", "1GiB")
        done = run_init(*options, "--storage", str(tmp_path / "blocks"), **home(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        file = tmp_path / "config/fdcache/fdcache.env"
        last = done.stdout.splitlines()[-1].strip()
        words = shlex.split(last)
        assert words[:4] == [f"FDCACHE_ENV_FILE={file}", "vllm", "serve", "/models/a b"]
        assert json.loads(words[5]) == {"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}
        found = Settings.load(environ={"FDCACHE_ENV_FILE": str(file)})
        assert found.cache.host_memory == 1 << 30
        assert found.storage_tier.directory == tmp_path / "blocks"

    def test_the_line_of_sglang_names_the_linker(self, tmp_path: Path) -> None:
        done = run_init("--engine", "sglang", "--model", "m", "--host-memory", "1GiB", **home(tmp_path))
        words = shlex.split(done.stdout.splitlines()[-1].strip())
        given = json.loads(words[-1])
        module = given["linker_module_path"].replace(".", "/") + ".py"
        assert f"class {given['linker']}(" in (Path(__file__).parents[2] / module).read_text()

    def test_with_a_service_the_engine_has_its_address_alone(self, tmp_path: Path) -> None:
        options = ("--engine", "fastdeploy", "--host-memory", "64MiB", "--service", "--json")
        done = run_init(*options, **home(tmp_path))
        assert done.returncode == 0, done.stderr
        serve, engine = json.loads(done.stdout)["start"]
        assert serve == "fdcache serve --host-memory 64MiB"
        assert "FD_PLUGINS=fdcache" in engine
        found = Settings.load(environ={"FDCACHE_ENV_FILE": str(tmp_path / "config/fdcache/fdcache.env")})
        assert found.cache.server == f"ipc://{tmp_path}/run/fdcache.sock"
        assert found.cache.host_memory == 0
        checked = run_command((*shlex.split(serve)[1:], "--check"), {**os.environ, **home(tmp_path)})
        assert checked.returncode == 0
        again = run_init("--engine", "fastdeploy", "--json", **home(tmp_path))
        assert json.loads(again.stdout)["start"] == [serve, engine]
        file = tmp_path / "config/fdcache/fdcache.env"
        file.write_text(file.read_text().replace("\nFDCACHE_SERVER=", "\n# FDCACHE_SERVER="))
        alone = run_init("--engine", "fastdeploy", "--json", **home(tmp_path))
        assert json.loads(alone.stdout)["start"] == [engine]

    def test_a_settings_file_that_exists_is_kept_and_starts_the_engine(self, tmp_path: Path) -> None:
        first = run_init("--engine", "vllm", "--model", "m", "--host-memory", "1GiB", **home(tmp_path))
        file = tmp_path / "config/fdcache/fdcache.env"
        text = file.read_text()
        again = run_init("--engine", "vllm", "--model", "m", **home(tmp_path))
        assert again.returncode == 0, again.stderr
        assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
        for options in (("--service",), ("--host-memory", "2GiB"), ("--storage", str(tmp_path / "blocks"))):
            done = run_init("--engine", "vllm", *options, **home(tmp_path))
            assert done.returncode == 2
            assert f"{file} exists and is kept" in " ".join(done.stderr.split()) and options[0] in done.stderr
        assert file.read_text() == text

    def test_the_file_that_the_environment_names_is_written(self, tmp_path: Path) -> None:
        file = tmp_path / "new/my.env"
        done = run_init("--engine", "vllm", "--model", "m", **home(tmp_path), FDCACHE_ENV_FILE=str(file))
        assert done.returncode == 0, done.stderr
        assert "FDCACHE_HOST_MEMORY=" in file.read_text()
        assert f"FDCACHE_ENV_FILE={file} vllm serve m" in done.stdout.splitlines()[-1]

    def test_a_service_by_default_takes_no_more_than_its_small_folder_has(self, tmp_path: Path) -> None:
        commands = "fdcache doctor && fdcache init --yes --engine vllm --service"
        done = with_other_shm("size=64M", commands, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "mount a larger tmpfs (docker run --shm-size)" in " ".join(done.stdout.split())
        assert "fdcache serve --host-memory 48MiB" in done.stdout

    def test_the_remedy_for_an_arena_folder_that_is_read_only_is_another(self, tmp_path: Path) -> None:
        done = with_other_shm("ro", "fdcache doctor", tmp_path)
        assert done.returncode == 1, done.stdout + done.stderr
        (line,) = [each for each in done.stdout.splitlines() if "PROBLEM" in each]
        assert "/dev/shm cannot be written by this user; mount it so that this user may write there" in line
        assert "such as /dev/shm" not in line

    def test_a_folder_is_no_settings_file(self, tmp_path: Path) -> None:
        done = run_init("--engine", "vllm", "--env-file", str(tmp_path), **home(tmp_path))
        assert done.returncode == 2
        assert "is no file; name one" in done.stderr

    def test_on_a_terminal_it_asks_for_no_settings_that_a_file_has(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_init("--engine", "vllm", "--host-memory", "1GiB", **home(tmp_path))
        for name, value in home(tmp_path).items():
            monkeypatch.setenv(name, value)
        status, seen, output = on_terminal("init", answer="vllm\n/models/llama\n")
        assert status == 0, seen
        assert "How much host memory" not in seen
        assert "vllm serve /models/llama" in output.splitlines()[-1]

    def test_on_a_terminal_it_asks_and_asks_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in home(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path))
        answers = "vlm\nvllm\n/models/llama\na lot\n1000TiB\n2GiB\n/proc/blocks\n~/blocks\ny\n"
        status, seen, output = on_terminal("init", answer=answers)
        assert status == 0, seen
        assert "'vlm' is none of vllm, sglang, fastdeploy, own" in seen
        assert "'a lot' is not a size" in seen and "1000TiB do not fit" in seen
        assert "the disk of /proc/blocks has 0 bytes left" in seen
        serve, engine = (line.strip() for line in output.splitlines()[-2:])
        assert serve.startswith(
            f"fdcache serve --host-memory 2GiB --storage {tmp_path}/blocks/ --storage-size "
        )
        assert "vllm serve /models/llama" in engine


class TestDoctor:
    def test_an_open_address_of_transfers_is_a_hint_until_it_is_used(self, tmp_path: Path) -> None:
        address = {**home(tmp_path), "FDCACHE_TRANSFER_ADDRESS": "tcp://0.0.0.0:7000"}
        (found,) = finding("transfer", run_doctor("--json", **address))
        assert "FDCACHE_TRANSFER_KEY" in found["hint"] and "write the host" in found["hint"]
        used = run_doctor("--json", **address, FDCACHE_TRANSFER="ipc")
        assert used.returncode == 1
        (found,) = finding("transfer", used)
        assert "FDCACHE_TRANSFER_KEY" in found["problem"]
        key = {"FDCACHE_TRANSFER_KEY": "0123456789abcdef" * 2, "FDCACHE_TRANSFER": "ipc"}
        done = run_doctor("--json", **address | key | {"FDCACHE_TRANSFER_ADDRESS": "tcp://127.0.0.1:7000"})
        assert done.returncode == 0, done.stdout
        assert key["FDCACHE_TRANSFER_KEY"] not in done.stdout

    def test_every_wrong_setting_is_listed(self, tmp_path: Path) -> None:
        done = run_doctor("--json", **home(tmp_path), FDCACHE_RANKS="many", FDCACHE_VERIFY="some")
        assert done.returncode == 1
        assert {each["found"] for each in finding("setting", done)} == {"FDCACHE_RANKS", "FDCACHE_VERIFY"}

    def test_a_port_in_use_is_a_problem(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            done = run_doctor("--json", **home(tmp_path), FDCACHE_HTTP_ADDRESS=f"127.0.0.1:{port}")
        (found,) = finding("HTTP address", done)
        assert "Address already in use; choose another" in found["problem"]

    def test_engines_are_named_with_their_versions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed = tmp_path / "site"
        for name, version in (("vllm", "0.25.1"), ("fastdeploy_gpu", "2.3.0")):
            info = installed / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(installed))
        done = run_doctor("--json", **home(tmp_path), VLLM_PLUGINS="other")
        vllm, fastdeploy, *_ = finding("engine", done)
        assert vllm["found"] == "vllm 0.25.1" and "pip install 'vllm>=0.26.0'" in vllm["hint"]
        assert fastdeploy["found"] == "fastdeploy-gpu 2.3.0" and not fastdeploy["hint"]
        (plugins,) = finding("vLLM plug-ins", done)
        assert "VLLM_PLUGINS=other,fdcache" in plugins["problem"]

    @pytest.mark.parametrize(
        ("driver", "cupy", "said"),
        [
            ("580.65.06", (), "pip install 'fdcache[cuda13]'"),
            ("535.104.12", (), "pip install 'fdcache[cuda12]'"),
            ("535.104.12", ("cupy_cuda13x",), "cupy-cuda13x needs driver 580 or newer"),
            ("580.65.06", ("cupy_cuda12x", "cupy_cuda13x"), "only one may be installed"),
            ("470.82.01", (), "older than 525"),
        ],
    )
    def test_a_driver_has_the_cupy_that_suits_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, cupy: tuple[str, ...], said: str
    ) -> None:
        for name in cupy:
            info = tmp_path / "site" / f"{name}-13.6.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 13.6.0\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        version = tmp_path / "proc/driver/nvidia/version"
        version.parent.mkdir(parents=True)
        version.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Jul  5 2025\n")
        found = list(machine_findings.examine_driver(tmp_path))
        assert any(said in f"{each.hint} {each.problem}" for each in found), found


def test_what_was_installed_without_its_dependencies_says_so(tmp_path: Path) -> None:
    program = [sys.executable, "-S", "-c", "from fdcache_cli.main import run; run()"]  # -S: no packages
    for command in ("doctor", "serve", "env"):
        done = subprocess.run(
            [*program, command],
            env={**os.environ, **home(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: typer is not installed, which fdcache requires; ")


def with_other_shm(options: str, commands: str, tmp_path: Path) -> Done:
    """Run commands of a shell where /dev/shm is a tmpfs with these options."""
    program = f"exec {shlex.quote(sys.executable)} -m fdcache_cli.main"
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm || exit 99"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount}\nfdcache() ({program} "$@")\n{commands}'],
        check=False,
        env={**os.environ, **home(tmp_path), "FDCACHE_HTTP_ADDRESS": "127.0.0.1:0"},
        capture_output=True,
        text=True,
    )
    if done.returncode in (1, 99) and not done.stdout:
        pytest.skip(f"this user may not mount: {done.stderr}")
    return done


def finding(name: str, done: Done) -> list[dict[str, str]]:
    return [each for each in json.loads(done.stdout)["machine"] if each["name"] == name]


@pytest.mark.skipif(missing_gpu() is None, reason="kernels compile here; tests/gpu has those that do not")
@pytest.mark.parametrize("command", [run_doctor, run_init])
def test_kernels_that_do_not_compile_are_a_problem_of_their_own(
    tmp_path: Path, command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = topology.Gpu(0, "GPU-1", "H200", 13000, "0000:01:00.0", "PCIe 5 x16", 0, 132, 1 << 37)
    for module in (topology, machine_findings):
        monkeypatch.setattr(module, "visible_gpus", lambda: [gpu])
    done = command(**home(tmp_path))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    (found,) = (number for number, line in enumerate(lines) if line.startswith("swap kernels "))
    assert lines[found].split()[2:] == ["GPU-1:", "not", "compiled"]
    assert "PROBLEM: " in lines[found + 1] and "install fdcache[cuda12]" in lines[found + 1]
    answer = json.loads(command("--json", **home(tmp_path)).stdout)
    (kernels,) = (each for each in answer["machine"] if each["name"] == "swap kernels")
    assert "install fdcache[cuda12]" in kernels["problem"]
    assert answer.get("calibrations", []) == [], "a GPU without kernels is not measured"


def test_a_disk_smaller_than_the_storage_is_a_hint(tmp_path: Path) -> None:
    storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "storage")}
    done = run_doctor("--json", **storage, FDCACHE_STORAGE_SIZE="1000TiB")
    (disk,) = (each for each in json.loads(done.stdout)["machine"] if each["name"] == "disk")
    assert "more than is free" in disk["hint"]
    assert "created at the start" in disk["found"]


def test_the_storage_folder_is_measured_once_and_shown(tmp_path: Path) -> None:
    places = {**home(tmp_path), "FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_SIZE": "1MiB"}
    places["FDCACHE_STORAGE_DIR"] = str(tmp_path / "storage")

    def speed(command: Callable[..., Done] = run_init) -> str:
        done = command("--json", **places)
        found = [each for each in json.loads(done.stdout)["machine"] if each["name"] == "storage speed"]
        assert "cannot be measured" not in done.stdout and "too little room" not in done.stdout, done.stdout
        return found[0]["found"] if found else ""

    assert speed(run_doctor) == ""  # there is no folder yet
    first = speed()
    assert re.search(r"[0-9.]+ GB/s, [0-9.]+ ms for a small read", first)
    assert speed() == speed(run_doctor) == first
    assert list((tmp_path / "storage").iterdir()) == []
    (saved,) = (tmp_path / "calibration" / "storage").iterdir()
    saved.unlink()
    assert "not measured" in speed(run_doctor)


def test_dead_arenas_are_shown_and_removed_on_request(tmp_path: Path) -> None:
    dead = Arena(tmp_path, "deaddead", "ipc:///run/x.sock")
    dead.lock()
    dead.create(1 << 20)
    dead.close()
    living = Arena(tmp_path, "11111111")
    living.lock()
    folder = {**home(tmp_path / "home"), "FDCACHE_ARENA_DIR": str(tmp_path)}
    shown = run_doctor(**folder).stdout
    assert "dead, 1" in shown and "--socket ipc:///run/x.sock takes it over" in shown
    done = run_init("--clean-arenas", **folder)
    assert done.returncode == 0, done.stderr
    assert "removed a dead arena" in done.stdout
    assert [path.name for path in tmp_path.glob("fdcache-*")] == ["fdcache-11111111.arena"]
    living.close(discard=True)


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
