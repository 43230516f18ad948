"""Requests to vLLM's ``AsyncLLM`` in this process, with token ids, and when each of their tokens came."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.vllm import timeline, timing
from benchmarks.vllm.shapes import Shape

Tokens = list[int]


class RequestError(Exception):
    """A request did not end as it should; the message names it."""


@dataclass(frozen=True)
class Answer:
    """When a request was sent and each output came (seconds), its tokens, their logprobs, and its cached tokens."""

    sent: float
    came: list[float]
    tokens: Tokens
    logprobs: list[dict[int, float]]
    cached: int
    transfer: dict[str, Any] | None = None
    """Parameters of a hand-over to another engine."""

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return (self.came[0] - self.sent) * 1000

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Beginning and end of the times between tokens."""
        return list(itertools.pairwise(self.came))


@dataclass
class Counters:
    """What vLLM counted and the machine spent up to now."""

    external_hits: int = 0
    external_queries: int = 0
    local_hits: int = 0
    preemptions: int = 0
    cpu_s: float = 0.0
    times: timing.Times = field(default_factory=timing.Times)

    def since(self, before: Counters) -> dict[str, Any]:
        """Return what was added since a moment before."""
        times = self.times - before.times
        return {
            "hit_tokens": self.external_hits - before.external_hits,
            "queried_tokens": self.external_queries - before.external_queries,
            "device_hit_tokens": self.local_hits - before.local_hits,
            "preemptions": self.preemptions - before.preemptions,
            "engine_cpu_s": round(self.cpu_s - before.cpu_s, 3),
            "steps": times.steps,
            "us_per_step": round(times.us_per_step, 1),
            "schedule_us": round(times.schedule_ns / 1000 / max(times.steps, 1), 1),
            "update_us": round(times.update_ns / 1000 / max(times.steps, 1), 1),
            "hooks_us": round(times.hooks_ns / 1000 / max(times.steps, 1), 1),
        }


class Driver:
    """An engine, and what was counted of it."""

    def __init__(self, engine: Any, counters: Counters, shape: Shape, times: Path) -> None:
        self._engine = engine
        self._counters = counters
        self._times = times
        self._names = itertools.count()
        self._fillers = itertools.count(1_000_000)
        self.shape = shape

    def prompt(self, seed: int, length: int) -> Tokens:
        """Return tokens of this seed; other seeds share no prefix."""
        tokens: Tokens = np.random.default_rng(seed).integers(3, self.shape.vocabulary, length).tolist()
        return tokens

    def counted(self) -> Counters:
        """Return the counters as they are now."""
        now, mine = self._counters, psutil.Process()
        cpu = [child.cpu_times() for child in mine.children(recursive=True)]
        return Counters(
            now.external_hits,
            now.external_queries,
            now.local_hits,
            now.preemptions,
            sum(one.user + one.system for one in cpu),
            timing.read(self._times),
        )

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Have the engine write down when the steps of loads happen."""
        flag = self._times / timing.TRACING
        flag.touch()
        try:
            yield
        finally:
            flag.unlink()

    def phases(self, spans: list[tuple[float, float]]) -> dict[str, float]:
        """Return the median milliseconds of each phase of requests that were sent and answered in these spans."""
        events = timing.events(self._times)
        found = [timing.phases(events, sent, came) for sent, came in spans]
        by_name = {name: [one[name] for one in found if name in one] for name in timing.PHASES}
        return {name: round(float(np.median(times)), 3) for name, times in by_name.items() if times}

    def timeline(self, first: float, last: float, decoders: int) -> dict[str, Any]:
        """Return where the time between the answers of a traced span went."""
        spans = timeline.loads(timing.events(self._times))
        return timeline.timeline(
            timeline.intervals(timeline.forwards(self._times), spans, first, last, decoders)
        )

    async def ask(
        self,
        prompt: Tokens,
        replies: int,
        *,
        forced: int | None = None,
        logprobs: int | None = None,
        begun: asyncio.Event | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> Answer:
        """Send a prompt and read ``replies`` tokens; every one of them is ``forced`` if that is given.

        ``begun`` is set when the first has come. ``transfer``: parameters of a hand-over.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0,
            max_tokens=replies,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            allowed_token_ids=None if forced is None else [forced],
            output_kind=RequestOutputKind.DELTA,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )
        name = f"r{next(self._names)}"
        came: list[float] = []
        tokens: Tokens = []
        found: list[dict[int, float]] = []
        cached, told = 0, None
        sent = time.perf_counter()
        async for output in self._engine.generate(TokensPrompt(prompt_token_ids=prompt), parameters, name):
            now = time.perf_counter()
            (part,) = output.outputs
            cached = output.num_cached_tokens or cached
            told = output.kv_transfer_params or told
            if part.token_ids:
                came.append(now)
                if begun is not None:
                    begun.set()
                tokens += part.token_ids
            for step in part.logprobs or ():
                found.append({token: one.logprob for token, one in step.items()})
        if len(tokens) != replies:
            raise RequestError(f"request {name} got {len(tokens)} of {replies} tokens")
        return Answer(sent, came, tokens, found, cached, told)

    async def settle(self, seconds: float) -> None:
        """Let copies that wait for a step be made, and those in flight end."""
        await self.ask(self.prompt(next(self._fillers), 24), 3)
        await asyncio.sleep(seconds)

    async def forget_device(self, seconds: float) -> None:
        """Settle, and drop the prefixes that the engine keeps on the device; the connector keeps its own.

        Raises ``RequestError`` if a connector goes on holding blocks of the device.
        """
        for _ in range(10):
            await self.settle(seconds)
            if await self._engine.reset_prefix_cache():
                return
        raise RequestError("the device's prefixes cannot be dropped: blocks are held")


async def in_turn(jobs: Iterable[Callable[[], Awaitable[Answer]]], in_flight: int) -> list[Answer]:
    """Begin jobs in their order, ``in_flight`` at a time; return their answers in that order."""
    waiting = iter(list(enumerate(jobs)))
    found: dict[int, Answer] = {}

    async def work() -> None:
        for index, job in waiting:
            found[index] = await job()

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(work())
    return [found[index] for index in sorted(found)]


def used_memory() -> int:
    """Return the bytes of host memory in use, reclaimable caches aside."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return (total - available) * 1024


@asynccontextmanager
async def started(arguments: dict[str, Any], shape: Shape, times: Path) -> AsyncIterator[Driver]:
    """Start an engine; shut it down with the context."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    counters = Counters()

    class Counting(StatLoggerBase):  # type: ignore[misc]
        """Adds up vLLM's own counts of hits."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
            del rest, named
            if scheduler_stats is not None:
                counters.local_hits += scheduler_stats.prefix_cache_stats.hits
                if (external := scheduler_stats.connector_prefix_cache_stats) is not None:
                    counters.external_hits += external.hits
                    counters.external_queries += external.queries
            if iteration_stats is not None:
                counters.preemptions += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            return

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[Counting])
    try:
        yield Driver(engine, counters, shape, times)
    finally:
        engine.shutdown()
