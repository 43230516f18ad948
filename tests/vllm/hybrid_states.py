"""Fixtures of tests with Nemotron-H: states of Mamba 2 in pages that layers that attend have as well.

A step's 64 tokens are one block: with more, vLLM wants states within a chunk, which its CPU code does not give.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm import hybrid
from tests.vllm.engine import connector_config, running_engine
from tests.vllm.models import make_family
from tests.vllm.observed import Observed

computed = hybrid.computed


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of layers with states and of one that attends."""
    return make_family("Nemotron-H", tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def engine(model: Path, computed: list[list[int]]) -> Iterator[Observed]:
    """With device blocks for some of the requests that run at once: the others are preempted."""
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")
    with running_engine(model, transfer, num_gpu_blocks_override=30) as llm:
        yield Observed(llm)
