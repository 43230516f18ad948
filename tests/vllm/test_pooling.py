"""Models whose answer needs every token computed are neither loaded nor stored; those that pool the last token are."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engine import connector_config, make_model, make_tokenizer, running_engine
from tests.vllm.observed import Observed, settle, told

_STEP = pytest.param(
    "STEP",
    marks=pytest.mark.skipif(
        os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and version("vllm").startswith("0.26."),
        reason="the second runner of vLLM 0.26 pools no single tokens",
    ),
)
_TRANSFER = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")


@pytest.fixture(scope="module")
def pooling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, with the tokenizer that vLLM's pooling needs."""
    return make_tokenizer(make_model(tmp_path_factory.mktemp("pooling")))


def pooled(llm: Any, prompts: Sequence[Sequence[int]], task: str) -> list[torch.Tensor]:
    """Return the pooled states of each prompt."""
    from vllm.inputs import TokensPrompt

    given = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    return [each.outputs.data for each in llm.encode(given, pooling_task=task, use_tqdm=False)]


def options(pooling: str) -> tuple[dict[str, Any], str]:
    """Return the engine's options for a kind of pooling, and its task."""
    from vllm.config import PoolerConfig

    is_of_tokens = pooling == "STEP"
    task = "token_embed" if is_of_tokens else "embed"
    chosen = (
        PoolerConfig(tok_pooling_type=pooling, task=task)
        if is_of_tokens
        else PoolerConfig(seq_pooling_type=pooling)
    )
    return {
        "runner": "pooling",
        "pooler_config": chosen,
        "skip_tokenizer_init": False,
        "max_num_batched_tokens": 512,
    }, task


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", _STEP])
def test_pooling_of_every_token_is_served_without_the_cache_and_the_log_says_so(
    pooling_model: Path, prompts: list[list[int]], pooling: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, task = options(pooling)
    with running_engine(pooling_model, **given) as llm:
        alone = pooled(llm, prompts, task)
    with caplog.at_level(logging.INFO, "fdcache"), running_engine(pooling_model, _TRANSFER, **given) as llm:
        for _ in range(3):
            for mine, theirs in zip(pooled(llm, prompts, task), alone, strict=True):
                torch.testing.assert_close(mine, theirs)
            settle(llm)
    (line,) = told(caplog.records, "neither stored nor loaded")
    assert pooling in line


def test_pooling_of_the_last_token_is_loaded_and_answers_alike(
    pooling_model: Path, prompts: list[list[int]]
) -> None:
    given, task = options("LAST")
    with running_engine(pooling_model, **given) as llm:
        alone = pooled(llm, prompts, task)
    with running_engine(pooling_model, _TRANSFER, **given) as llm:
        engine = Observed(llm)
        for _ in range(3):
            for mine, theirs in zip(pooled(llm, prompts, task), alone, strict=True):
                torch.testing.assert_close(mine, theirs)
            engine.forget_device()
        assert engine.counters.host_hit_tokens > 0
        engine.assert_nothing_is_held()
