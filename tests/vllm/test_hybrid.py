"""Models whose layers attend to all tokens or to a sliding window, each group with block tables of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

from fdcache.integrations.vllm import FdcacheConnector
from tests.vllm.engine import BLOCK_SIZE, connector_config, generate, make_model, running_engine
from tests.vllm.observed import Observed

if not supports_hma(FdcacheConnector):
    pytest.skip("this vLLM keeps the layers of such models in one group", allow_module_level=True)

Answers = list[list[int]]
WINDOW = 40
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"] * 2


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of full and sliding-window layers."""
    folder = tmp_path_factory.mktemp("hybrid")
    return make_model(folder, num_layers=len(LAYERS), layer_types=LAYERS, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def prompts() -> Answers:
    """Prompts of several windows, more than the device has blocks for."""
    chosen = random.Random(0)
    return [[chosen.randrange(3, 500) for _ in range(chosen.randrange(60, 260))] for _ in range(8)]


@pytest.fixture(scope="module")
def computed(hybrid: Path, prompts: Answers) -> Answers:
    """The answers of vLLM without a connector."""
    with running_engine(hybrid, enable_prefix_caching=False, num_gpu_blocks_override=90) as llm:
        return generate(llm, prompts)


@pytest.fixture(scope="module")
def engine(hybrid: Path, computed: Answers) -> Iterator[Observed]:
    """An engine with the connector and a host tier of its own."""
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")
    with running_engine(hybrid, transfer, num_gpu_blocks_override=90) as llm:
        yield Observed(llm)


def test_answers_are_those_without_a_connector_while_blocks_are_evicted(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    assert engine.manager.layout.windows == (0, WINDOW, WINDOW)
    before = engine.counters.host_hit_tokens
    for _ in range(3):
        assert engine.answers(prompts) == computed
    assert engine.counters.host_hit_tokens > before
    assert engine.counters.loads_failed == engine.counters.loads_overdue == 0
    engine.assert_nothing_is_held()
