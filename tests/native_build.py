"""Builds the C++ of tests: the driver that stands in for a GPU's, and programs that use it.

Each build is kept in build/native, under a hash of its sources, and made again only when they change. Compilations
go through ccache where it is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NATIVE = ROOT / "tests/native"
LIBRARY = "libcuda.so.1"
DRIVER = [
    NATIVE / f"stand_in_{part}.cpp"
    for part in ("control", "driver", "faults", "gpus", "holdings", "ipc", "kernels", "memory", "streams")
]
CHECKSUM = ROOT / "csrc/hash/checksum.cpp"
CCACHE = list(filter(None, [shutil.which("ccache")]))
FLAGS = ["-std=c++20", "-g1", "-fPIC", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]


def compiler() -> str:
    """Return the C++ compiler; skip the test if there is none."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("there is no g++")
    return found


def call(*command: str | Path) -> None:
    """Run a command; fail the test with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compile_all(sources: Sequence[Path], folder: Path, flags: Sequence[str]) -> list[Path]:
    """Compile each source; return the object files in the same order."""

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        call(*CCACHE, compiler(), *FLAGS, *flags, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def link_driver(objects: Sequence[Path], folder: Path, flags: Sequence[str] = ()) -> Path:
    """Link the driver under the name by which the core loads it."""
    library = folder / LIBRARY
    call(compiler(), *flags, "-shared", f"-Wl,-soname,{LIBRARY}", "-o", library, *objects)
    return library


def make_driver(folder: Path) -> None:
    """Build the driver in the folder."""
    link_driver(compile_all([*DRIVER, CHECKSUM], folder, ["-O2"]), folder, ["-pthread"])


def library_path(folder: Path) -> str:
    """Return ``LD_LIBRARY_PATH`` with the folder first: on a machine with a GPU it may name the real driver."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def build_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of a build, made by the first process that needs it; others wait."""
    builds = ROOT / "build/native"
    builds.mkdir(parents=True, exist_ok=True)
    folder = builds / f"{name}-{fingerprint()}"
    with (builds / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            for stale in builds.glob(f"{name}-*"):
                shutil.rmtree(stale)
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


def fingerprint() -> str:
    """Return a hash of everything that a build depends on: sources, flags and compiler."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=True)
    digest.update(version.stdout)
    files = [*(ROOT / "csrc").rglob("*"), *NATIVE.iterdir(), *(ROOT / "tests").rglob("*native*.py")]
    for file in sorted(file for file in files if file.is_file()):
        digest.update(f"{file.relative_to(ROOT)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
