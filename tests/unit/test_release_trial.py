"""The commands that try wheels, where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["release.trial", "release.roots"])
def test_a_wheel_that_is_not_here_is_named(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, f"{tmp_path}/*.whl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"not here: {tmp_path}/*.whl; make dist writes wheels to dist/\n"
