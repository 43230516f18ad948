"""The parts of a run on one engine. Each returns what it measured as JSON values, times in milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from benchmarks.harness import percentiles
from benchmarks.vllm.driver import Answer, Driver, Tokens, in_turn
from benchmarks.vllm.shapes import Load

Part = Callable[[Driver, Load, bool], Awaitable[dict[str, Any]]]


def _ttfts(answers: list[Answer]) -> list[float]:
    return [round(answer.ttft_ms, 3) for answer in answers]


def _itls(answers: list[Answer]) -> list[float]:
    return [(end - begin) * 1000 for answer in answers for begin, end in answer.gaps]


class Conversations:
    """Conversations whose replies are forced, so that every engine is sent the same prompts.

    A reply is one token over and over, another one for each turn: its blocks can be reused in the next turn.
    """

    def __init__(self, driver: Driver, load: Load) -> None:
        self._driver = driver
        self._load = load
        self._said: dict[int, Tokens] = {index: [] for index in range(load.conversations)}

    async def turn(self, conversation: int, turn: int) -> Answer:
        """Send the next turn of a conversation."""
        load = self._load
        seed = 1 + conversation * load.turns + turn
        said = self._said[conversation]
        said += self._driver.prompt(seed, load.later_turn if turn else load.first_turn)
        forced = 3 + seed % (self._driver.shape.vocabulary - 3)
        answer = await self._driver.ask(list(said), load.reply, forced=forced)
        said += answer.tokens
        return answer


async def chat(driver: Driver, load: Load, has_connector: bool) -> dict[str, Any]:
    """Measure conversations in turn: each comes back after its blocks have left the device."""
    del has_connector
    conversations = Conversations(driver, load)
    order = [(turn, index) for turn in range(load.turns) for index in range(load.conversations)]
    before, begin = driver.counted(), time.perf_counter()
    answers = await in_turn(
        [partial(conversations.turn, index, turn) for turn, index in order], load.in_flight
    )
    seconds = time.perf_counter() - begin
    found = driver.counted().since(before)
    turns: dict[int, list[Answer]] = {turn: [] for turn in range(load.turns)}
    for (turn, _), answer in zip(order, answers, strict=True):
        turns[turn].append(answer)
    later = [answer for turn in range(1, load.turns) for answer in turns[turn]]
    return {
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(answers) / seconds, 3),
        "ttft_ms": {
            "turn 1": percentiles(_ttfts(turns[0])),
            **{f"turn {turn + 1}": percentiles(_ttfts(turns[turn])) for turn in range(1, load.turns)},
            "later": percentiles(_ttfts(later)),
        },
        "itl_ms": {"turn 1": percentiles(_itls(turns[0])), "later": percentiles(_itls(later))},
        "cached_tokens": sum(answer.cached for answer in answers),
        **found,
    }


async def unique(driver: Driver, load: Load, has_connector: bool) -> dict[str, Any]:
    """Measure prompts that share nothing: what a connector costs when it never hits."""
    del has_connector
    prompts = [driver.prompt(100_000 + index, load.unique_length) for index in range(load.unique)]
    before, begin = driver.counted(), time.perf_counter()
    answers = await in_turn([partial(driver.ask, prompt, 16) for prompt in prompts], load.in_flight)
    seconds = time.perf_counter() - begin
    return {
        "seconds": round(seconds, 4),
        "requests_per_s": round(len(answers) / seconds, 3),
        "ttft_ms": percentiles(_ttfts(answers)),
        "itl_ms": percentiles(_itls(answers)),
        **driver.counted().since(before),
    }


async def single(driver: Driver, load: Load, has_connector: bool) -> dict[str, Any]:
    """Measure long prompts one at a time: computed, from the device (one step), and from the host.

    Times from the host are those of prompts found whole, or as long as any was: a full tier may have evicted others.
    """
    prompts = [driver.prompt(200_000 + index, load.single_length) for index in range(load.single)]

    async def each() -> list[Answer]:
        return [await driver.ask(prompt, 4) for prompt in prompts]

    computed, device = await each(), await each()
    found = {
        "prompt_tokens": load.single_length,
        "computed_ms": _ttfts(computed),
        "device_ms": _ttfts(device),
        "device_cached": [answer.cached for answer in device],
        "tokens": [answer.tokens for answer in device],
        "computed_tokens": [answer.tokens for answer in computed],
    }
    if not has_connector:
        return found
    loaded: list[Answer] = []
    wrong = 0
    for _ in range(load.single_rounds):
        await driver.forget_device(load.settle_s)
        with driver.traced():
            again = await each()
        wrong += sum(one.tokens != other.tokens for one, other in zip(again, device, strict=True))
        loaded += again
    cached = [answer.cached for answer in loaded]
    whole = [answer for answer in loaded if answer.cached == max(cached)]
    return found | {
        "loaded_ms": _ttfts(whole),
        "loaded_cached": cached,
        "loaded_bytes": driver.shape.loaded_bytes(max(cached)),
        "wrong": wrong,
        "phases_ms": driver.phases([(answer.sent, answer.came[0]) for answer in whole]),
    }


async def beside(driver: Driver, load: Load, has_connector: bool) -> dict[str, Any]:
    """Measure the time between tokens of running requests while prompts are admitted one after the other.

    Their blocks come from the host; without a connector from the device, so that the steps have the same work.
    """
    count = load.beside_prompts if has_connector else max(1, load.beside_prompts // 6)
    prompts = [driver.prompt(300_000 + index, load.beside_length) for index in range(count)]
    for prompt in prompts:
        await driver.ask(prompt, 4)
    if has_connector:
        await driver.forget_device(load.settle_s)
    begun = [asyncio.Event() for _ in range(load.decoders)]
    decoders = [
        asyncio.create_task(
            driver.ask(driver.prompt(400_000 + index, load.decoder_prompt), load.decoder_reply, begun=event)
        )
        for index, event in enumerate(begun)
    ]
    for event in begun:
        await event.wait()
    admitted: list[Answer] = []
    before, first = driver.counted(), time.perf_counter()
    with driver.traced():
        while not any(decoder.done() for decoder in decoders):
            admitted.append(await driver.ask(prompts[len(admitted) % count], 1))
            await asyncio.sleep(0.03)
    found = driver.counted().since(before)
    timeline = driver.timeline(first, time.perf_counter(), load.decoders)
    gaps = [gap for decoder in decoders for gap in (await decoder).gaps]
    spans = [(answer.sent, answer.came[0]) for answer in admitted]
    during: list[float] = []
    quiet: list[float] = []
    for begin, end in gaps:
        near = any(begin < last and first < end for first, last in spans)
        (during if near else quiet).append((end - begin) * 1000)
    return {
        "admitted": len(admitted),
        "ttft_ms": percentiles(_ttfts(admitted)),
        "cached_tokens": sum(answer.cached for answer in admitted),
        "itl_ms": {"beside": percentiles(during), "quiet": percentiles(quiet)},
        "timeline": timeline,
        **found,
    }


async def fill(driver: Driver, load: Load, has_connector: bool) -> dict[str, Any]:
    """Compute the prompts of a restart, and give the storage time to write them."""
    del has_connector
    prompts = [driver.prompt(500_000 + index, load.single_length) for index in range(load.restart)]
    begin = time.perf_counter()
    answers = [await driver.ask(prompt, 4) for prompt in prompts]
    seconds = time.perf_counter() - begin
    for _ in range(3):
        await driver.settle(2 * load.settle_s)
    return {"seconds": round(seconds, 3), "ttft_ms": percentiles(_ttfts(answers))}


async def reread(driver: Driver, load: Load, has_connector: bool) -> dict[str, Any]:
    """Measure the prompts of a restart in another process, which finds them in storage only."""
    del has_connector
    prompts = [driver.prompt(500_000 + index, load.single_length) for index in range(load.restart)]
    before, begin = driver.counted(), time.perf_counter()
    answers = [await driver.ask(prompt, 4) for prompt in prompts]
    return {
        "seconds": round(time.perf_counter() - begin, 3),
        "ttft_ms": percentiles(_ttfts(answers)),
        "cached_tokens": sum(answer.cached for answer in answers),
        **driver.counted().since(before),
    }


async def warm_up(driver: Driver, load: Load) -> None:
    """Have everything compiled and allocated that the first requests need."""
    await driver.ask(driver.prompt(600_000, load.single_length), 4)
    prompts = [driver.prompt(600_001 + index, load.decoder_prompt) for index in range(load.in_flight)]
    await in_turn([partial(driver.ask, prompt, 8, forced=5) for prompt in prompts], load.in_flight)


PARTS: dict[str, Part] = {
    "chat": chat,
    "single": single,
    "beside": beside,
    "unique": unique,
    "fill": fill,
    "reread": reread,
}
