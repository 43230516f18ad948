"""Try wheels on machines without a compiler: fresh roots of the Debians that have their Pythons.

    python -m release.roots dist/*.whl    # as root, with mmdebstrap; aarch64 with qemu-user-static too

On this machine's architecture: what ``release.trial`` does. On another one, emulated: the tests of hash, tier and copy.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release.pythons import ROOT
from release.trial import say

BARE_ROOT = ROOT / ".ci/bare-root"
SUITES = {"cp311": "bookworm", "cp313": "trixie", "cp314": "sid"}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
CHECKOUT = "root/fdcache"
PACKAGES = "usr/local/fdcache-packages"
TESTS = ("hashing", "checksum", "tier", "tier_copies", "tier_order", "tier_runs", "copy_stream", "copy_out")


def main(wheels: list[Path]) -> None:
    """Try each wheel in a root of its own. Exits 1 with the first that fails."""
    for wheel in wheels:
        tag, machine = wheel.name.split("-")[2], wheel.stem.partition("_2_28_")[2]
        is_here = machine == platform.machine()
        if tag not in SUITES:
            say(
                f"{wheel.name}: skipped, no Debian has the Python; python -m release.trial tries it without a root"
            )
        elif not is_here and not Path(f"/proc/sys/fs/binfmt_misc/qemu-{machine}").exists():
            say(
                f"{wheel.name}: skipped, nothing emulates {machine}: apt install qemu-user-static binfmt-support"
            )
        else:
            say(f"{wheel.name} on {machine} of Debian {SUITES[tag]}:")
            with tempfile.TemporaryDirectory(prefix="fdcache-root-") as folder:
                root = Path(folder) / "root"
                subprocess.run([BARE_ROOT, "make", root, SUITES[tag], ARCHITECTURES[machine]], check=True)
                shutil.copy(wheel, root / CHECKOUT)
                (try_here if is_here else try_emulated)(root, wheel)


def try_here(root: Path, wheel: Path) -> None:
    """Install the wheel and run its commands, a service among them, where nothing can be compiled."""
    for compiler in ("gcc", "g++", "clang", "cc", "c++"):
        if shutil.which(compiler, path=str(root / "usr/bin")) is not None:
            raise SystemExit(f"{root} has {compiler}")
    subprocess.run([BARE_ROOT, "run", root, "python3", "-m", "release.trial", wheel.name], check=True)


def try_emulated(root: Path, wheel: Path) -> None:
    """Run the tests of hash, tier and copy. This machine's pip unpacks what they need: emulated it takes minutes.

    No test has a limit of its own: how long one takes emulated says nothing of it.
    """
    _, _, tag, _, platforms = wheel.stem.split("-")
    machine = platforms.partition("_2_28_")[2]
    names = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 26, 27, 28))]
    command = [
        "install",
        "--quiet",
        "--only-binary",
        ":all:",
        "--no-compile",
        "--target",
        str(root / PACKAGES),
    ]
    command += [f"--platform={each}_{machine}" for each in names]
    command += [
        f"--python-version=3.{tag.removeprefix('cp3')}",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    tools = ["pytest", "pytest-timeout", "hypothesis", "psutil"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *command, str(wheel.absolute()), *tools],
        check=True,
    )
    for package in ("fdcache", "fdcache_cli"):  # the wheel's are tested
        shutil.rmtree(root / CHECKOUT / package)
    tests = [f"tests/unit/test_{name}.py" for name in TESTS]
    run = [
        "env",
        f"PYTHONPATH=/{PACKAGES}",
        "python3",
        "-m",
        "pytest",
        "--quiet",
        "-p",
        "no:cacheprovider",
        "--timeout=0",
        *tests,
    ]
    subprocess.run([BARE_ROOT, "run", root, *run], check=True)


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:]])
