"""Several operations of a tier under one lock, called from C++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native_build import NATIVE, ROOT, build_once, call, compile_all, compiler

CORE = [each for each in sorted((ROOT / "csrc/tier").glob("*.cpp")) if "bindings" not in each.name]


def make_program(folder: Path) -> None:
    """Build the program of the tests with the sources of the tier."""
    objects = compile_all([NATIVE / "tier_session.cpp", *CORE], folder, ["-O1"])
    call(compiler(), "-pthread", "-o", folder / "tier_session", *objects)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_session_has_one_time_and_forgets_nothing_of_what_was_learned() -> None:
    program = build_once("tier_session", make_program) / "tier_session"
    done = subprocess.run([program, "clock"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(300)
def test_a_session_appends_to_memory_of_its_caller_and_changes_nothing_when_it_fails() -> None:
    program = build_once("tier_session", make_program) / "tier_session"
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
