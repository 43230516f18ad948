"""SGLang's own engine with FdcacheStorage: whatever happens below it, it answers as without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.service_help import ServiceProcess, until
from tests.sglang import passages
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush, storage_options
from tests.sglang.passages import WHOLE


def from_storage(answer: Answer) -> bool:
    return answer.cached.get("storage") == WHOLE


def test_pages_come_back_after_a_flush(engine: Any, prompts: list[list[int]], computed: list[Answer]) -> None:
    passages.pages_come_back(engine, prompts, computed, from_storage)


def test_answers_are_those_of_the_engine_without_it_over_evicting_rounds(
    engine: Any, prompts: list[list[int]], computed: list[Answer]
) -> None:
    passages.rounds_evict(engine, prompts, computed, "storage")


def test_a_prompt_is_explained_by_its_tokens(
    engine: Any, service: ServiceProcess, prompts: list[list[int]]
) -> None:
    passages.prompts_are_explained(engine, service, prompts[2], from_storage)


def test_the_report_of_cached_tokens_and_the_metrics_of_sglang_name_it(
    engine: Any, prompts: list[list[int]]
) -> None:
    asked_until(engine, prompts[2], from_storage)
    (result,) = engine.generate(input_ids=[prompts[2]], sampling_params={"max_new_tokens": 1})
    assert result["meta_info"]["cached_tokens_details"]["storage_backend"] == "FdcacheStorage"
    until(
        lambda: ask(engine, prompts[2]) and passages.metrics().get("blocks_loaded", 0) >= 24, "they are told"
    )


def test_a_longer_prompt_finds_the_pages_of_a_shorter_one(engine: Any, prompts: list[list[int]]) -> None:
    longer = [*prompts[1][: 10 * PAGE], *prompts[2][: 6 * PAGE], 7]
    first = ask(engine, longer)
    shorter = asked_until(engine, longer[: 10 * PAGE + 3], lambda a: a.cached.get("storage") == 10 * PAGE)
    assert len(shorter.tokens) == 4
    # its first pages are on the device now: the look-up is for a tail whose beginning nobody names
    tail = ask(engine, longer)
    assert tail.equals(first)
    assert tail.cached.get("storage") == 6 * PAGE


def test_salts_and_aborts_leave_right_answers(
    engine: Any, prompts: list[list[int]], computed: list[Answer]
) -> None:
    flush(engine)
    engine.loop.run_until_complete(aborted(engine, prompts))
    for number in range(3):
        assert ask(engine, prompts[number]).equals(computed[number])
    salted = ask(engine, prompts[0], cache_salt="tenant 1")
    assert salted.equals(computed[0])
    flush(engine)
    other = ask(engine, prompts[0], cache_salt="tenant 2")
    assert other.cached.get("storage", 0) == 0, "another tenant's pages"
    assert asked_until(engine, prompts[0], from_storage, cache_salt="tenant 1").equals(computed[0])


async def aborted(engine: Any, prompts: list[list[int]]) -> None:
    """Abort requests in every state: some milliseconds later each."""
    for number in range(12):
        prompt = prompts[number % len(prompts)]
        stream = await engine.async_generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
            stream=True,
            rid=f"aborted {number}",
        )
        task = asyncio.ensure_future(_first(stream))
        await asyncio.sleep(0.003 * number)
        engine.tokenizer_manager.abort_request(rid=f"aborted {number}")
        await asyncio.wait([task], timeout=60)


async def _first(stream: Any) -> None:
    async for _ in stream:
        pass


def test_corrupt_pages_are_computed(
    engine: Any, service: ServiceProcess, prompts: list[list[int]], computed: list[Answer]
) -> None:
    asked_until(engine, prompts[0], from_storage)
    service.ask("reset", tier="storage")
    passages.flip_all(service)
    flush(engine)
    answer = ask(engine, prompts[0])
    assert answer.equals(computed[0])
    assert answer.cached.get("storage", 0) < WHOLE
    assert asked_until(engine, prompts[0], from_storage).equals(computed[0])


def test_a_killed_service_is_computed_without_and_found_again(
    engine: Any, service: ServiceProcess, prompts: list[list[int]], computed: list[Answer]
) -> None:
    passages.a_killed_service_is_found_again(engine, service, prompts, computed, from_storage)


def test_another_engine_finds_the_pages_and_may_be_killed(
    engine: Any, service: ServiceProcess, model: Path, prompts: list[list[int]], computed: list[Answer]
) -> None:
    asked_until(engine, prompts[6], from_storage)
    options = storage_options(FDCACHE_SERVER=service.address)
    passages.another_engine_may_be_killed(
        engine,
        service,
        model,
        options,
        prompts,
        computed,
        lambda told: list(map(from_storage, told)) == [True, False],
    )
