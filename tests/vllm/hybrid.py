"""Fixtures of tests with a model of full and sliding-window layers, each group with block tables of its own.

Tests of other modules that are imported beside them run with this model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from fdcache.integrations.vllm import FdcacheConnector
from tests.vllm.engine import generate, make_model, running_engine

if not supports_hma(FdcacheConnector):
    pytest.skip("this vLLM keeps the layers of such models in one group", allow_module_level=True)

WINDOW = 40
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"] * 2


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of full and sliding-window layers."""
    folder = tmp_path_factory.mktemp("hybrid")
    return make_model(folder, num_layers=len(LAYERS), layer_types=LAYERS, sliding_window=WINDOW)


@pytest.fixture(scope="session")
def computed(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of vLLM without a connector."""
    with running_engine(model, enable_prefix_caching=False) as llm:
        return generate(llm, prompts)
