"""What outlives an engine, and vLLM's features, with a model of full and sliding-window layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import hybrid
from tests.vllm.engine import BLOCK_SIZE, connector_config, generate, make_model, running_engine
from tests.vllm.observed import Observed
from tests.vllm.test_features import *  # noqa: F403 - with this model
from tests.vllm.test_tiers import *  # noqa: F403

model, computed = hybrid.model, hybrid.computed


@pytest.mark.parametrize(
    ("layers", "window"),
    [
        (["sliding_attention"] * 3, 24),
        (["full_attention", "sliding_attention"], 8),
        (["sliding_attention", "sliding_attention", "full_attention"] * 3 + ["sliding_attention"], 33),
    ],
    ids=["all-sliding", "shorter-than-a-block", "groups-of-unequal-size"],
)
def test_blocks_that_leave_their_window_while_tokens_are_generated_are_stored(
    layers: list[str], window: int, prompts: list[list[int]], tmp_path: Path
) -> None:
    given = prompts[:4]
    config = {"num_layers": len(layers), "layer_types": layers, "sliding_window": window}
    small = make_model(tmp_path / "model", **config)  # type: ignore[arg-type]
    with running_engine(small, enable_prefix_caching=False) as llm:
        first = generate(llm, given, 100)
        longer = [prompt + answer + [7] * 20 for prompt, answer in zip(given, first, strict=True)]
        second = generate(llm, longer)
    with running_engine(small, connector_config(FDCACHE_HOST_MEMORY="32MiB", FDCACHE_VERIFY="all")) as llm:
        engine = Observed(llm)
        assert engine.answers(given, 100) == first
        for prompt, expected in zip(longer, second, strict=True):
            engine.forget_device()
            before = engine.counters.host_hit_tokens
            assert engine.answers([prompt]) == [expected]
            known = len(prompt) - 21  # without the last token of the answer
            assert engine.counters.host_hit_tokens - before == known // BLOCK_SIZE * BLOCK_SIZE
        assert engine.counters.backups_dropped == engine.counters.loads_failed == 0
        engine.assert_nothing_is_held()
