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
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import (
    ENVIRONMENTS,
    MARKER,
    default_home,
    requirements,
)


class SetupError(Exception):
    """pip has failed; the message has its last line."""


def make_environment(folder: Path, wanted: Path) -> None:
    """Make an environment afresh. Packages are installed without their dependencies: ``wanted`` lists all that is used.

    Raises ``SetupError`` if pip fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/pip"), "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--requirement", str(wanted)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        hint = "; name an index with torch for CPUs in PIP_EXTRA_INDEX_URL" if "torch" in str(errors) else ""
        raise SetupError(f"{folder.name}: pip failed: {(errors or ['no message'])[-1]}{hint}")


@dataclass(frozen=True)
class Setup:
    """A command that makes environments: each is made by ``make(home, name)`` from its file of ``requirements``."""

    known: Collection[str]
    requirements: Callable[[str], Path]
    make: Callable[[Path, str], None]

    def run(self, prog: str, text: str | None, home: Path, arguments: list[str] | None = None) -> int:
        """Make the environments that are missing or have other versions. Return the exit status."""
        environments, home = self._parse(prog, text, home, arguments)
        for environment in environments:
            folder, wanted = home / environment, self.requirements(environment).read_text()
            marker = folder / MARKER
            if marker.is_file() and marker.read_text() == wanted:
                print(f"{environment}: {folder} is complete")
                continue
            print(f"{environment}: installing into {folder}", flush=True)
            try:
                self.make(home, environment)
            except SetupError as error:
                print(error, file=sys.stderr)
                return 1
            marker.write_text(wanted)
        return 0

    def _parse(
        self, prog: str, text: str | None, home: Path, arguments: list[str] | None
    ) -> tuple[list[str], Path]:
        parser = argparse.ArgumentParser(
            prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        names = ", ".join(self.known)
        parser.add_argument("environments", nargs="*", metavar="NAME", help=f"of {names}; default all")
        parser.add_argument("--home", type=Path, default=home, help="default: %(default)s")
        options = parser.parse_args(arguments)
        if unknown := set(options.environments) - set(self.known):
            parser.error(f"no environment {', '.join(sorted(unknown))}: there are {names}")
        return options.environments or [*self.known], options.home


def _make(home: Path, environment: str) -> None:
    make_environment(home / environment, requirements(environment))


def main(arguments: list[str] | None = None) -> int:
    """Make the environments of the peers."""
    command = Setup(ENVIRONMENTS, requirements, _make)
    return command.run("python -m benchmarks.peers.setup", __doc__, default_home(), arguments)


if __name__ == "__main__":
    sys.exit(main())
