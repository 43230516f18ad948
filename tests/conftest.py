"""Settings of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.seeds import VARIABLE

# Every run has the same examples, and nothing asserts a time: on a busy machine an example may take long.
settings.register_profile(
    "fdcache", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fdcache")


@pytest.fixture(scope="session", autouse=True)
def _hide_the_number_of_seeds() -> None:
    """Keep the variable, once it is read, from the programs under test: it is no setting of theirs."""
    os.environ.pop(VARIABLE, None)
