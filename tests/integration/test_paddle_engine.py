"""A model on Paddle generates the same bits with and without the cache."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from examples.paddle_engine.config import ModelConfig
from fdcache import MultimodalItem
from fdcache.tasks import CpuEvent
from tests.faults import FailingLoadsDevice, PausingDevice
from tests.paddle_help import (
    ENGINE,
    GQA,
    MODELS,
    Server,
    assert_as_without_cache,
    prompt,
    spoken,
    tokens,
)

SMALL = replace(ENGINE, device_blocks=12)
"""Room for one prompt of 150 tokens and its answer."""

each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def text(seed: int, count: int, server: Server) -> list[int]:
    return tokens(seed, count, server.model.vocab)


@each_model
def test_cold_requests_generate_the_same_tokens(model: ModelConfig) -> None:
    server = Server(model)
    tasks = server.serve(*(prompt(f"p{i}", text(i, 50 + 31 * i, server)) for i in range(3)))
    assert [task.cached_tokens for task in tasks] == [0, 0, 0]
    assert_as_without_cache(server, tasks)


@each_model
def test_a_second_turn_finds_the_blocks_of_the_first_on_the_device(model: ModelConfig) -> None:
    server = Server(model)
    first = server.serve(prompt("first", text(0, 100, server), max_tokens=30))[0]
    second = server.serve(prompt("second", [*first.tokens, *text(1, 40, server)], temperature=0.7, seed=3))[0]
    assert second.cached_tokens == 128
    assert_as_without_cache(server, [first, second])


@each_model
def test_a_prompt_that_was_evicted_comes_back_from_the_host(model: ModelConfig) -> None:
    server = Server(model, SMALL)
    tasks = server.serve(prompt("first", text(0, 150, server)))
    tasks += server.serve(prompt("other", text(1, 150, server)))
    before = server.fdcache.manager.get_stats().counters
    tasks += server.serve(prompt("again", text(0, 150, server)))
    after = server.fdcache.manager.get_stats().counters
    assert after.host_hit_tokens - before.host_hit_tokens >= 96
    assert after.loads_confirmed == before.loads_confirmed + 1
    assert_as_without_cache(server, tasks)


def test_a_prefix_is_found_on_device_and_host() -> None:
    server = Server(GQA, SMALL)
    tasks = server.serve(prompt("first", tokens(0, 150)), prompt("short", tokens(1, 60)))
    before = server.fdcache.manager.get_stats().counters
    tasks += server.serve(prompt("again", tokens(0, 150)))
    after = server.fdcache.manager.get_stats().counters
    assert after.device_hit_tokens > before.device_hit_tokens
    assert after.host_hit_tokens > before.host_hit_tokens
    assert_as_without_cache(server, tasks)


def test_a_full_hit_recomputes_the_last_grid_cell_in_a_private_block() -> None:
    server = Server()
    tasks = server.serve(prompt("first", tokens(0, 128), max_tokens=40))
    server.submit(prompt("second", tokens(0, 128)), prompt("third", tokens(0, 128)))
    server.engine.step()
    tasks += server.engine.running
    tables = [server.cache.block_table(task.name).tolist() for task in tasks[1:]]
    assert tables[0][:6] == tables[1][:6]
    assert not set(tables[0][6:]) & set(tables[1][6:])
    server.finish()
    assert [task.cached_tokens for task in tasks] == [0, 96, 96]
    assert_as_without_cache(server, tasks)


# What is computed again differs with draft layers alone; the other models come back from each tier above.
@pytest.mark.parametrize(
    "name", ["gqa", "mtp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mla", "fp8", "bf16"))]
)
def test_preempted_requests_resume_from_their_cached_blocks(name: str) -> None:
    server = Server(MODELS[name], replace(ENGINE, device_blocks=14))
    prompts = [prompt(f"p{i}", text(i, 64, server), max_tokens=40, temperature=0.5, seed=i) for i in range(3)]
    tasks = server.serve(*prompts)
    assert sum(task.preemptions for task in tasks) > 0
    assert max(task.cached_tokens for task in tasks) > 0
    assert_as_without_cache(server, tasks)


def test_a_chunk_may_end_inside_a_block_that_another_request_cached() -> None:
    server = Server(GQA, replace(ENGINE, step_tokens=40, max_running=2))
    tasks = server.submit(prompt("first", tokens(0, 150)))
    for _ in range(2):
        server.engine.step()
    assert tasks[0].computed == 64
    tasks += server.submit(prompt("second", tokens(0, 140)))
    server.finish()
    assert tasks[1].cached_tokens > 0
    assert_as_without_cache(server, tasks)


def test_chunks_of_any_size_give_the_same_bits() -> None:
    for step_tokens in (7, 24, 33):
        server = Server(GQA, replace(ENGINE, step_tokens=step_tokens))
        tasks = server.serve(prompt("first", tokens(0, 100)), prompt("second", tokens(0, 90)))
        assert_as_without_cache(server, tasks)


def test_prompts_with_different_images_do_not_share_blocks() -> None:
    server = Server()
    images = {name: (MultimodalItem(40, 20, name),) for name in ("cat", "dog")}
    tasks = [server.serve(prompt(name, tokens(0, 120), images=images[name]))[0] for name in ("cat", "dog")]
    tasks += server.serve(prompt("cat again", tokens(0, 120), images=images["cat"]))
    assert [task.cached_tokens for task in tasks] == [0, 32, 96]
    assert spoken(tasks)[0] != spoken(tasks)[1]
    assert_as_without_cache(server, tasks)


def test_accepted_drafts_equal_those_of_an_uncached_run() -> None:
    server = Server(MODELS["mtp"])
    first = server.serve(prompt("first", text(0, 100, server), max_tokens=60))[0]
    second = server.serve(prompt("second", [*first.tokens, 1, 2, 3], max_tokens=60))[0]
    assert server.accepted_drafts > 0
    assert second.cached_tokens > 0
    assert_as_without_cache(server, [first, second])


def test_a_prompt_that_diverges_at_a_block_boundary_gets_its_own_draft_kv() -> None:
    """The draft layer gets the next token, so the KV at the end of a block depends on the token after it."""
    server = Server(replace(MODELS["mtp"], vocab=64))
    shared = text(0, 96, server)
    tasks = server.serve(prompt("one", [*shared, 1, 2, 3], max_tokens=30))
    tasks += server.serve(prompt("two", [*shared, 4, 5, 6], max_tokens=30))
    tasks += server.serve(prompt("two again", [*shared, 4, 5, 6], max_tokens=30))
    tasks += server.serve(prompt("one again", [*shared, 1, 2, 3], max_tokens=30))
    assert [task.cached_tokens for task in tasks] == [0, 64, 96, 96]
    assert_as_without_cache(server, tasks)


@pytest.mark.parametrize("layer", range(GQA.layers))
def test_blocks_of_a_load_that_fails_at_a_layer_are_recomputed(layer: int) -> None:
    device = FailingLoadsDevice(lambda pairs: [len(pairs) // 2], plane=2 * layer)
    server = Server(GQA, SMALL, device=device)
    tasks = server.serve(prompt("first", tokens(0, 150)))
    tasks += server.serve(prompt("other", tokens(1, 150)))
    tasks += server.serve(prompt("again", tokens(0, 150)))
    assert server.engine.loads_failed > 0
    assert_as_without_cache(server, tasks)


def test_a_reset_in_mid_flight_changes_no_token() -> None:
    device = PausingDevice(pause_at=1)
    server = Server(GQA, SMALL, device=device)
    device.resume.set()
    tasks = server.serve(prompt("first", tokens(0, 150)))
    tasks += server.serve(prompt("other", tokens(1, 150)))
    tasks += server.submit(prompt("again", tokens(0, 150), max_tokens=20))
    server.engine.step()
    server.fdcache.manager.reset_cache()
    server.engine.step()
    server.fdcache.manager.reset_cache()
    server.finish()
    assert server.fdcache.manager.get_stats().device.ready == 0
    assert_as_without_cache(server, tasks)


def test_after_a_reset_new_weights_find_no_old_blocks() -> None:
    server = Server()
    server.serve(prompt("before", tokens(0, 100)))
    server.worker.update_weights(1)
    stale = server.serve(prompt("stale", tokens(0, 100)))[0]
    server.fdcache.manager.reset_cache()
    fresh = server.serve(prompt("fresh", tokens(0, 100)))[0]
    assert (stale.cached_tokens, fresh.cached_tokens) == (96, 0)
    assert spoken([stale]) != spoken([fresh])
    assert_as_without_cache(server, [fresh], weights=1)


def test_every_cached_block_affects_the_logits() -> None:
    """The comparison detects one block of another prompt in place of the right one."""
    server = Server()
    server.serve(prompt("first", tokens(0, 128)), prompt("other", tokens(1, 128)))
    right = server.serve(prompt("right", tokens(0, 128)))[0]
    server.submit(prompt("wrong", tokens(0, 128)))
    find = server.cache.block_table

    def swap_one(name: str) -> np.ndarray:
        table = find(name).copy()
        if name == "wrong":
            table[2] = (table[2] + 1) % server.config.device_blocks
        return table

    server.cache.block_table = swap_one  # type: ignore[method-assign]
    server.finish()
    assert not np.array_equal(server.logits["right", 128], server.logits["wrong", 128])
    assert right.cached_tokens == 96


def test_ordinary_mode_generates_the_same_tokens_up_to_near_ties() -> None:
    from examples.paddle_engine.comparison import Agreement, Run

    ordinary = replace(SMALL, device_blocks=40, grid=0)
    prompts = [
        prompt(f"p{i}", [*tokens(0, 70 + 10 * (i % 3)), *tokens(i, 20)], max_tokens=16) for i in range(12)
    ]
    with_cache = Server(GQA, ordinary)
    cached = [task for one in prompts for task in with_cache.serve(one)]
    assert sum(task.cached_tokens for task in cached) > 300
    computed = Server(GQA, ordinary, cached=False).serve(*prompts)
    agreement = Agreement.of(Run(computed, 1.0), Run(cached, 1.0), exact=False)
    assert not agreement.differences
    assert agreement.compared > 100


def test_each_layer_waits_for_its_own_blocks() -> None:
    """Copies of all groups but the first wait until the forward pass waits for them."""
    device = PausingDevice(pause_at=1)
    server = Server(GQA, replace(SMALL, write_policy="write_back"), device=device)
    device.resume.set()
    tasks = server.serve(prompt("first", tokens(0, 150)))
    tasks += server.serve(prompt("other", tokens(1, 150)))
    device.resume = CpuEvent()
    release = threading.Timer(0.3, device.resume.set)
    release.start()
    tasks += server.serve(prompt("again", tokens(0, 150)))
    release.join()
    assert server.fdcache.manager.get_stats().counters.loads_confirmed == 1
    assert_as_without_cache(server, tasks)
