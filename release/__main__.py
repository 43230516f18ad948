"""Write wheels, sdist, SBOM and checksums of the committed sources to dist/: ``make dist``.

    python -m release                                         # every CPython found, both machines
    python -m release --python python3.12 --machine x86_64    # one wheel

The same commit gives the same bytes, wherever it is built.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from release.pythons import PYTHONS, ROOT, Python
from release.sbom import write_checksums, write_sbom
from release.wheels import MACHINES, committed_at, make_sdist, make_wheel


def main() -> None:
    """Build what the options name. Exits 1 if an interpreter that they name is missing."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--python", action="append", help="an interpreter with headers; default: those found")
    parser.add_argument("--machine", action="append", choices=MACHINES)
    parser.add_argument("--folder", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode:
        say("there are changes that are not committed; they are left out")
    found = {name: Python.found(name) for name in options.python or PYTHONS}
    missing = [name for name, python in found.items() if python is None]
    if missing and options.python:
        raise SystemExit(f"not here, or without headers: {', '.join(missing)}")
    for name in missing:
        say(f"{name} is not here, or has no headers: no wheel for it")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("fdcache-*"):
        old.unlink()
    sdist = make_sdist(folder)
    made = [sdist]
    for machine in options.machine or MACHINES:
        for python in filter(None, found.values()):
            say(f"{python.tag} for {machine}")
            made.append(make_wheel(sdist, python, machine, folder))
    write_sbom(folder / "fdcache.cdx.json", made, int(committed_at()))
    write_checksums(folder / "SHA256SUMS", [*made, folder / "fdcache.cdx.json"])
    say((folder / "SHA256SUMS").read_text().rstrip())


def say(text: str) -> None:
    """Print one line of progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


main()
