"""Engines of the tests in this folder. They need vLLM: other environments do not collect them."""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vllm.engine import connector_config, generate, install_plugin, make_model, running_engine

if TYPE_CHECKING:
    from tests.vllm.observed import Observed

collect_ignore_glob = ["test_*.py"]

if importlib.util.find_spec("vllm") is not None:
    collect_ignore_glob = []
    _PLUGIN = tempfile.TemporaryDirectory(prefix="fdcache-vllm-")
    install_plugin(Path(_PLUGIN.name))  # before anything imports vLLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """More prompts than the device has blocks for."""
    chosen = random.Random(0)
    return [[chosen.randrange(3, 500) for _ in range(chosen.randrange(40, 200))] for _ in range(8)]


@pytest.fixture(scope="session")
def computed(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of vLLM without a connector."""
    with running_engine(model, enable_prefix_caching=False) as llm:
        return generate(llm, prompts)


@pytest.fixture(scope="module")
def engine(model: Path, computed: list[list[int]]) -> Iterator[Observed]:
    """An engine with the connector and a host tier of its own, shared by the tests of a module."""
    from tests.vllm.observed import Observed

    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")
    with running_engine(model, transfer) as llm:
        yield Observed(llm)
