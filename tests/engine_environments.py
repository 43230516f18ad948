"""Virtual environments with published packages of engines and routers, outside the repository."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import MARKER

PACKAGES = "TEST_PACKAGES"
"""Variable with the folder of packages that an environment sees after its own: fdcache and pytest are there."""


@dataclass(frozen=True)
class Environments:
    """One environment for each version of an engine, or each router: a file of exact versions in ``folder``.

    All are below ``name`` in the user's cache folder.
    """

    name: str
    folder: Path

    @property
    def versions(self) -> tuple[str, ...]:
        """Names of the environments: versions of an engine, the oldest first."""
        return tuple(sorted(path.stem for path in self.folder.glob("*.txt")))

    def default_home(self) -> Path:
        """Return the folder of the environments, in the user's cache folder."""
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / self.name

    def requirements(self, version: str) -> Path:
        """Return the file with the exact versions of an environment's packages."""
        return self.folder / f"{version}.txt"

    def is_complete(self, home: Path, version: str) -> bool:
        """Return True if an environment is there with the packages of today."""
        marker = home / version / MARKER
        return marker.is_file() and marker.read_text() == self.requirements(version).read_text()

    @staticmethod
    def interpreter(home: Path, version: str) -> Path:
        """Return the Python of an environment."""
        return home / version / "bin/python"
