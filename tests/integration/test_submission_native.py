"""Submission of block copies to a GPU's streams, with threads for streams: the C++ core under ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native_build import (
    CHECKSUM,
    DRIVER,
    NATIVE,
    ROOT,
    build_once,
    call,
    compile_all,
    compiler,
    library_path,
    link_driver,
)
from tests.swaps import PATIENCE

pytestmark = pytest.mark.slow  # compiling takes half a minute of one core

CORE = [
    "copy/record",
    "cuda/context",
    "cuda/driver",
    "cuda/lane",
    "cuda/step_runner",
    "cuda/submitter",
    "cuda/swap",
    "cuda/swap_plan",
    "cuda/swap_steps",
]
PROGRAM = [ROOT / f"csrc/{name}.cpp" for name in CORE] + [
    NATIVE / f"{name}.cpp" for name in ("submission", "mixed_copies", "copy_world")
]
SANITIZER = ["-fsanitize=thread", "-Wno-tsan"]
"""Without g++'s warning that ThreadSanitizer does not model the fences around shared headers."""

CASES = [
    "batch-refused",
    "close",
    "copies-refused",
    "copies-refused-at-once",
    "first-range-refused-at-once",
    "first-range-refused-queued",
    "grace-close",
    "grace-host-waits",
    "grace-stream-waits",
    "grace-submitter-waits",
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
    "small-direct",
    "small-in-a-row-staged",
    "wait-refused",
    "wait-refused-ranges",
]


def launcher() -> list[str]:
    """Return a prefix that disables random addresses, where allowed: older sanitizers reject some of them."""
    setarch = shutil.which("setarch")
    if (
        setarch is None
        or subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode != 0
    ):
        return []
    return [setarch, "-R"]


def skip_without_sanitizer(folder: Path) -> None:
    source = folder / "probe.cpp"
    source.write_text("int main() {}\n")
    probe = folder / "probe"
    for command in (
        [compiler(), "-fsanitize=thread", "-o", str(probe), str(source)],
        [*launcher(), str(probe)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"ThreadSanitizer does not work here: {done.stderr.strip() or done.returncode}")


def make(folder: Path) -> None:
    """Build the program and the driver that it loads."""
    skip_without_sanitizer(folder)
    # Not sanitized: the loader selects its code for the processor before the sanitizer has started.
    (checksum,) = compile_all([CHECKSUM], folder, ["-O1"])
    objects = compile_all([*PROGRAM, *DRIVER], folder, ["-O1", *SANITIZER])
    program, driver = objects[: len(PROGRAM)], objects[len(PROGRAM) :]
    library = link_driver([*driver, checksum], folder, ["-fsanitize=thread"])
    call(compiler(), "-fsanitize=thread", "-o", folder / "submission", *program, checksum, library)


@pytest.fixture(scope="module")
def program() -> Path:
    return build_once("submission", make) / "submission"


def run(program: Path, *arguments: str) -> str:
    """Return the output of the program; fail the test if it fails, hangs or has a data race."""
    try:
        done = subprocess.run(
            [*launcher(), program, *arguments],
            env=os.environ
            | {"TSAN_OPTIONS": "halt_on_error=1", "LD_LIBRARY_PATH": library_path(program.parent)},
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
