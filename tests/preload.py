"""C libraries that tests preload into a process, to record or disturb its system calls."""

from __future__ import annotations

import shutil
import subprocess
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
