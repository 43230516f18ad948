"""Virtual environments with the packages that read events, outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.peers.environments import MARKER

REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))


def default_home() -> Path:
    """Return the folder of the environments: ``fdcache-router`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdcache-router"


def requirements(name: str) -> Path:
    """Return the file with the exact versions of an environment's packages."""
    return REQUIREMENTS / f"{name}.txt"


def interpreter(name: str) -> Path | None:
    """Return the Python of an environment; None if it is missing or of other versions."""
    folder = default_home() / name
    marker = folder / MARKER
    if not marker.is_file() or marker.read_text() != requirements(name).read_text():
        return None
    return folder / "bin/python"
