"""Traffic for the engine: generated workloads that quote the engine's own answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from examples.paddle_engine.engine import Engine, Task
from examples.paddle_engine.kv_cache import Prompt
from fdcache.replay.workloads import OUTPUT_STREAMS, WorkItem, WorkloadName, generate, stream_tokens

Answers = Mapping[int, Sequence[int]]
"""Generated tokens by the item's index."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Items of a workload, ``users`` of which are served at a time.

    For a small model, prompt lengths are divided by ``scale`` and answer lengths by ``answer_scale``.
    """

    items: tuple[WorkItem, ...]
    scale: int
    answer_scale: int
    vocab: int
    seed: int
    users: int
    temperature: float

    @classmethod
    def generate(
        cls,
        name: str,
        requests: int,
        *,
        scale: int,
        answer_scale: int,
        vocab: int,
        seed: int,
        users: int,
        temperature: float,
    ) -> Traffic:
        """Generate the first ``requests`` items of a workload."""
        items = tuple(generate(WorkloadName(name), requests, seed))
        return cls(items, scale, answer_scale, vocab, seed, users, temperature)

    def prompt(self, item: WorkItem, answers: Answers) -> Prompt:
        """Return the item's prompt, with the earlier answers that it quotes."""
        tokens: list[int] = []
        for stream, length in zip(item.streams.tolist(), item.lengths.tolist(), strict=True):
            if stream >= OUTPUT_STREAMS:
                tokens.extend(answers[stream - OUTPUT_STREAMS])
            else:
                segment = np.array([stream], np.uint64), np.array([max(length // self.scale, 1)], np.int64)
                tokens.extend((stream_tokens(*segment, self.seed) % self.vocab).tolist())
        return Prompt(
            name=f"item-{item.index}",
            tokens=tokens,
            max_tokens=self.answer_length(item),
            temperature=self.temperature,
            seed=item.index,
        )

    @property
    def longest(self) -> int:
        """Length of the longest prompt with its answer in tokens."""
        answers = {item.index: [0] * self.answer_length(item) for item in self.items}
        return max(len(self.prompt(item, answers).tokens) + self.answer_length(item) for item in self.items)

    def answer_length(self, item: WorkItem) -> int:
        """Return the number of tokens to generate."""
        return max(item.output_length // self.answer_scale, 2)

    def serve(self, engine: Engine, answers: Answers | None = None) -> list[Task]:
        """Serve all items, each turn after the one before it, and return their tasks in order.

        Prompts quote ``answers`` of another run if given, otherwise this run's own.
        """
        own: dict[int, list[int]] = {}
        quoted = own if answers is None else answers
        tasks: dict[int, Task] = {}
        index_of = {f"item-{item.index}": item.index for item in self.items}
        pending = deque(self.items)
        while pending or engine.waiting or engine.running:
            for item in list(pending):
                if len(engine.waiting) + len(engine.running) >= self.users:
                    break
                if item.after is None or item.after in own:
                    pending.remove(item)
                    tasks[item.index] = engine.submit(self.prompt(item, quoted))
            for task in engine.step():
                own[index_of[task.name]] = [sample.token for sample in task.samples]
        return [tasks[item.index] for item in self.items]
