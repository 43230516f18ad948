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


@pytest.mark.slow
def test_the_oldest_supported_release_evicts_and_loads(tmp_path: Path) -> None:
    # Another release cannot be imported into this process, and beside the installed one only from a folder before it.
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        *OLDEST,
    ]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{OLDEST[0]} cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.paddle_planes"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == ["Paddle 2.6.2 on cpu"] * len(
        LAYOUTS
    )
