"""Try wheels in empty environments: what their user does first, and what they take.

    python -m release.trial                # of this machine's compiler, for each CPython here
    python -m release.trial dist/*.whl     # these, in the CPython that each is for

Exits 1 if a command fails, or if wheel and dependencies take more disk than a release may.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from release.pythons import PYTHONS, ROOT, Python

WORK = ROOT / "build/trial"
MOST_BYTES = 80_000_000
"""Limit of the bytes of all files as the distributions contain them; Python compiles them to a third more."""
MOST_BYTES_CP311 = 80 << 20
"""80 MiB: the last numpy for Python 3.11 takes 4.6 MB more than the one for later Pythons."""
_PIP = ("-m", "pip", "--disable-pip-version-check")


def main(wheels: list[Path]) -> None:
    """Try these wheels, or one for each interpreter of this machine. Exits 1 if none could be tried."""
    tried = 0
    for wheel in wheels:
        tag = wheel.name.split("-")[2]
        name = f"python3.{tag.removeprefix('cp3')}"
        is_own = tag == f"cp3{sys.version_info.minor}"
        program = sys.executable if is_own else getattr(Python.found(name), "program", None)
        if program is None or not wheel.stem.endswith(platform.machine()):
            say(f"{wheel.name}: skipped, {name} for that machine is not here")
        else:
            try_wheel(program, wheel.absolute())
            tried += 1
    for name in () if wheels else PYTHONS:
        if (python := Python.found(name)) is None:
            say(f"{name}: skipped, it is not here, or has no headers")
        else:
            try_wheel(python.program, build_wheel(python))
            tried += 1
    if not tried:
        raise SystemExit("no wheel was tried")


def build_wheel(python: Python) -> Path:
    """Build the wheel of the working tree for an interpreter, its sources in groups, as without a compiler cache.

    All are built in one place and by this interpreter's compiler: a Python names its own, and a compiler cache finds
    an object of the same compiler and paths alone.
    """
    folder, build = WORK / f"wheel-{python.tag}", WORK / "build"
    for each in (folder, build):
        shutil.rmtree(each, ignore_errors=True)
    is_own = python.tag == f"cp3{sys.version_info.minor}"
    program = Path(sys.executable) if is_own else python.environment(WORK / f"build-{python.tag}")
    compiler = os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    for setting in (f"build-dir={build}", "cmake.define.CMAKE_UNITY_BUILD=ON"):
        command += ["--config-settings", setting]
    subprocess.run([program, *_PIP, *command], check=True, env=os.environ | {"CXX": compiler})
    (built,) = folder.glob("*.whl")
    return built


def try_wheel(python: str, wheel: Path) -> None:
    """Install a wheel into an empty environment, nothing compiled, and run its commands away from the sources."""
    environment = WORK / "empty"
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    install(environment, wheel)
    program = environment / "bin/fdcache"
    for words in ((), ("--version",), ("replay", "--workload", "chat")):
        subprocess.run([program, *words], cwd=environment, check=True)
    serve(program)


def install(environment: Path, wheel: Path) -> None:
    """Install a wheel with its dependencies, and say what that takes."""
    report = WORK / "installed.json"
    command = ["install", "--quiet", "--only-binary", ":all:", "--report", str(report), str(wheel)]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    empty = _sizes(environment)
    begun, used = time.monotonic(), _child_seconds()
    subprocess.run([environment / "bin/python", *_PIP, *command, *constraints], cwd=environment, check=True)
    seconds, used = time.monotonic() - begun, _child_seconds() - used
    installed = json.loads(report.read_text())["install"]
    names = {each["metadata"]["name"].lower() for each in installed}
    if names & {"torch", "paddlepaddle", "cupy-cuda12x", "cupy-cuda13x"}:
        raise SystemExit(f"an engine or a GPU came with the wheel: {sorted(names)}")
    unpacked, compiled = (after - before for after, before in zip(_sizes(environment), empty, strict=True))
    say(
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; with {len(names) - 1} dependencies "
        f"{unpacked / 1e6:.1f} MB on disk and {compiled / 1e6:.0f} MB that Python compiled of it; "
        f"{seconds:.1f} s, {used:.1f} of them of the processor"
    )
    most = MOST_BYTES_CP311 if "-cp311-" in wheel.name else MOST_BYTES
    if unpacked > most:
        raise SystemExit(f"{wheel.name} and its dependencies take more than {most / 1e6:.0f} MB")


def serve(program: Path) -> None:
    """Start a service, give it the blocks of an engine, look inside, and end it."""
    with tempfile.TemporaryDirectory(prefix="fdcache-") as folder:
        environ = os.environ | {"FDCACHE_RUNTIME_DIR": f"{folder}/run", "FDCACHE_HTTP_ADDRESS": "127.0.0.1:0"}
        environ |= {"FDCACHE_SERVER": f"ipc://{folder}/run/fdcache.sock"}
        command = [str(program), "serve", "--host-memory", "64MiB", "--discard"]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=folder) as service:
            assert service.stdout is not None
            for line in service.stdout:
                sys.stdout.write(line)
                if line.startswith("ready"):
                    break
            try:
                for words in (("replay", "--workload", "chat", "--requests", "20"), ("inspect",)):
                    subprocess.run([program, *words], env=environ, cwd=folder, check=True)
            finally:
                service.terminate()
    if service.returncode != 0:
        raise SystemExit(f"the service ended with {service.returncode}")


def _sizes(environment: Path) -> tuple[int, int]:
    """Return the bytes of the files of an environment, and of what Python compiled of them, without pip's own."""
    sizes = [0, 0]
    for path in environment.rglob("*"):
        if (
            path.is_file()
            and not path.is_symlink()
            and not {"pip", "setuptools", "pkg_resources"} & set(path.parts)
        ):
            sizes[path.suffix == ".pyc"] += path.stat().st_size
    return sizes[0], sizes[1]


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(text: str) -> None:
    """Print one line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def named_wheels() -> list[Path]:
    """Return the wheels that this command names. Exits 1 if one is missing."""
    wheels = [Path(each) for each in sys.argv[1:]]
    if missing := [str(wheel) for wheel in wheels if not wheel.is_file()]:
        raise SystemExit(f"not here: {', '.join(missing)}; make dist writes wheels to dist/")
    return wheels


if __name__ == "__main__":
    main(named_wheels())
