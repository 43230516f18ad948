"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Every run has the same examples, and nothing asserts a time: on a busy machine an example may take long.
settings.register_profile(
    "fdcache", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fdcache")
