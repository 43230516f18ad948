"""``fdcache init`` on a GPU: measuring, keeping, showing, and measuring stale calibrations again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdcache.devices.cuda import CudaDevice, load_kernels
from fdcache.devices.topology import visible_gpus
from fdcache.errors import KernelError
from fdcache.machine.calibration import Calibration, load_calibration, save_calibration
from fdcache.settings.cache import TransferSettings

RUN = "from fdcache_cli.main import run; run()"


def run_command(
    folder: Path, *options: str, program: str = RUN, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *options],
        env=os.environ
        | {"FDCACHE_CALIBRATION_DIR": str(folder), "XDG_CONFIG_HOME": str(folder.with_name("config"))}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_init_measures_keeps_and_shows_a_calibration(tmp_path: Path) -> None:
    picture = tmp_path / "link.svg"
    pytest.importorskip("matplotlib")
    uuid = visible_gpus()[0].uuid
    done = run_command(tmp_path, "init", "--yes", "--device", uuid, "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert "planes from" in done.stdout and uuid in done.stdout
    assert picture.stat().st_size > 1000
    again = run_command(tmp_path, "init", "--yes", "--device", uuid, "--json")
    (shown,) = json.loads(again.stdout)["calibrations"]
    kept = load_calibration(visible_gpus()[0], tmp_path)
    assert kept is not None
    assert shown["measured_at"] == kept.measured_at
    assert {each.method for each in kept.measurements} == {"direct", "staged", "kernel"}
    assert kept.link_to_device > 1 and kept.link_to_host > 1
    assert CudaDevice(settings=TransferSettings(calibration_dir=tmp_path)).calibration == kept


FULL = """
import cupy
free, _ = cupy.cuda.runtime.memGetInfo()
held = cupy.cuda.Memory(free - (128 << 20))
"""


def test_a_gpu_without_free_memory_is_not_measured(tmp_path: Path) -> None:
    uuid = visible_gpus()[0].uuid
    folder = tmp_path / "calibration"
    done = run_command(
        folder, "init", "--yes", "--device", uuid, program=f"{FULL}{RUN}", CUDA_VISIBLE_DEVICES=uuid
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot be measured" in done.stderr and "nothing else uses the GPU" in done.stderr
    assert not list(folder.iterdir())


def test_kernels_that_do_not_compile_are_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"GPU 0: .*error: .*pip install --upgrade nvidia-cuda-nvrtc"):
        load_kernels(0, "this is no C++")
    broken = "from fdcache import _core; _core.swap_source = lambda: 'this is no C++'; "
    done = run_command(tmp_path, "init", "--yes", "--json", program=f"{broken}{RUN}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    kernels = [each for each in answer["machine"] if each["name"] == "swap kernels"]
    assert len(kernels) == len(visible_gpus())
    assert all("not compiled" in each["found"] and "nvrtc" in each["problem"] for each in kernels)
    assert answer["calibrations"] == []


def test_doctor_compiles_the_kernels_and_keeps_nothing(tmp_path: Path) -> None:
    done = run_command(tmp_path / "calibration", "doctor", CUPY_CACHE_DIR=str(tmp_path / "kernels"))
    assert done.returncode == 0, done.stdout + done.stderr
    uuid = visible_gpus()[0].uuid
    assert f"swap kernels    {uuid}: compiled" in done.stdout
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_stale_calibration_is_not_used(tmp_path: Path) -> None:
    gpu = visible_gpus()[0]
    save_calibration(Calibration(gpu=gpu.uuid, driver=1, topology=gpu.topology), gpu, tmp_path)
    assert CudaDevice(settings=TransferSettings(calibration_dir=tmp_path)).calibration is None
