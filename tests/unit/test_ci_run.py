"""What `.ci/run` does with steps that fail, by itself and beside others. The programs that it calls are stand-ins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.service_help import until

RUN = Path(__file__).parents[2] / ".ci/run"
STEPS = (
    "demo",
    "test",
    "lint",
    "gpu-extra",
    "wheel-test",
    "tsan",
    "lint-workflows",
    "site",
    "test-page",
    "test-chart",
    "test-mooncake",
    "check",
)
MAKE = """#!/bin/sh
echo "$1" >> "$TOLD"
[ "$1" != "$FAILS" ] || { echo "$1 says why"; exit 1; }
"""


def stand_ins(folder: Path, make: str, **environ: str) -> dict[str, str]:
    """Write the programs, and return the environment in which they are found."""
    for name, text in {"make": make, "npm": "#!/bin/sh\n", "id": "#!/bin/sh\necho 1000\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "tmp").mkdir()
    path = f"{folder}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "TMPDIR": str(folder / "tmp"),
        "TOLD": str(folder / "told"),
        **environ,
    }


def run_steps(folder: Path, fails: str = "") -> tuple[int, list[str], str]:
    """Run every step with a make that tells its targets; return the status, the targets and what was printed."""
    environ = stand_ins(folder, MAKE, FAILS=fails)
    done = subprocess.run(
        ["bash", RUN], env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    assert list((folder / "tmp").iterdir()) == [], "a folder of its own is left"
    return done.returncode, (folder / "told").read_text().split(), done.stdout


def test_each_step_runs_once_and_says_how_long(tmp_path: Path) -> None:
    status, told, printed = run_steps(tmp_path)
    assert (status, sorted(told)) == (0, sorted(STEPS))
    assert told[:2] == ["demo", "test"], "the README's two commands come first"
    for step in STEPS:
        assert f" s, status 0: inside make {step}\n" in printed or f": make {step}\n" in printed


@pytest.mark.parametrize("name", ["lint", "tsan"])
def test_a_step_that_fails_beside_others_ends_the_run(tmp_path: Path, name: str) -> None:
    status, told, printed = run_steps(tmp_path, fails=name)
    assert status != 0 and f"{name} says why" in printed
    assert {"lint", "tsan"} <= set(told), "the other lane is run to its end"
    assert not {"site", "check"} & set(told)


@pytest.mark.parametrize(("name", "goes_on"), [("demo", False), ("test", True), ("site", False)])
def test_only_tests_are_run_again(tmp_path: Path, name: str, goes_on: bool) -> None:
    status, told, _ = run_steps(tmp_path, fails=name)
    assert (status == 0, "again" in told, "check" in told) == (goes_on, goes_on, goes_on)


def test_what_runs_beside_ends_with_the_run(tmp_path: Path) -> None:
    sleeps = '#!/bin/sh\ncase $1 in lint|tsan) echo $$ >> "$TOLD"; sleep 600 ;; esac\n'
    with subprocess.Popen(
        ["bash", RUN], env=stand_ins(tmp_path, sleeps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        told = tmp_path / "told"
        try:
            until(lambda: told.exists() and len(told.read_text().split()) == 2, "both lanes run")
        finally:
            run.terminate()
    processes = [Path("/proc", pid) for pid in told.read_text().split()]
    until(lambda: not any(process.exists() for process in processes), "what ran beside has ended")
    assert list((tmp_path / "tmp").iterdir()) == []
