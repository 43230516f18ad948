"""Mark the tests in this folder as needing a GPU, and skip them with the reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.devices.topology import visible_gpus
from fdcache.errors import DeviceError

HERE = Path(__file__).parent


def missing_gpu() -> str | None:
    try:
        visible_gpus()
    except DeviceError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_gpu()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
