"""Seeded generators of engine traffic: chat, agent, rag and unique."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fdcache.replay.items import OUTPUT_STREAMS, WorkItem

_MS_PER_OUTPUT_TOKEN = 20.0
"""How long the generator's clock gives an engine for a token, so that a turn follows the answer before it."""


class WorkloadName(StrEnum):
    """The shapes of traffic that can be generated."""

    CHAT = "chat"
    AGENT = "agent"
    RAG = "rag"
    UNIQUE = "unique"


@dataclass(frozen=True, slots=True)
class DialogueShape:
    """Conversations that share system prompts and grow turn by turn (tokens and milliseconds)."""

    systems: int
    system_tokens: tuple[int, int]
    turns: tuple[int, int]
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    think_ms: float
    between_arrivals_ms: float


@dataclass(frozen=True, slots=True)
class RetrievalShape:
    """Single questions over documents whose popularity falls like Zipf's law."""

    documents: int
    document_tokens: tuple[int, int]
    zipf_exponent: float
    system_tokens: int
    question_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    between_arrivals_ms: float


CHAT = DialogueShape(4, (384, 1024), (2, 8), (32, 400), (48, 320), think_ms=8000, between_arrivals_ms=1500)
AGENT = DialogueShape(2, (1500, 2500), (4, 16), (100, 900), (24, 120), think_ms=400, between_arrivals_ms=2500)
RAG = RetrievalShape(400, (512, 3072), 1.1, 256, (24, 120), (32, 200), between_arrivals_ms=500)
UNIQUE = DialogueShape(0, (0, 0), (1, 1), (256, 4096), (32, 200), think_ms=0, between_arrivals_ms=500)


def generate(name: WorkloadName, requests: int, seed: int) -> Iterator[WorkItem]:
    """``requests`` items in the order of their arrival; equal arguments give equal items.

    ``chat``: a few shared system prompts, conversations with think time in which each prompt contains the
    former prompt and its output. ``agent``: the same with long system prompts (tools), short outputs, tool
    results as inputs and hardly any pause. ``rag``: documents re-read, a few of them often. ``unique``: no
    reuse.
    """
    random = np.random.default_rng(seed)
    if name is WorkloadName.RAG:
        return itertools.islice(_retrieval(RAG, random), requests)
    shapes = {WorkloadName.CHAT: CHAT, WorkloadName.AGENT: AGENT, WorkloadName.UNIQUE: UNIQUE}
    return itertools.islice(_dialogues(shapes[name], random), requests)


@dataclass(slots=True)
class _Dialogue:
    """A conversation so far: the segments of its next prompt, and the turn to come."""

    streams: list[int]
    lengths: list[int]
    turns_left: int
    former: int | None = None
    think_ms: float = 0.0

    def next_turn(self, index: int, now_ms: float, stream: int, tokens: int, output: int) -> WorkItem:
        """The next request; its prompt and output become part of the one after it."""
        self.streams.append(stream)
        self.lengths.append(tokens)
        item = _item(
            index, now_ms, self.streams, self.lengths, output, after=self.former, think_ms=self.think_ms
        )
        self.streams.append(item.output_stream)
        self.lengths.append(output)
        self.former = index
        self.turns_left -= 1
        return item


def _dialogues(shape: DialogueShape, random: np.random.Generator) -> Iterator[WorkItem]:
    """Endless conversations, interleaved by arrival time."""
    systems = [(stream, _between(random, shape.system_tokens)) for stream in range(shape.systems)]
    fresh_streams = itertools.count(shape.systems)
    arrivals = itertools.count()
    due: list[tuple[float, int, _Dialogue]] = []
    next_start = 0.0
    for index in itertools.count():
        while not due or next_start <= due[0][0]:
            heapq.heappush(due, (next_start, next(arrivals), _open_dialogue(shape, systems, random)))
            next_start += random.exponential(shape.between_arrivals_ms)
        now_ms, _, dialogue = heapq.heappop(due)
        output = _between(random, shape.output_tokens)
        tokens = _between(random, shape.input_tokens)
        yield dialogue.next_turn(index, now_ms, next(fresh_streams), tokens, output)
        if dialogue.turns_left:
            dialogue.think_ms = random.exponential(shape.think_ms)
            ready = now_ms + output * _MS_PER_OUTPUT_TOKEN + dialogue.think_ms
            heapq.heappush(due, (ready, next(arrivals), dialogue))


def _open_dialogue(
    shape: DialogueShape, systems: list[tuple[int, int]], random: np.random.Generator
) -> _Dialogue:
    turns = _between(random, shape.turns)
    if not systems:
        return _Dialogue([], [], turns)
    stream, length = systems[int(random.integers(len(systems)))]
    return _Dialogue([stream], [length], turns)


def _retrieval(shape: RetrievalShape, random: np.random.Generator) -> Iterator[WorkItem]:
    """Endless questions; stream 0 is the system prompt, 1..documents the documents."""
    lengths = random.integers(*shape.document_tokens, size=shape.documents, endpoint=True)
    weights = np.arange(1, shape.documents + 1, dtype=np.float64) ** -shape.zipf_exponent
    weights /= weights.sum()
    now_ms = 0.0
    for index in itertools.count():
        document = int(random.choice(shape.documents, p=weights))
        streams = [0, 1 + document, 1 + shape.documents + index]
        sizes = [shape.system_tokens, int(lengths[document]), _between(random, shape.question_tokens)]
        yield _item(index, now_ms, streams, sizes, _between(random, shape.output_tokens))
        now_ms += random.exponential(shape.between_arrivals_ms)


def _item(
    index: int,
    now_ms: float,
    streams: list[int],
    lengths: list[int],
    output: int,
    *,
    after: int | None = None,
    think_ms: float = 0.0,
) -> WorkItem:
    return WorkItem(
        index=index,
        timestamp_ms=now_ms,
        streams=np.array(streams, dtype=np.uint64),
        lengths=np.array(lengths, dtype=np.int64),
        output_stream=OUTPUT_STREAMS + index,
        output_length=output,
        after=after,
        think_ms=think_ms,
    )


def _between(random: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(random.integers(*bounds, endpoint=True))
