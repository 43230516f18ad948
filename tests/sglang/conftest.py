"""Engines of the tests in this folder. They need SGLang: other environments do not collect them."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.sglang.engine import PAGE, Answer, ask, running_engine, storage_options
from tests.vllm.engine import make_model

if TYPE_CHECKING:
    from tests.service_help import ServiceProcess

HAS_SGLANG = (
    importlib.util.find_spec("sglang.srt") is not None if importlib.util.find_spec("sglang") else False
)
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """More prompts than the device and the host pool have pages for."""
    chosen = random.Random(0)
    return [[chosen.randrange(3, 500) for _ in range(24 * PAGE + 5)] for _ in range(8)]


@pytest.fixture(scope="session")
def computed(model: Path, prompts: list[list[int]]) -> list[Answer]:
    """The answers of SGLang without HiCache."""
    with running_engine(model, disable_radix_cache=True) as engine:
        return [ask(engine, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service with storage, whose memory outlives it."""
    from tests.service_help import service_process

    folder = tmp_path_factory.mktemp("node")
    with service_process(
        folder / "service",
        FDCACHE_HOST_MEMORY="64MiB",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(folder / "disk"),
        FDCACHE_STORAGE_SIZE="64MiB",
        FDCACHE_DISCARD="0",
    ) as running:
        running.start()
        yield running


@pytest.fixture(scope="module")
def engine(model: Path, computed: list[Answer], service: ServiceProcess) -> Iterator[Any]:
    """An engine with FdcacheStorage at the service, shared by the tests of a module."""
    options = storage_options(FDCACHE_SERVER=service.address)
    with running_engine(model, enable_metrics=True, **options) as running:
        yield running
