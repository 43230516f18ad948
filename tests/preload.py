"""C libraries that tests preload into a process, to record or disturb its system calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def build(name: str, folder: Path) -> Path:
    """Build the library from ``tests/<name>.c``; skip the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the library that is preloaded")
    library = folder / f"{name}.so"
    source = Path(__file__).parent / f"{name}.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def run(name: str, script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of Python with ``tests/<name>.c`` preloaded; it is given a new folder for its files."""
    library = build(name, folder)
    (files := folder / "files").mkdir()
    return subprocess.run(
        [sys.executable, "-c", script, str(files)],
        env={**os.environ, **variables, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
