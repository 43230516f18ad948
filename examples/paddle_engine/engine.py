"""The scheduler: continuous batching with chunked prefill, preemption and speculative decoding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from examples.paddle_engine.batch import Chunk
from examples.paddle_engine.config import EngineConfig
from examples.paddle_engine.kv_cache import FdcacheBlocks, FreshBlocks, Prompt
from examples.paddle_engine.sampling import Sample
from examples.paddle_engine.worker import ChunkResult, StepResult
from fdcache import LoadOutcome, LoadStatus, TransferPlan
from fdcache.replay.scheduler import DecodeReserve


@dataclass(eq=False)
class Task:
    """A prompt in the engine. ``computed`` tokens have KV; ``held`` is a result that waits for a load's report.

    ``waits`` for blocks of a prefill instance before anything of it is computed.
    """

    prompt: Prompt
    arrival: float
    samples: list[Sample] = field(default_factory=list)
    computed: int = 0
    draft: int | None = None
    held: ChunkResult | None = None
    first_token: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    waits: bool = False

    @property
    def name(self) -> str:
        """Name of the prompt."""
        return self.prompt.name

    @property
    def tokens(self) -> list[int]:
        """Prompt and accepted tokens."""
        return [*self.prompt.tokens, *(sample.token for sample in self.samples)]

    @property
    def is_done(self) -> bool:
        """True once all requested tokens are generated."""
        return len(self.samples) >= self.prompt.max_tokens

    def next_chunk(self, budget: int, grid: int) -> Chunk:
        """Return the next chunk of at most ``budget`` tokens, without its block table.

        It ends on the grid unless it reaches the last token.
        """
        tokens = self.tokens
        start, stop = self.computed, min(len(tokens), self.computed + budget)
        if grid and stop < len(tokens) and stop // grid * grid > start:
            stop = stop // grid * grid
        ends = stop == len(tokens)
        drafts = [self.draft] if ends and self.draft is not None and budget > stop - start else []
        return Chunk(
            sequence=self.name,
            start=start,
            tokens=np.array(tokens[start:stop] + drafts, np.int64),
            block_table=np.empty(0, np.int32),
            sample_from=stop - start - 1 if ends else stop - start,
            next_token=0 if ends else tokens[stop],
            temperature=self.prompt.temperature,
            seed=self.prompt.seed,
            images=self.prompt.images,
        )


KVCache = FdcacheBlocks | FreshBlocks


class TooLargeError(Exception):
    """A sequence needs more blocks than the engine has."""


class Ranks(Protocol):
    """The workers; all of them execute every step."""

    def execute(self, plans: Sequence[TransferPlan], chunks: Sequence[Chunk]) -> StepResult:
        """Return rank 0's results and the reports of all ranks."""


class Engine:
    """Engine that serves prompts with a cache and its ranks, one step at a time."""

    def __init__(self, config: EngineConfig, cache: KVCache, ranks: Ranks) -> None:
        self._config = config
        self._cache = cache
        self._ranks = ranks
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []
        self._reserve = DecodeReserve(config.scheduling)
        self.steps = 0
        self.loads_failed = 0

    def submit(self, prompt: Prompt) -> Task:
        """Queue a prompt. If it outgrows the engine's blocks, ``step`` raises ``TooLargeError``."""
        task = Task(prompt, time.perf_counter())
        self.waiting.append(task)
        return task

    def run(self) -> None:
        """Run steps until all prompts are served."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> list[Task]:
        """Schedule, copy, compute and accept; return the tasks that ended."""
        self.steps += 1
        chunks = self._schedule()
        self._reserve.note_step()
        plans = self._cache.take_plans()
        start = time.perf_counter()
        result = self._ranks.execute(plans, chunks)
        seconds = time.perf_counter() - start
        outcomes = {outcome.request_id: outcome for outcome in self._cache.apply(result.reports)}
        results = {each.sequence: each for each in result.chunks}
        for task in list(self.running):
            task.held = results.get(task.name, task.held)
            if task.name in outcomes:
                self._resolve(task, outcomes[task.name])
            if task.held and not self._cache.is_loading(task.name):
                self._accept(task, task.held)
        if any(chunk.tokens.size > 1 for chunk in chunks):  # once the tokens are there
            waited = any(plan.loads for plan in plans if not plan.is_ahead)
            self._cache.observe(chunks, seconds, waited=waited)
        ended = [task for task in self.running if task.is_done]
        for task in ended:
            self.running.remove(task)
            self._cache.release(task.name, resumes=False)
        return ended

    # --- scheduling ---------------------------------------------------------------------------------------

    def _schedule(self) -> list[Chunk]:
        """Schedule running tasks in order of arrival, then new ones, within the step's tokens."""
        chunks: list[Chunk] = []
        budget = self._config.step_tokens
        for task in list(self.running):
            if task in self.running and task.held is None and not task.waits and budget > 0:
                chunk = self._chunk(task, budget)
                if chunk:
                    chunks.append(chunk)
                    budget -= len(chunk.tokens)
        while self.waiting and len(self.running) < self._config.max_running and budget > 0:
            task = self.waiting[0]
            cached = self._cache.admit(task.prompt)
            if cached is None:
                self.waiting.rotate(-1)
                break
            task.computed = cached
            chunk = task.next_chunk(budget, self._config.grid)
            waits = None
            if self._leaves_reserve(chunk):
                waits = self._cache.admit_blocks(task.prompt, chunk.stop)
            else:
                self._cache.release(task.name, resumes=True)
            if waits is None:
                self._check_fits(task)
                break
            task.waits = waits
            task.cached_tokens = max(task.cached_tokens, cached)
            self.running.append(self.waiting.popleft())
            if waits:
                continue
            chunks.append(self._with_table(chunk))
            budget -= len(chunk.tokens)
        return chunks

    def _chunk(self, task: Task, budget: int) -> Chunk | None:
        """Return the next chunk of a running task; preempt the newest tasks if blocks run out.

        A decode also takes blocks for the tokens that follow, if there are any.
        """
        chunk = task.next_chunk(budget, self._config.grid)
        size, ahead = self._config.block_size, self._config.scheduling.decode_blocks - 1
        if task.samples and ahead > 0 and chunk.stop > len(self._cache.block_table(task.name)) * size:
            most = len(task.prompt.tokens) + task.prompt.max_tokens
            self._cache.grow(task.name, max(chunk.stop, min(chunk.stop + ahead * size, most)))
        while not self._cache.grow(task.name, chunk.stop):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is task:
                self._check_fits(task)
                return None
        return self._with_table(chunk)

    def _leaves_reserve(self, chunk: Chunk) -> bool:
        """Return True if enough free blocks are left for the running tasks. Always True for a lone task."""
        needed = -(-len(chunk.tokens) // self._config.block_size)
        reserved = len(self.running) * self._reserve.blocks_each
        return not reserved or self._cache.has_room(needed + reserved)

    def _with_table(self, chunk: Chunk) -> Chunk:
        return replace(chunk, block_table=self._cache.block_table(chunk.sequence))

    def _preempt(self, task: Task) -> None:
        """Release the blocks; the task finds those still cached when it resumes."""
        self.running.remove(task)
        self._reserve.note_preemption()
        self._cache.release(task.name, resumes=True)
        task.computed = 0
        task.held = task.draft = None
        task.waits = False
        task.preemptions += 1
        self.waiting.appendleft(task)

    def _check_fits(self, task: Task) -> None:
        if (
            not self.running
            and -(-(len(task.tokens) + 1) // self._config.block_size) > self._config.device_blocks
        ):
            raise TooLargeError(
                f"{task.name} needs more than the engine's {self._config.device_blocks} blocks; raise device_blocks"
            )

    # --- results ------------------------------------------------------------------------------------------

    def _resolve(self, task: Task, outcome: LoadOutcome) -> None:
        """Apply the outcome of a load. Tokens computed after a failed load are dropped."""
        if outcome.status is LoadStatus.FAILED or (task.waits and outcome.status is LoadStatus.CONFIRMED):
            self.loads_failed += outcome.status is LoadStatus.FAILED
            task.computed = outcome.recompute_from
            task.held = None
            task.waits = False
        elif outcome.status is LoadStatus.OVERDUE:
            self._preempt(task)

    def _accept(self, task: Task, result: ChunkResult) -> None:
        room = task.prompt.max_tokens - len(task.samples)
        samples = result.samples[:room]
        if samples and task.first_token is None:
            task.first_token = time.perf_counter()
        task.computed += result.computed
        task.samples.extend(samples)
        task.draft = result.draft
        task.held = None
        self._cache.append(task.name, [sample.token for sample in samples], task.computed)
