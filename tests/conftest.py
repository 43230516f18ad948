"""How all tests run."""

from __future__ import annotations

from hypothesis import settings

# Nothing asserts a time: on a busy machine an example may take long.
settings.register_profile("fdcache", deadline=None)
settings.load_profile("fdcache")
