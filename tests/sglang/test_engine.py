"""SGLang's own engine with FdcacheStorage: whatever happens below it, it answers as without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.service_help import ServiceProcess, until
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush, storage_options

WHOLE = 24 * PAGE
"""Tokens of a prompt's whole pages."""


def from_storage(answer: Answer) -> bool:
    return answer.cached.get("storage") == WHOLE


def test_pages_come_back_after_a_flush(engine: Any, prompts: list[list[int]], computed: list[Answer]) -> None:
    assert ask(engine, prompts[0]).equals(computed[0])
    answer = asked_until(engine, prompts[0], from_storage)
    assert answer.equals(computed[0])


def test_answers_are_those_of_the_engine_without_it_over_evicting_rounds(
    engine: Any, prompts: list[list[int]], computed: list[Answer]
) -> None:
    chosen = random.Random(1)
    cached = 0
    for _ in range(4):
        for number in chosen.sample(range(len(prompts)), len(prompts)):
            answer = ask(engine, prompts[number])
            cached += answer.cached.get("storage", 0)
            assert answer.equals(computed[number])
    assert cached > WHOLE


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
    extents = list(service.directory.glob("*-r0-*"))
    assert extents
    for path in extents:
        flip(path)
    flush(engine)
    answer = ask(engine, prompts[0])
    assert answer.equals(computed[0])
    assert answer.cached.get("storage", 0) < WHOLE
    assert asked_until(engine, prompts[0], from_storage).equals(computed[0])


def flip(path: Path) -> None:
    """Change a byte of every KiB of the records of an extent; their headers are behind them."""
    size = path.stat().st_size * 3 // 4
    with path.open("r+b", buffering=0) as file:
        for at in range(512, size, 1024):
            (byte,) = os.pread(file.fileno(), 1, at)
            if byte:
                os.pwrite(file.fileno(), bytes([byte ^ 0x55]), at)


def test_a_killed_service_is_computed_without_and_found_again(
    engine: Any, service: ServiceProcess, prompts: list[list[int]], computed: list[Answer]
) -> None:
    asked_until(engine, prompts[3], from_storage)
    service.kill()
    for number in (3, 4, 5):
        flush(engine)
        assert ask(engine, prompts[number]).equals(computed[number])
    service.start()
    assert asked_until(engine, prompts[3], from_storage).equals(computed[3])


def test_another_engine_finds_the_pages_and_may_be_killed(
    engine: Any, service: ServiceProcess, model: Path, prompts: list[list[int]], computed: list[Answer]
) -> None:
    asked_until(engine, prompts[6], from_storage)
    options = storage_options(FDCACHE_SERVER=service.address)
    told, output = killed(model, options, [prompts[6], prompts[7]])
    assert told[0].equals(computed[6]) and told[1].equals(computed[7]), output
    assert [from_storage(answer) for answer in told] == [True, False], output
    until(lambda: len(service.ask("clients")) == 1, "its slots are taken back")
    until(lambda: service.ask("integrity") == [], "nothing of it is left behind")
    for number in (6, 7):
        flush(engine)
        assert ask(engine, prompts[number]).equals(computed[number])


def killed(model: Path, options: dict[str, Any], prompts: list[list[int]]) -> tuple[list[Answer], str]:
    """Return the answers of an engine that is killed right after them."""
    command = [
        sys.executable,
        "-m",
        "tests.sglang.victim",
        str(model),
        json.dumps(options),
        json.dumps(prompts),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith('{"pids"'):
                break
        else:
            raise AssertionError("".join(lines))
        told = json.loads(lines[-1])
        for pid in (process.pid, *told["pids"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return [Answer(*answer) for answer in told["answers"]], "".join(lines)
