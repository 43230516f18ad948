"""Sdist and wheels from the committed sources, the same bytes each time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import ziglang

from release.pythons import ROOT, Python

WORK = ROOT / "build" / "release"
MACHINES = ("x86_64", "aarch64")
_GLIBC = "2.28"
_PLATFORM = f"manylinux_{_GLIBC.replace('.', '_')}"
_AUDIT = """
import platform, sys

machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main

sys.exit(main())
"""
"""auditwheel knows every machine, but lets its options name this one alone."""
_ZIG = Path(ziglang.__file__).with_name("zig")


@cache
def commit() -> str:
    """Return the commit that is built: what is committed meanwhile belongs to the next build."""
    return _output("git", "rev-parse", "HEAD")


@cache
def committed_at() -> str:
    """Return the time of that commit, in seconds; every file of a distribution has it."""
    return _output("git", "log", "-1", "--format=%ct", commit())


def make_sdist(folder: Path) -> Path:
    """Write the sdist of the committed sources."""
    source = WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit()], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(source, filter="data")
    _run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(source)])
    (made,) = folder.glob("fdcache-*.tar.gz")
    return made


def make_wheel(sdist: Path, python: Python, machine: str, folder: Path) -> Path:
    """Build the wheel of an interpreter for a machine, another than this one too, and check what it needs of it.

    The sources lie where those of every other wheel do: a compiler cache compiles what does not know Python once.
    """
    source, build, raw = (WORK / name for name in ("unpacked", "build", "raw"))
    for each in (source, build, raw):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir(parents=True)
    with tarfile.open(sdist) as files:
        files.extractall(source, filter="data")
    (tree,) = source.iterdir()
    tag = python.tag.removeprefix("cp")
    environ = {
        "FDCACHE_ZIG": str(_ZIG),
        "FDCACHE_COMPILER": str(_compiler_for(machine)),
        "CCACHE_COMPILERCHECK": f"string:{machine} {version('ziglang')}",
        "FDCACHE_SOURCE": str(tree),
        "FDCACHE_BUILD": str(build),
        "CMAKE_TOOLCHAIN_FILE": str(Path(__file__).with_name("zig.cmake")),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{tag}-{machine}-linux-gnu.so",
    }
    command = ["wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(raw)]
    command += ["--config-settings", f"build-dir={build}", str(tree)]
    program = python.environment(WORK / f"environment-{python.tag}")
    _run([str(program), "-m", "pip", "--disable-pip-version-check", *command], environ)
    (wheel,) = raw.glob("*.whl")
    platform = ["--plat", f"{_PLATFORM}_{machine}", "--only-plat"]
    audit = [
        sys.executable,
        "-c",
        _AUDIT,
        machine,
        "repair",
        *platform,
        "--wheel-dir",
        str(folder),
        str(wheel),
    ]
    _run(audit)
    (made,) = folder.glob(f"fdcache-*-{python.tag}-*{machine}.whl")
    return made


def _compiler_for(machine: str) -> Path:
    """Return a program that compiles for a machine. Its name tells a compiler cache how to talk to it."""
    program = WORK / machine / "clang++"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{_ZIG}" c++ -target {machine}-linux-gnu.{_GLIBC} "$@"\n')
    program.chmod(0o755)
    return program


def _run(command: list[str], environ: Mapping[str, str] | None = None) -> None:
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    same = {"PATH": tools, "SOURCE_DATE_EPOCH": committed_at(), "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
    subprocess.run(command, env=os.environ | same | dict(environ or {}), check=True, cwd=ROOT)


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
