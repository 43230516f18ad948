"""A GPU for processes without one: a stand-in driver, and the part of CuPy that fdcache calls.

Its memory is the host's, its kernels are C++ and its streams are threads. It tests everything around the kernels: the
calls to the driver and their order, the effect of refusals, and that every resource is released once.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.native_build import LIBRARY, ROOT, library_path

REFUSED, LOST = 1, 719
"""Errors of the driver: an argument that is invalid, and a kernel that failed, after which nothing works."""


def run(driver: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that finds this driver, and its CuPy, before any other.

    ``CUDA_VISIBLE_DEVICES`` is dropped.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/stand_in_cupy"), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"LD_LIBRARY_PATH": library_path(driver), "PYTHONPATH": path} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def run_python(driver: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in such a process."""
    return run(driver, "-c", textwrap.dedent(code))


class Driver:
    """Counts and faults of the driver that this process loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def fail(self, call: str, *, after: int = 0, code: int = REFUSED, every: int = 0) -> None:
        """Fail a call after ``after`` more calls of it, and then every ``every`` calls."""
        self._library.stand_in_fail(call.encode(), after, code, every)

    def recover(self) -> int:
        """Stop failing calls and restore the GPU; return how often the call failed."""
        return int(self._library.stand_in_recover())

    def delay(self, copy: int) -> None:
        """Let copies take that many microseconds on average."""
        self._library.stand_in_delay(0, copy)

    def capture(self, stream: int) -> None:
        """Let that stream be captured into a graph; 0 lets none."""
        self._library.stand_in_capture(ctypes.c_void_p(stream))

    def disown(self, stream: int) -> None:
        """Let that stream be another GPU's."""
        self._library.stand_in_disown(ctypes.c_void_p(stream))

    def held(self) -> dict[str, int]:
        """Return what is taken and not given back, and the number of releases of things not taken."""
        names = ("events", "registered", "opened", "contexts", "pushed", "unknown")
        return {name: getattr(self._library, f"stand_in_{name}")() for name in names}
