"""How block copies are put on a GPU's streams, with threads for streams: the core in C++, under ThreadSanitizer."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.swaps import PATIENCE

pytestmark = pytest.mark.slow  # compiling takes half a minute of one core

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests/native"
CORE = [
    "cuda_context",
    "cuda_driver",
    "cuda_lane",
    "cuda_steps",
    "cuda_swap",
    "cuda_swap_result",
    "record_check",
    "submitter",
    "swap_plan",
    "swap_steps",
]
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
SANITIZER = ["-fsanitize=thread", "-Wno-tsan"]
"""It does not follow the fences of headers that other processes read, and g++ says so."""

CASES = [
    "batch-refused",
    "close",
    "copies-refused",
    "copies-refused-at-once",
    "first-range-refused-at-once",
    "first-range-refused-queued",
    "last-writer-direct",
    "last-writer-kernel",
    "last-writer-slow-calls",
    "last-writer-slow-copies",
    "last-writer-staged",
    "promised-event",
    "promised-wait-refused",
    "promised-wait-refused-ranges",
    "ranges-at-once",
    "ranges-queued",
    "wait-refused",
    "wait-refused-ranges",
]


def call(*command: str | Path) -> str:
    """What the compiler says; fails the test if it does not compile."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def launcher() -> list[str]:
    """Without random addresses, where that is allowed: older sanitizers do not start on some of them."""
    setarch = shutil.which("setarch")
    if (
        setarch is None
        or subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode != 0
    ):
        return []
    return [setarch, "-R"]


def skip_without_sanitizer(compiler: str, folder: Path) -> None:
    source = folder / "probe.cpp"
    source.write_text("int main() {}\n")
    probe = folder / "probe"
    for command in (
        [compiler, "-fsanitize=thread", "-o", str(probe), str(source)],
        [*launcher(), str(probe)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"ThreadSanitizer does not work here: {done.stderr.strip() or done.returncode}")


def build(compiler: str, folder: Path) -> None:
    """Make the program, and the driver that it finds beside itself."""

    def compile_one(source: Path, flags: Sequence[str]) -> Path:
        made = folder / f"{source.stem}.o"
        call(compiler, *FLAGS, *flags, "-c", source, "-o", made)
        return made

    core = [ROOT / f"csrc/core/{name}.cpp" for name in CORE]
    tests = [
        TESTS / f"{name}.cpp" for name in ("submission", "mixed_copies", "copy_world", "stand_in_driver")
    ]
    sources = [*core, *tests]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The loader picks this one's code for the processor before the sanitizer is there.
        checksum = pool.submit(compile_one, ROOT / "csrc/core/checksum.cpp", [])
        *program, driver = pool.map(compile_one, sources, [SANITIZER] * len(sources))
    library = folder / "libcuda.so.1"
    link = [compiler, "-fsanitize=thread", f"-Wl,-rpath,{folder}"]
    call(*link, "-shared", f"-Wl,-soname,{library.name}", "-o", library, driver, checksum.result())
    call(*link, "-o", folder / "linked", *program, checksum.result(), library)
    (folder / "linked").rename(folder / "submission")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Compiled by the first process of a run that comes here; others wait for it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    shared = tmp_path_factory.getbasetemp()
    folder = (shared if worker_id == "master" else shared.parent) / "submission_native"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "submission").exists():
            skip_without_sanitizer(compiler, folder)
            build(compiler, folder)
    return folder / "submission"


def run(program: Path, *arguments: str) -> str:
    """What the program prints; fails the test with its words when it fails, hangs or races."""
    try:
        done = subprocess.run(
            [*launcher(), program, *arguments],
            env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"it hangs: {expired.stderr!r}")
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return done.stdout


def test_no_case_is_left_out(program: Path) -> None:
    assert run(program).split() == CASES


@pytest.mark.parametrize("case", CASES)
def test_submission(program: Path, case: str) -> None:
    run(program, case)
