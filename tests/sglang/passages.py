"""What both doors of SGLang do alike: ``found`` tells if all pages of an answer came from fdcache."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fdcache.service.client.control import Prefix
from tests.service_help import ServiceProcess, until
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush

WHOLE = 24 * PAGE
"""Tokens of a prompt's whole pages."""

Found = Callable[[Answer], bool]
Prompts = Sequence[list[int]]


def pages_come_back(engine: Any, prompts: Prompts, computed: list[Answer], found: Found) -> None:
    """A prompt is computed once, and found after a flush."""
    assert ask(engine, prompts[0]).equals(computed[0])
    assert asked_until(engine, prompts[0], found).equals(computed[0])


def rounds_evict(engine: Any, prompts: Prompts, computed: list[Answer], source: str) -> None:
    """More prompts than SGLang's pools have pages for are answered right, round after round."""
    chosen, cached = random.Random(1), 0
    for _ in range(4):
        for number in chosen.sample(range(len(prompts)), len(prompts)):
            answer = ask(engine, prompts[number])
            cached += answer.cached.get(source, 0)
            assert answer.equals(computed[number])
    assert cached > WHOLE


def prompts_are_explained(engine: Any, service: ServiceProcess, prompt: list[int], found: Found) -> None:
    """The service tells where the pages of a prompt are by its tokens, and its salt."""
    asked_until(engine, prompt, found)
    explained = service.ask("explain", **Prefix(tokens=prompt).arguments(service.ask))
    assert [each["tier"] for each in explained["blocks"]] == ["host"] * 24
    ask(engine, prompt, cache_salt="tenant 3")
    salted = Prefix(tokens=prompt, tenant="tenant 3").arguments(service.ask)
    until(lambda: service.ask("explain", **salted)["broken_at"] is None, "they are stored")


def a_killed_service_is_found_again(
    engine: Any, service: ServiceProcess, prompts: Prompts, computed: list[Answer], found: Found
) -> None:
    """Without the service all is computed; once it is there again its pages are found."""
    asked_until(engine, prompts[3], found)
    service.kill()
    for number in (3, 4, 5):
        flush(engine)
        assert ask(engine, prompts[number]).equals(computed[number])
    service.start()
    assert asked_until(engine, prompts[3], found).equals(computed[3])


def flip_all(service: ServiceProcess) -> None:
    """Change bytes of every record in the service's memory."""
    extents = list(service.directory.glob("*-r0-*"))
    assert extents
    for path in extents:
        _flip(path)


def _flip(path: Path) -> None:
    """Change a byte of every KiB of the records of an extent; their headers are behind them."""
    size = path.stat().st_size * 3 // 4
    with path.open("r+b", buffering=0) as file:
        for at in range(512, size, 1024):
            (byte,) = os.pread(file.fileno(), 1, at)
            if byte:
                os.pwrite(file.fileno(), bytes([byte ^ 0x55]), at)


def another_engine_may_be_killed(
    engine: Any,
    service: ServiceProcess,
    model: Path,
    options: dict[str, Any],
    prompts: Prompts,
    computed: list[Answer],
    found: Callable[[list[Answer]], bool],
) -> None:
    """Another engine at the service finds the pages; killed, it leaves nothing behind."""
    told, output = _killed(model, options, [prompts[6], prompts[7]])
    assert told[0].equals(computed[6]) and told[1].equals(computed[7]), output
    assert found(told), output
    until(lambda: len(service.ask("clients")) == 1, "its slots are taken back")
    until(lambda: service.ask("integrity") == [], "nothing of it is left behind")
    for number in (6, 7):
        flush(engine)
        assert ask(engine, prompts[number]).equals(computed[number])


def _killed(model: Path, options: dict[str, Any], prompts: Prompts) -> tuple[list[Answer], str]:
    """Return the answers of an engine that is killed right after them."""
    victim = [sys.executable, "-m", "tests.sglang.victim"]
    command = [*victim, str(model), json.dumps(options), json.dumps(prompts)]
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


async def paused(engine: Any, prompt: list[int], mode: str, num_tokens: int) -> list[int]:
    """Return the answer of an engine that is paused after its first token, flushed if it can be, and goes on."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    manager = engine.tokenizer_manager
    parameters = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    chunks = await engine.async_generate(input_ids=prompt, sampling_params=parameters, stream=True)
    tokens, is_paused = [], False
    async for chunk in chunks:
        tokens = list(chunk["output_ids"])
        if not is_paused:
            is_paused = True
            await manager.pause_generation(PauseGenerationReqInput(mode=mode))
            assert (await manager.flush_cache()).success == (mode == "retract")
            await manager.continue_generation(ContinueGenerationReqInput())
    assert is_paused
    return tokens


def metrics() -> dict[str, float]:
    """Return the metrics of fdcache that SGLang's ``/metrics`` has, added up, as its server collects them."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry, found = CollectorRegistry(), dict[str, float]()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith("sglang:fdcache_"):
                name = sample.name.removeprefix("sglang:fdcache_").removesuffix("_total")
                found[name] = found.get(name, 0) + sample.value
    return found
