"""Settings of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.seeds import VARIABLE

# Every run has the same examples, and nothing asserts a time: on a busy machine an example may take long.
settings.register_profile(
    "fdcache", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fdcache")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep modules and collected tests, which live to the end, out of what the garbage collector walks.

    Otherwise each whole collection, which many tests ask for, walks millions of objects that no test has made.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _hide_the_number_of_seeds() -> None:
    """Keep the variable, once it is read, from the programs under test: it is no setting of theirs."""
    os.environ.pop(VARIABLE, None)
