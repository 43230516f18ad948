"""Virtual environments with the packages that read events, one for each router."""

from __future__ import annotations

from pathlib import Path

from tests.engine_environments import Environments

ENVIRONMENTS = Environments("fdcache-router", Path(__file__).parent / "requirements")


def interpreter(name: str) -> Path | None:
    """Return the Python of an environment; None if it is missing or of other versions."""
    home = ENVIRONMENTS.default_home()
    return ENVIRONMENTS.interpreter(home, name) if ENVIRONMENTS.is_complete(home, name) else None
