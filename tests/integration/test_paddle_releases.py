"""Paddle tensors as device planes on the CPU: the installed release, and the oldest that is supported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from tests.paddle_planes import LAYOUTS, check

OLDEST = ("paddlepaddle==2.6.2", "decorator", "astor", "opt-einsum")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_after_eviction_and_load(name: str) -> None:
    check(name)


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the oldest release into a folder.

    It cannot be imported into this process, and beside the installed one only from a folder before it.
    """
    folder = tmp_path_factory.mktemp("oldest")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        *OLDEST,
    ]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{OLDEST[0]} cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )


@pytest.mark.slow
def test_the_oldest_supported_release_evicts_and_loads(oldest: Path) -> None:
    done = python(oldest, "-m", "tests.paddle_planes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == ["Paddle 2.6.2 on cpu"] * len(
        LAYOUTS
    )


@pytest.mark.slow
def test_zlib_works_beside_the_oldest_supported_release(oldest: Path) -> None:
    program = (
        "import fdcache.integrations.paddle, paddle, zlib\n"
        "print(paddle.__version__, len(zlib.decompress(zlib.compress(bytes(1000)))))"
    )
    done = python(oldest, "-c", program)
    assert (done.stdout, done.returncode) == ("2.6.2 1000\n", 0), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    "zlib" in sys.builtin_module_names, reason="the interpreter has a zlib that nothing replaces"
)
def test_a_zlib_that_paddle_replaced_is_an_error_instead_of_a_crash(oldest: Path) -> None:
    program = (
        "import paddle\n"
        "from fdcache.devices.cuda import CudaDevice\n"
        "from fdcache.errors import DeviceError\n"
        "try: CudaDevice(0)\n"
        "except DeviceError as error: print(error)"
    )
    done = python(oldest, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Paddle 2.6.2 was imported before zlib and replaces its functions")


@pytest.mark.slow
def test_the_example_engine_runs_on_the_oldest_supported_release(oldest: Path) -> None:
    small = ("--requests", "6", "--scale", "16", "--layers", "2")
    done = python(oldest, "-m", "examples.paddle_engine", *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "near ties: 0" in done.stdout
    fp8 = python(oldest, "-m", "examples.paddle_engine", *small, "--kv-dtype", "float8_e4m3fn")
    assert fp8.returncode in (1, 2)
    assert "float8_e4m3fn" in fp8.stderr and "Traceback" not in fp8.stderr
