"""SGLang's own engine with FdcacheLinker: whatever happens below it, it answers as without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service_help import ServiceProcess, until
from tests.sglang import passages
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush, linker_options, running_engine
from tests.sglang.passages import WHOLE
from tests.sglang.test_engine import aborted


def from_host(answer: Answer) -> bool:
    """Return True if the linker has loaded all whole pages: SGLang counts them as the host's."""
    return answer.cached.get("host") == WHOLE


@pytest.fixture(scope="module")
def engine(model: Path, computed: list[Answer], service: ServiceProcess) -> Iterator[Any]:
    """An engine with FdcacheLinker at the service, shared by the tests of this module."""
    options = linker_options(FDCACHE_SERVER=service.address)
    with running_engine(model, enable_metrics=True, **options) as running:
        yield running


def test_pages_come_back_after_a_flush(engine: Any, prompts: list[list[int]], computed: list[Answer]) -> None:
    passages.pages_come_back(engine, prompts, computed, from_host)


def test_answers_are_those_of_the_engine_without_it_over_evicting_rounds(
    engine: Any, prompts: list[list[int]], computed: list[Answer]
) -> None:
    passages.rounds_evict(engine, prompts, computed, "host")


def test_a_tail_behind_device_pages_is_found_and_later_all_of_the_prompt(
    engine: Any, prompts: list[list[int]]
) -> None:
    longer = [*prompts[1][: 10 * PAGE], *prompts[2][: 6 * PAGE], 7]
    first = ask(engine, longer)
    shorter = asked_until(engine, longer[: 10 * PAGE + 3], lambda a: a.cached.get("host") == 10 * PAGE)
    assert len(shorter.tokens) == 4
    tail = ask(engine, longer)  # its first pages are on the device now
    assert tail.equals(first)
    assert tail.cached.get("host") == 6 * PAGE
    whole = asked_until(engine, longer, lambda a: a.cached.get("host") == 16 * PAGE)
    assert whole.equals(first)


def test_a_prompt_is_explained_by_its_tokens(
    engine: Any, service: ServiceProcess, prompts: list[list[int]]
) -> None:
    passages.prompts_are_explained(engine, service, prompts[2], from_host)


def test_the_metrics_of_sglang_have_its_figures(engine: Any, prompts: list[list[int]]) -> None:
    asked_until(engine, prompts[2], from_host)
    until(
        lambda: ask(engine, prompts[2]) and passages.metrics().get("blocks_loaded", 0) >= 24, "they are told"
    )
    told = passages.metrics()
    assert told["blocks_backed_up"] >= 24 and told["bytes_loaded"] > 0 and told["host_blocks_ready"] >= 24


def test_a_prompt_that_was_stored_in_parts_is_found_as_one(engine: Any, prompts: list[list[int]]) -> None:
    parts = [prompts[4][:WHOLE], prompts[5][: 4 * PAGE], prompts[6][: 4 * PAGE], [7]]
    prompt: list[int] = []
    for part in parts:  # turns of a conversation: each is offered without what precedes it
        prompt += part
        last = ask(engine, prompt)
    whole = asked_until(engine, prompt, lambda answer: answer.cached.get("host") == 32 * PAGE)
    assert whole.equals(last)


def test_salts_and_aborts_leave_right_answers(
    engine: Any, prompts: list[list[int]], computed: list[Answer]
) -> None:
    flush(engine)
    engine.loop.run_until_complete(aborted(engine, prompts))
    for number in range(3):
        assert ask(engine, prompts[number]).equals(computed[number])
    assert ask(engine, prompts[0], cache_salt="tenant 1").equals(computed[0])
    flush(engine)
    assert not ask(engine, prompts[0], cache_salt="tenant 2").cached.get("host", 0), "another tenant's pages"
    assert asked_until(engine, prompts[0], from_host, cache_salt="tenant 1").equals(computed[0])


def test_requests_of_one_batch_are_loaded_together(
    engine: Any, prompts: list[list[int]], computed: list[Answer]
) -> None:
    async def together() -> list[Any]:
        asks = [
            engine.async_generate(
                input_ids=prompts[number],
                sampling_params={"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            )
            for number in (0, 1)
        ]
        return await asyncio.gather(*asks)

    for number in (0, 1):
        asked_until(engine, prompts[number], from_host)
    flush(engine)
    answers = engine.loop.run_until_complete(together())
    assert [answer["output_ids"] for answer in answers] == [computed[0].tokens, computed[1].tokens]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_answer(engine: Any, prompts: list[list[int]], mode: str) -> None:
    expected = ask(engine, prompts[1], 96)
    asked_until(engine, prompts[1], from_host)
    flush(engine)
    answer = engine.loop.run_until_complete(passages.paused(engine, prompts[1], mode, 96))
    assert answer == expected.tokens


def test_a_killed_service_is_computed_without_and_found_again(
    engine: Any, service: ServiceProcess, prompts: list[list[int]], computed: list[Answer]
) -> None:
    passages.a_killed_service_is_found_again(engine, service, prompts, computed, from_host)


def test_corrupt_pages_that_were_recovered_are_refused_and_computed(
    engine: Any, service: ServiceProcess, prompts: list[list[int]], computed: list[Answer]
) -> None:
    asked_until(engine, prompts[0], from_host)
    service.kill()
    passages.flip_all(service)
    service.start()
    service.ask("reset", tier="storage")
    for _ in range(3):  # the engine has to find the service again
        flush(engine)
        answer = ask(engine, prompts[0])
        assert answer.equals(computed[0])
    assert asked_until(engine, prompts[0], from_host).equals(computed[0])


def test_another_engine_finds_the_pages_and_may_be_killed(
    engine: Any, service: ServiceProcess, model: Path, prompts: list[list[int]], computed: list[Answer]
) -> None:
    for number in (6, 7):
        asked_until(engine, prompts[number], from_host)
    options = linker_options(FDCACHE_SERVER=service.address)
    passages.another_engine_may_be_killed(
        engine, service, model, options, prompts, computed, lambda told: all(map(from_host, told))
    )
