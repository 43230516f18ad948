"""The Paddle engine on two tensor-parallel ranks, one process each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.paddle_engine.engine import Engine, Task
from examples.paddle_engine.kv_cache import FdcacheBlocks, FreshBlocks, Prompt
from tests.paddle_help import ENGINE, GQA, prompt, spoken, tokens

ranks = pytest.importorskip("examples.paddle_engine.ranks")


def test_two_ranks_generate_the_same_tokens_with_device_and_host_hits() -> None:
    config = replace(ENGINE, device_blocks=8, ranks=2).load(GQA)
    cache = FdcacheBlocks(config)
    workers = ranks.RankProcesses(GQA, config, cache.host_cache)
    prompts = [
        prompt("first", tokens(0, 85), max_tokens=4),
        prompt("other", tokens(1, 85), max_tokens=4),
        prompt("again", tokens(0, 85), max_tokens=4),
    ]
    prompts.append(prompt("on", [*tokens(0, 80), *tokens(2, 5)], max_tokens=4, temperature=0.8, seed=1))

    def serve(cache: FdcacheBlocks | FreshBlocks) -> list[Task]:
        engine = Engine(config, cache, workers)

        def one(each: Prompt) -> Task:
            task = engine.submit(each)
            engine.run()
            return task

        return [one(each) for each in prompts]

    computed = serve(FreshBlocks(config))
    cached = serve(cache)
    workers.shutdown()
    assert spoken(cached) == spoken(computed)
    counters = cache.manager.get_stats().counters
    assert counters.host_hit_tokens > 0
    assert counters.device_hit_tokens > 0
    assert counters.loads_failed == 0
    cache.manager.check_integrity()
