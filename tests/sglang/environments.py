"""Virtual environments with SGLang's published wheel, for the tests of the storage."""

from __future__ import annotations

from pathlib import Path

from tests.engine_environments import PACKAGES, Environments

__all__ = ["PACKAGES", "VERSIONS", "default_home", "interpreter", "is_complete", "requirements"]

_ENVIRONMENTS = Environments("fdcache-sglang", Path(__file__).parent / "requirements")
VERSIONS = _ENVIRONMENTS.versions
default_home = _ENVIRONMENTS.default_home
requirements = _ENVIRONMENTS.requirements
is_complete = _ENVIRONMENTS.is_complete
interpreter = _ENVIRONMENTS.interpreter
