"""The C++ of tests: the driver that stands in for a GPU's, and programs that use it. Made once in a run."""

from __future__ import annotations

import fcntl
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
    for part in ("control", "driver", "faults", "gpus", "holdings", "kernels", "memory", "streams")
]
CHECKSUM = ROOT / "csrc/hash/checksum.cpp"
FLAGS = ["-std=c++20", "-g1", "-fPIC", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("there is no g++")
    return found


def call(*command: str | Path) -> None:
    """Fails the test with the compiler's words if it does not compile."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compile_all(sources: Sequence[Path], folder: Path, flags: Sequence[str]) -> list[Path]:
    """An object file of each source, in their order."""

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        call(compiler(), *FLAGS, *flags, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def link_driver(objects: Sequence[Path], folder: Path, flags: Sequence[str] = ()) -> Path:
    """The driver under the name by which the core finds one."""
    library = folder / LIBRARY
    call(compiler(), *flags, "-shared", f"-Wl,-soname,{LIBRARY}", "-o", library, *objects)
    return library


def make_driver(folder: Path) -> None:
    """Make the driver in the folder."""
    link_driver(compile_all([*DRIVER, CHECKSUM], folder, ["-O2"]), folder, ["-pthread"])


def library_path(folder: Path) -> str:
    """``LD_LIBRARY_PATH`` with the folder before all others: a machine with a GPU may name its own driver there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def build_once(
    factory: pytest.TempPathFactory, worker_id: str, name: str, make: Callable[[Path], None]
) -> Path:
    """A folder for all processes of a run; the first that comes here fills it, others wait for it."""
    shared = factory.getbasetemp()
    folder = (shared if worker_id == "master" else shared.parent) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
