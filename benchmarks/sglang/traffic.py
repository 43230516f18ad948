"""Several requests at once on one engine: conversations, and prompts that are loaded beside running requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import percentiles
from benchmarks.sglang.engines import Shape

IN_FLIGHT = 2
DECODERS = 4


@dataclass
class Streamed:
    """The tokens of an answer, when each came, and how many tokens of its prompt were found."""

    sent: float
    came: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token."""
        return (self.came[0] - self.sent) * 1e3


async def stream(
    engine: Any, prompt: Sequence[int], count: int, begun: asyncio.Event | None = None
) -> Streamed:
    """Ask for ``count`` tokens, and note when each comes; ``begun`` is set with the first."""
    answer = Streamed(time.perf_counter())
    parameters = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    chunks = await engine.async_generate(input_ids=list(prompt), sampling_params=parameters, stream=True)
    async for chunk in chunks:
        answer.came.append(time.perf_counter())
        answer.tokens = list(chunk["output_ids"])
        answer.cached = int(chunk["meta_info"].get("cached_tokens") or 0)
        if begun is not None:
            begun.set()
    return answer


def converse(engine: Any, shape: Shape) -> dict[str, Any]:
    """Measure conversations in turn: each comes back after its pages have left the device."""
    return _run(engine, _converse(engine, shape))


def beside(engine: Any, shape: Shape, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Measure the time between tokens of running requests while prompts are admitted one after the other.

    Their pages come from below the device; of an engine that has nothing there, from the device.
    """
    return _run(engine, _beside(engine, shape, prompts))


def _run(engine: Any, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = engine.loop.run_until_complete(work)
    return found


async def _converse(engine: Any, shape: Shape) -> dict[str, Any]:
    chosen = random.Random(7)
    said: list[list[int]] = [[] for _ in range(shape.conversations)]
    turns: list[list[Streamed]] = [[] for _ in range(shape.turns)]

    def turn(number: int, conversation: int) -> Callable[[], Awaitable[None]]:
        length = shape.prompt // 8 if number else shape.prompt // 2
        more = [chosen.randrange(2, shape.vocabulary) for _ in range(length)]

        async def one() -> None:
            said[conversation] += more
            answer = await stream(engine, said[conversation], shape.reply)
            said[conversation] += answer.tokens
            turns[number].append(answer)

        return one

    jobs = iter([turn(number, each) for number in range(shape.turns) for each in range(shape.conversations)])

    async def work() -> None:
        for job in jobs:
            await job()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    later = [answer for number in range(1, shape.turns) for answer in turns[number]]
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "ttft_ms": {
            "first turn": percentiles([each.ttft_ms for each in turns[0]]),
            "later turns": percentiles([each.ttft_ms for each in later]),
        },
        "cached_tokens": sum(each.cached for each in later),
        "prompt_tokens": sum(len(each) for each in said),
    }


async def _beside(engine: Any, shape: Shape, prompts: Sequence[list[int]]) -> dict[str, Any]:
    chosen = random.Random(11)
    begun = [asyncio.Event() for _ in range(DECODERS)]
    decoders = []
    for event in begun:
        prompt = [chosen.randrange(2, shape.vocabulary) for _ in range(shape.prompt // 32)]
        decoders.append(asyncio.ensure_future(stream(engine, prompt, 4 * shape.reply, event)))
    for event in begun:
        await event.wait()
    admitted: list[Streamed] = []
    while not any(decoder.done() for decoder in decoders):
        admitted.append(await stream(engine, prompts[len(admitted) % len(prompts)], 1))
        await asyncio.sleep(0.03)
    spans = [(each.sent, each.came[0]) for each in admitted]
    during: list[float] = []
    quiet: list[float] = []
    for came in [(await decoder).came for decoder in decoders]:
        for begin, end in itertools.pairwise(came):
            near = any(begin < last and first < end for first, last in spans)
            (during if near else quiet).append((end - begin) * 1e3)
    return {
        "admitted": len(admitted),
        "ttft_ms": percentiles([each.ttft_ms for each in admitted]),
        "cached_tokens": sum(each.cached for each in admitted),
        "between_tokens_ms": {"beside": percentiles(during), "quiet": percentiles(quiet)},
    }
