"""Try a wheel in an empty environment: what its user does first, and what it takes.

    python -m release.trial build/empty dist/fdcache-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl

Exits 1 if a command fails, or if wheel and dependencies together take more than 80 MB to download.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_BYTES = 80_000_000
SERVE = ("serve", "--check", "--host-memory", "16MiB")


def main(environment: Path, wheel: Path) -> None:
    """Install the wheel, nothing compiled, and run its commands away from the sources."""
    report = environment / "installed.json"
    begun = time.monotonic()
    install = ["install", "--quiet", "--only-binary", ":all:", "--report", str(report)]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    run(environment, "pip", "--disable-pip-version-check", *install, *constraints, str(wheel))
    seconds = time.monotonic() - begun
    installed = json.loads(report.read_text())["install"]
    names = {each["metadata"]["name"].lower() for each in installed}
    if names & {"torch", "paddlepaddle", "cupy-cuda12x", "cupy-cuda13x"}:
        raise SystemExit(f"an engine or a GPU came with the wheel: {sorted(names)}")
    nbytes = sum(
        path.stat().st_size for path in environment.rglob("*") if path.is_file() and "/pip/" not in str(path)
    )
    sys.stdout.write(
        f"installed {len(names)} distributions in {seconds:.1f} s, {nbytes / 1e6:.0f} MB on disk\n"
    )
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} is larger than {MOST_BYTES // 1_000_000} MB")
    for words in ((), ("--version",), SERVE, ("replay", "--workload", "chat")):
        run(environment, "fdcache", *words)


def run(environment: Path, program: str, *words: str) -> None:
    """Run a program of the environment; its failure is this one's."""
    sys.stdout.flush()
    subprocess.run([environment.absolute() / "bin" / program, *words], cwd=environment, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).absolute())
