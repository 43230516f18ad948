"""Make the environments of the peers, each with the exact versions of its file in ``requirements``.

    python -m benchmarks.peers.setup [vllm] [sglang] [--home FOLDER]

About 6 GB. torch is a build for CPUs; where pip's own index has none, name one that has in PIP_EXTRA_INDEX_URL or
PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.peers.environments import (
    ENVIRONMENTS,
    MARKER,
    MissingError,
    default_home,
    interpreter,
    requirements,
)


class SetupError(Exception):
    """pip has failed; the message has its last line."""


def is_complete(home: Path, environment: str) -> bool:
    """Return True if an environment is there with the packages of today."""
    try:
        interpreter(home, environment)
    except MissingError:
        return False
    return True


def make_environment(home: Path, environment: str) -> None:
    """Make one environment afresh. Packages are installed without their dependencies: the file lists all that is used.

    Raises ``SetupError`` if pip fails.
    """
    folder, wanted = home / environment, requirements(environment)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    command = [
        folder / "bin/pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--requirement",
        wanted,
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        hint = "; name an index with torch for CPUs in PIP_EXTRA_INDEX_URL" if "torch" in str(errors) else ""
        raise SetupError(f"{environment}: pip failed: {(errors or ['no message'])[-1]}{hint}")
    (folder / MARKER).write_text(wanted.read_text())


def main(arguments: list[str] | None = None) -> int:
    """Make the environments that are missing or have other versions."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.setup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "environments", nargs="*", metavar="PEER", help=f"of {', '.join(ENVIRONMENTS)}; default all"
    )
    parser.add_argument("--home", type=Path, default=default_home(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := set(options.environments) - set(ENVIRONMENTS):
        parser.error(f"no environment {', '.join(sorted(unknown))}: there are {', '.join(ENVIRONMENTS)}")
    for environment in options.environments or ENVIRONMENTS:
        if is_complete(options.home, environment):
            print(f"{environment}: {options.home / environment} is complete")
            continue
        print(f"{environment}: installing into {options.home / environment}", flush=True)
        try:
            make_environment(options.home, environment)
        except SetupError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
