"""The kernels compile for every GPU generation that is supported, and the core carries their source."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fdcache import _core

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_nvcc_compiles_the_kernels_without_spills(architecture: str, tmp_path: Path) -> None:
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if compiler is None:
        pytest.skip("there is no nvcc")
    command = [
        compiler,
        "-std=c++17",
        f"-I{ROOT / 'csrc'}",
        f"-arch={architecture}",
        "-cubin",
        "-Xptxas",
        "-v",
    ]
    done = subprocess.run(
        [
            *command,
            "-Werror",
            "all-warnings",
            "-o",
            str(tmp_path / "swap.cubin"),
            str(ROOT / "csrc/swap/swap.cu"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 bytes spill stores") == 5, done.stderr


def test_the_core_carries_the_source_as_it_stands() -> None:
    files = [ROOT / "csrc/swap/items.hpp", ROOT / "csrc/swap/swap.cu"]
    assert _core.swap_source() == "".join(file.read_text() for file in files)
