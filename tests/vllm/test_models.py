"""vLLM's own engine with small models of several families: its tokens are those of vLLM without a connector."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

from tests.vllm.engine import connector_config, generate, running_engine
from tests.vllm.models import FAMILIES, make_family
from tests.vllm.observed import Observed

Answers = list[list[int]]

ROOM = {"Gemma 2": 90, "Gemma 3": 110}
"""Device blocks of a family that needs more than 40: for a prompt, not for all."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, make_family(name, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def alone(family: tuple[str, Path], prompts: Answers) -> Answers:
    """The answers of vLLM without a connector."""
    with running_engine(family[1], enable_prefix_caching=False, **room_of(family[0])) as llm:
        return generate(llm, prompts)


def room_of(family: str) -> dict[str, Any]:
    return {"num_gpu_blocks_override": ROOM.get(family, 40), "max_model_len": 256}


@pytest.fixture(scope="module")
def cached(family: tuple[str, Path], alone: Answers) -> Iterator[Observed]:
    """An engine with the connector, begun when that of ``alone`` has ended."""
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")
    with running_engine(family[1], transfer, **room_of(family[0])) as llm:
        yield Observed(llm)


def test_tokens_are_those_without_a_connector_while_blocks_are_evicted(
    cached: Observed, prompts: Answers, alone: Answers
) -> None:
    order = list(range(len(prompts)))
    for turn in range(3):
        random.Random(turn).shuffle(order)
        assert cached.answers([prompts[i] for i in order]) == [alone[i] for i in order]
    assert cached.counters.host_hit_tokens > 0
    assert cached.counters.loads_failed == 0
    cached.assert_nothing_is_held()


def test_ranks_keep_the_latents_of_a_model_once(prompts: Answers, tmp_path: Path) -> None:
    """With two ranks as many blocks fit into host memory as with one, and the tokens are the same."""
    model = make_family("DeepSeek V3", tmp_path / "model")
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with running_engine(model, enable_prefix_caching=False, **options) as llm:
        alone = generate(llm, prompts)
    blocks = []
    for ranks in ({}, options):
        transfer = connector_config(
            FDCACHE_HOST_MEMORY="4MiB", FDCACHE_VERIFY="all", FDCACHE_ARENA_DIR=str(tmp_path)
        )
        with running_engine(model, transfer, **ranks) as llm:
            manager = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.manager
            for _ in range(3):
                answers = generate(llm, prompts)
                assert not ranks or answers == alone
            counters = manager.get_stats().counters
            assert counters.host_hit_tokens > 0
            assert counters.loads_failed == 0
            blocks.append((manager.num_host_blocks, manager.layout.fingerprint))
    assert blocks[0] == blocks[1]


def test_a_loaded_block_with_the_bytes_of_another_changes_the_tokens(
    cached: Observed, prompts: Answers, alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: wrong bytes in loaded blocks are seen."""
    cached.answers(prompts)
    cached.forget_device()
    poll = cached.worker.poll

    def copying() -> set[str]:
        loads = [[block for block in load.blocks if block > 0] for load in cached.worker._loads.values()]
        received = poll()
        for blocks in loads if received else ():
            for pages in cached.tensors:
                pages[blocks[:-1]] = pages[blocks[-1]].clone()
        return received

    monkeypatch.setattr(cached.worker, "poll", copying)
    assert cached.answers(prompts) != alone
