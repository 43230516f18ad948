"""Virtual environments with SGLang's published wheel and torch for CPUs, outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers.environments import MARKER

REQUIREMENTS = Path(__file__).parent / "requirements"
VERSIONS = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
"""The versions of SGLang that the storage is tested with."""

PACKAGES = "TEST_PACKAGES"
"""Variable with the folder of packages that an environment sees after its own: fdcache and pytest are there."""


def default_home() -> Path:
    """Return the folder of the environments: ``fdcache-sglang`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdcache-sglang"


def requirements(version: str) -> Path:
    """Return the file with the exact versions of an environment's packages."""
    return REQUIREMENTS / f"{version}.txt"


def is_complete(home: Path, version: str) -> bool:
    """Return True if an environment is there with the packages of today."""
    marker = home / version / MARKER
    return marker.is_file() and marker.read_text() == requirements(version).read_text()


def interpreter(home: Path, version: str) -> Path:
    """Return the Python of an environment."""
    return home / version / "bin/python"
