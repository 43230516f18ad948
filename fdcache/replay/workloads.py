"""Workloads: requests as lengths of token streams, seeded generators of engine traffic, and their arrival over time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fdcache.hints import Hint
from fdcache.replay.readings import READINGS, DocumentReading

VOCABULARY = 128_000
OUTPUT_STREAMS = 1 << 62
"""First stream of outputs. Request i has output stream ``OUTPUT_STREAMS + i``, so every output is unique."""

_STRIDE = np.uint64(0x9FB21C651E98DF25)
_FOLD = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload.

    The prompt is the first ``lengths[i]`` tokens of ``streams[i]``, concatenated over i. Equal streams give equal
    tokens, so two prompts share a prefix where their (stream, length) pairs agree.

    Attributes:
        timestamp_ms: arrival on the workload's own clock.
        after: index of the request that must end before this one arrives (the previous turn), or None.
        think_ms: time between the end of ``after`` and the arrival of this request.
        clipped_tokens: prompt tokens of the recording that are left out because their content is unknown.
        hints: what its client says of the reuse of its blocks.
    """

    index: int
    timestamp_ms: float
    streams: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    output_stream: int
    output_length: int
    after: int | None = None
    think_ms: float = 0.0
    clipped_tokens: int = 0
    hints: tuple[Hint, ...] = ()

    @property
    def prompt_length(self) -> int:
        """Length of the prompt in tokens."""
        return int(self.lengths.sum())

    @property
    def computed_length(self) -> int:
        """Number of tokens whose KV the request computes or reuses: all but the last sampled one."""
        return self.prompt_length + max(self.output_length - 1, 0)

    def tokens(self, seed: int) -> NDArray[np.int32]:
        """Return prompt and output tokens, shape (prompt_length + output_length,)."""
        streams = np.append(self.streams, np.uint64(self.output_stream))
        lengths = np.append(self.lengths, self.output_length)
        return stream_tokens(streams, lengths, seed)


def stream_tokens(streams: NDArray[np.uint64], lengths: NDArray[np.int64], seed: int) -> NDArray[np.int32]:
    """Return the first ``lengths[i]`` tokens of each stream, concatenated; int32 values in [0, VOCABULARY)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions = np.arange(total, dtype=np.uint64) - np.repeat((ends - lengths).astype(np.uint64), lengths)
    keys = _fold(streams * _STRIDE + np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
    mixed = _fold(np.repeat(keys, lengths) + positions * _STRIDE)
    return ((mixed >> _SHIFT) % np.uint64(VOCABULARY)).astype(np.int32)


def _fold(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit words; the multiplication wraps around."""
    values = (values ^ (values >> _SHIFT)) * _FOLD
    values = (values ^ (values >> _SHIFT)) * _FOLD
    return values ^ (values >> _SHIFT)


_MS_PER_OUTPUT_TOKEN = 20.0
"""Assumed decoding time of a token on the generator's clock; places a turn after the previous answer."""


class WorkloadName(StrEnum):
    """Kinds of generated traffic."""

    CHAT = "chat"
    AGENT = "agent"
    PAUSES = "pauses"
    RAG = "rag"
    UNIQUE = "unique"
    SCAN = "scan"
    SHIFT = "shift"
    LOOP = "loop"
    RECENCY = "recency"
    MISLEADING = "misleading"
    LOAD = "load"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class DialogueShape:
    """Parameters of conversations that share system prompts and grow turn by turn. Ranges include both ends."""

    systems: int
    system_tokens: tuple[int, int]
    turns: tuple[int, int]
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    think_ms: float
    between_arrivals_ms: float
    pause_ms: float = 0.0
    """Mean of long pauses, which follow a share of ``pauses`` of the turns in place of the think time."""
    pauses: float = 0.0


@dataclass(frozen=True, slots=True)
class RetrievalShape:
    """Parameters of single questions over documents with Zipf-distributed popularity. Ranges include both ends."""

    documents: int
    document_tokens: tuple[int, int]
    zipf_exponent: float
    system_tokens: int
    question_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    between_arrivals_ms: float


CHAT = DialogueShape(4, (384, 1024), (2, 8), (32, 400), (48, 320), think_ms=8000, between_arrivals_ms=1500)
AGENT = DialogueShape(2, (1500, 2500), (4, 16), (100, 900), (24, 120), think_ms=400, between_arrivals_ms=2500)
PAUSES = DialogueShape(
    3,
    (1000, 3000),
    (6, 30),
    (50, 1200),
    (16, 200),
    think_ms=1500,
    between_arrivals_ms=20_000,
    pause_ms=180_000,
    pauses=0.15,
)
RAG = RetrievalShape(400, (512, 3072), 1.1, 256, (24, 120), (32, 200), between_arrivals_ms=500)
UNIQUE = DialogueShape(0, (0, 0), (1, 1), (256, 4096), (32, 200), think_ms=0, between_arrivals_ms=500)


def generate(name: WorkloadName, requests: int, seed: int) -> Iterator[WorkItem]:
    """Generate requests in order of arrival; equal arguments give equal requests.

    - ``chat``: conversations with a few shared system prompts and think time; each prompt extends the previous one.
    - ``agent``: the same with long system prompts (tools), short outputs, tool results as inputs, and short pauses.
    - ``pauses``: agents that call tools and now and then wait for their user for minutes.
    - ``rag``: questions over documents, a few of which are read often.
    - ``unique``: no reuse.
    - the others: questions over documents, chosen as ``fdcache.replay.readings`` says.
    """
    random = np.random.default_rng(seed)
    if name in READINGS:
        return itertools.islice(_questions(READINGS[name](random), random), requests)
    if name is WorkloadName.RAG:
        return itertools.islice(_retrieval(RAG, random), requests)
    shapes = {
        WorkloadName.CHAT: CHAT,
        WorkloadName.AGENT: AGENT,
        WorkloadName.PAUSES: PAUSES,
        WorkloadName.UNIQUE: UNIQUE,
    }
    return itertools.islice(_dialogues(shapes[name], random), requests)


@dataclass(slots=True)
class _Dialogue:
    """A conversation: the segments of its next prompt and the number of turns left."""

    streams: list[int]
    lengths: list[int]
    turns_left: int
    previous: int | None = None
    think_ms: float = 0.0

    def next_turn(self, index: int, now_ms: float, stream: int, tokens: int, output: int) -> WorkItem:
        """Return the next request; the one after it extends its prompt and output."""
        self.streams.append(stream)
        self.lengths.append(tokens)
        item = _item(
            index, now_ms, self.streams, self.lengths, output, after=self.previous, think_ms=self.think_ms
        )
        self.streams.append(item.output_stream)
        self.lengths.append(output)
        self.previous = index
        self.turns_left -= 1
        return item


def _dialogues(shape: DialogueShape, random: np.random.Generator) -> Iterator[WorkItem]:
    """Generate conversations without end, interleaved by arrival time."""
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
            long = shape.pauses and random.random() < shape.pauses
            dialogue.think_ms = random.exponential(shape.pause_ms if long else shape.think_ms)
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
    """Generate questions without end; stream 0 is the system prompt, streams 1 to ``documents`` the documents."""
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


def _questions(readings: Iterator[DocumentReading], random: np.random.Generator) -> Iterator[WorkItem]:
    """Turn readings into requests; the stream of document n is 1 + 2n, that of question i is 2 + 2i."""
    lengths: dict[int, int] = {}
    now_ms = 0.0
    for index, (document, gap_ms) in enumerate(readings):
        length = lengths.setdefault(document, _between(random, (512, 4096)))
        sizes = [length, _between(random, (24, 120))]
        yield _item(index, now_ms, [1 + 2 * document, 2 + 2 * index], sizes, _between(random, (32, 200)))
        now_ms += gap_ms


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


class Requests(Protocol):
    """Requests as they arrive. Times are seconds since the start; ``seconds`` is the workload's own time."""

    seconds: float

    @property
    def exhausted(self) -> bool:
        """True once every request has been taken."""

    def take(self, now: float) -> WorkItem | None:
        """Return the next request that has arrived by ``now``, or None."""

    def finish(self, index: int, now: float) -> None:
        """Mark a request as ended."""

    def next_arrival(self) -> float | None:
        """Return the time of the next arrival; None when it depends on a request that has not ended."""


class Arrivals:
    """Queue of a workload's requests by arrival time; reads the workload as needed.

    Without ``speed`` a request arrives as soon as it is taken and its previous turn has ended. With it, the
    workload's clock runs ``speed`` times as fast as the wall clock. At most ``window`` requests wait for a previous
    turn. Times are seconds since the start.

    ``seconds`` is the workload's own time: the latest time stamp of a request that was taken.
    """

    def __init__(self, items: Iterator[WorkItem], speed: float | None, window: int) -> None:
        self._items = items
        self._speed = speed
        self._window = window
        self._due: list[tuple[float, int, WorkItem]] = []
        self._waiting: dict[int, list[WorkItem]] = {}
        self._unfinished: set[int] = set()
        self._next: WorkItem | None = next(items, None)
        self.seconds = 0.0

    @property
    def exhausted(self) -> bool:
        """True once every request has been taken."""
        return self._next is None and not self._due and not self._waiting

    def take(self, now: float) -> WorkItem | None:
        """Return the next request that has arrived by ``now``, or None."""
        self._read(now)
        if not self._due or self._due[0][0] > now:
            return None
        item = heapq.heappop(self._due)[2]
        self.seconds = max(self.seconds, item.timestamp_ms / 1000)
        return item

    def finish(self, index: int, now: float) -> None:
        """Mark a request as ended; the turn that follows it arrives after its think time."""
        self._unfinished.discard(index)
        for item in self._waiting.pop(index, ()):
            think = 0.0 if self._speed is None else item.think_ms / 1000 / self._speed
            self._arrive(item, now + think)

    def next_arrival(self) -> float | None:
        """Return the time of the next arrival; None when it depends on a request that has not ended."""
        times = [self._due[0][0]] if self._due else []
        if self._next is not None:
            times.append(self._time_of(self._next))
        return min(times, default=None)

    def _read(self, now: float) -> None:
        while self._next is not None and self._wants_more(now):
            item, self._next = self._next, next(self._items, None)
            self._unfinished.add(item.index)
            if item.after in self._unfinished:
                self._waiting.setdefault(item.after, []).append(item)
            else:
                self._arrive(item, 0.0)

    def _wants_more(self, now: float) -> bool:
        if self._speed is None:
            return not self._due and len(self._waiting) < self._window
        return self._next is not None and self._time_of(self._next) <= now

    def _arrive(self, item: WorkItem, earliest: float) -> None:
        heapq.heappush(self._due, (max(earliest, self._time_of(item)), item.index, item))

    def _time_of(self, item: WorkItem) -> float:
        return 0.0 if self._speed is None else item.timestamp_ms / 1000 / self._speed
