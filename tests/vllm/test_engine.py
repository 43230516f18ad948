"""vLLM's engine answers the same with and without the connector, in whatever order its hooks are called."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fdcache.tiers.statistics import Counters
from tests.vllm.observed import Observed

Answers = list[list[int]]


def loaded(before: Counters, after: Counters) -> int:
    """Return the tokens that were loaded between two readings."""
    return after.host_hit_tokens - before.host_hit_tokens


def test_answers_are_those_without_a_connector_while_blocks_are_evicted(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    before = engine.counters
    for _ in range(3):
        assert engine.answers(prompts) == computed
    assert loaded(before, engine.counters) > 0
    assert engine.counters.loads_failed == engine.counters.loads_overdue == 0
    engine.assert_nothing_is_held()


def test_a_reversed_and_interleaved_order_changes_no_answer(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    order = [*reversed(range(len(prompts))), *range(len(prompts))]
    assert engine.answers([prompts[i] for i in order]) == [computed[i] for i in order]
    engine.assert_nothing_is_held()


def test_whole_prompts_come_from_the_host_once_the_device_has_forgotten_them(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    before = engine.counters
    assert engine.answers(prompts[:1]) == computed[:1]
    assert loaded(before, engine.counters) == (len(prompts[0]) - 1) // 16 * 16
    engine.assert_nothing_is_held()


def test_prefills_are_timed_and_blocks_that_are_sooner_computed_are_not_loaded(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = engine.manager._choices
    monkeypatch.setattr(choices, "_is_auto", True)
    for _ in range(3):
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.answers(prompts)
        engine.settle()
    engine.forget_device()
    assert choices.model.prefill.is_known
    assert engine.manager.get_stats().loads.prefill_token_seconds > 0
    assert len(engine.side.times._steps) <= 2, "no step waits for its time for long"
    for _ in range(40):
        choices.model.link.observe(1 << 10, 100.0, time.monotonic())
    before = engine.counters
    assert engine.answers(prompts[:1]) == computed[:1]
    assert loaded(before, engine.counters) == 0
    (decision,) = engine.manager.get_stats().loads.recent
    assert (decision.choice, decision.num_tokens) == ("nothing", len(prompts[0]))
    assert decision.true_seconds > 0
    engine.assert_nothing_is_held()


def test_a_decision_on_a_prompt_of_which_all_but_a_token_is_loaded_comes_true(
    engine: Observed, prompts: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prompts[0][: len(prompts[0]) // 16 * 16 + 1]
    engine.answers([whole])
    engine.forget_device()
    choices = engine.manager._choices
    monkeypatch.setattr(choices, "_is_auto", True)
    for _ in range(40):
        choices.model.link.observe(1 << 20, 1e-9, time.monotonic())
    before = engine.counters
    engine.answers([whole])
    assert loaded(before, engine.counters) == len(whole) - 1
    decision = engine.manager.get_stats().loads.recent[-1]
    assert (decision.choice, decision.num_tokens) == ("whole", len(whole))
    assert decision.true_seconds > 0
    engine.assert_nothing_is_held()


def test_requests_admitted_in_one_step_wait_for_plans_of_their_own(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    waiting: list[list[dict[str, bool]]] = []
    step = engine.side.step

    def observed(output: Any) -> Any:
        made = step(output)
        waiting.append(list(made.loads.values()))
        return made

    monkeypatch.setattr(engine.side, "step", observed)
    assert engine.answers(prompts[:2]) == computed[:2]
    assert max(len(plans) for plans in waiting) == 2
    assert all(len(requests) == 1 for plans in waiting for requests in plans)
    engine.assert_nothing_is_held()


def test_a_loaded_block_with_the_bytes_of_another_changes_the_answer(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: wrong bytes in a loaded block are seen.

    Two blocks of one request that are swapped in every layer would not be: attention sums over them in any order, and
    their keys carry their positions.
    """
    engine.answers(prompts)
    engine.forget_device()
    poll = engine.worker.poll

    def copying() -> set[str]:
        loads = [load.blocks for load in engine.worker._loads.values() if len(load.blocks) > 1]
        received = poll()
        for blocks in loads if received else ():
            for pages in engine.tensors:
                pages[blocks[0]] = pages[blocks[1]]
        return received

    monkeypatch.setattr(engine.worker, "poll", copying)
    assert engine.answers(prompts) != computed
    monkeypatch.undo()
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)  # wrong blocks were stored as well
    assert engine.answers(prompts) == computed


def test_an_abort_before_the_first_step_leaves_nothing(engine: Observed, prompts: Answers) -> None:
    engine.abort(engine.add(prompts[0]))
    engine.assert_nothing_is_held()


def test_an_abort_during_a_load_leaves_nothing_and_harms_nobody(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    with engine.withheld_loads():
        name = engine.add(prompts[0])
        engine.steps_until(lambda: engine.status(name) == "WAITING_FOR_REMOTE_KVS")
        engine.abort(name)
        other = engine.add(prompts[1])
        engine.steps_until(lambda: engine.status(other) == "WAITING_FOR_REMOTE_KVS")
    assert list(engine.finish().values()) == [computed[1]]
    engine.assert_nothing_is_held()


def test_an_abort_after_a_load_leaves_nothing(engine: Observed, prompts: Answers, computed: Answers) -> None:
    engine.answers(prompts)
    engine.forget_device()
    name = engine.add(prompts[0], num_tokens=64)
    engine.steps_until(lambda: engine.status(name) == "RUNNING")
    engine.abort(name)
    engine.assert_nothing_is_held()
    assert engine.answers(prompts[:1]) == computed[:1]


def test_a_request_that_finds_no_blocks_asks_again_until_it_is_admitted(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    asked: dict[str, int] = {}
    ask = engine.connector.get_num_new_matched_tokens

    def counting(request: Any, num_computed_tokens: int) -> Any:
        asked[request.request_id] = asked.get(request.request_id, 0) + 1
        return ask(request, num_computed_tokens)

    monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", counting)
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
    name = engine.add(prompts[0])
    for _ in range(5):
        engine.core.step()
    assert engine.status(name) == "WAITING"
    pool.free_blocks(taken)
    assert list(engine.finish().values()) == computed[:1]
    assert max(asked.values()) >= 4
    engine.assert_nothing_is_held()


def test_preempted_requests_answer_the_same(
    engine: Observed, prompts: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks go to others in the step that preempts them."""
    given = prompts[:4]
    alone = [engine.answers([prompt], 150)[0] for prompt in given]
    engine.forget_device()
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def counting(request: Any, *rest: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **named)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counting)
    assert not getattr(engine.scheduler, "requires_kv_delivery", False), "tokens in flight are kept"
    assert engine.answers(given, 150) == alone
    assert preempted
    engine.assert_nothing_is_held()


def test_a_reset_forgets_every_block_and_the_next_answers_are_computed(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    engine.answers(prompts)
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    before = engine.counters
    assert engine.answers(prompts[:2]) == computed[:2]
    assert loaded(before, engine.counters) == 0
    engine.assert_nothing_is_held()


def test_a_reset_while_blocks_are_loaded_changes_no_answer(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    with engine.withheld_loads():
        name = engine.add(prompts[0])
        engine.steps_until(lambda: engine.status(name) == "WAITING_FOR_REMOTE_KVS")
        assert engine.connector.reset_cache()
    assert list(engine.finish().values()) == computed[:1]
    engine.assert_nothing_is_held()


def test_other_salts_share_no_block(engine: Observed, prompts: Answers, computed: Answers) -> None:
    engine.answers(prompts)
    engine.forget_device()
    before = engine.counters
    engine.add(prompts[0], cache_salt="acme")
    assert list(engine.finish().values()) == computed[:1]
    assert loaded(before, engine.counters) == 0
    engine.forget_device()
    engine.add(prompts[0], cache_salt="acme")
    assert list(engine.finish().values()) == computed[:1]
    assert loaded(before, engine.counters) > 0
    engine.assert_nothing_is_held()


def test_prompt_logprobs_are_computed_and_nothing_is_loaded(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    before = engine.counters
    assert engine.answers(prompts[:1], prompt_logprobs=1) == computed[:1]
    assert loaded(before, engine.counters) == 0
    engine.assert_nothing_is_held()


def test_a_corrupted_record_is_refused_and_its_tokens_are_computed(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    before = engine.counters
    engine.corrupt_host_records()
    assert engine.answers(prompts) == computed
    assert engine.counters.loads_failed > before.loads_failed
    assert engine.counters.blocks_corrupt_in_host > before.blocks_corrupt_in_host
    engine.forget_device()
    assert engine.answers(prompts) == computed
    engine.assert_nothing_is_held()


def test_hooks_take_unknown_requests_and_repeats(
    engine: Observed, prompts: Answers, computed: Answers
) -> None:
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    stranger = Request("stranger", prompts[0], SamplingParams(), None)
    connector = engine.connector
    connector.update_state_after_alloc(stranger, KVCacheBlocks(([],)), 0)
    assert connector.request_finished(stranger, []) == (False, None)
    connector.update_connector_output(KVConnectorOutput())
    for _ in range(2):
        connector.on_new_request(stranger)
        connector.get_num_new_matched_tokens(stranger, 0)
    assert connector.request_finished(stranger, []) == (False, None)
    assert connector.request_finished(stranger, []) == (False, None)
    assert engine.answers(prompts[:1]) == computed[:1]
    engine.assert_nothing_is_held()


@pytest.mark.parametrize(
    "name", ["begin", "match", "load", "evicted", "offer", "finish", "take_plans", "expire", "apply"]
)
def test_a_manager_that_raises_in_a_step_changes_no_answer(
    engine: Observed, prompts: Answers, computed: Answers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine.answers(prompts)
    engine.forget_device()
    before, original = engine.side.inconsistencies, getattr(engine.manager, name)
    raised: list[str] = []

    def raise_twice(*given: object, **named: object) -> object:
        if len(raised) < 2 and engine.side._running:
            raised.append(name)
            raise RuntimeError("injected")
        return original(*given, **named)

    monkeypatch.setattr(engine.manager, name, raise_twice)
    assert engine.answers(prompts) == computed
    monkeypatch.undo()
    assert raised and engine.side.inconsistencies > before
    engine.side.inconsistencies = before
    for _ in range(2):
        engine.forget_device()
        assert engine.answers(prompts) == computed
    loads = engine.counters
    engine.forget_device()
    assert engine.answers(prompts) == computed
    assert loaded(loads, engine.counters) > 0
    engine.assert_nothing_is_held()


def test_pages_are_the_bytes_of_the_engines_own_tensors(engine: Observed) -> None:
    for pages in engine.tensors:
        assert pages.dtype is torch.uint8
        assert pages.shape == (40, 16 * 2 * 2 * 16 * 4)
