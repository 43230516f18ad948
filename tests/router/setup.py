"""Make the environments of the tests with routers' packages, each with the exact versions of its file.

    python -m tests.router.setup [dynamo] [sglang]

About 300 MB. The tests are skipped with a line where they are missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.setup import Setup, make_environment
from tests.router.environments import ENVIRONMENTS


def make(home: Path, name: str) -> None:
    """Make an environment."""
    make_environment(home / name, ENVIRONMENTS.requirements(name))


if __name__ == "__main__":
    command = Setup(ENVIRONMENTS.versions, ENVIRONMENTS.requirements, make)
    sys.exit(command.run("python -m tests.router.setup", __doc__, ENVIRONMENTS.default_home()))
