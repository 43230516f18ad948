"""Work that is timed: each scenario prepares a pool, and then goes on in slices that are the same for every peer."""

from __future__ import annotations

import gc
import itertools
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.peers.adapters.base import Adapter, Pool, Tokens
from benchmarks.peers.traffic import Traffic

PHASES = ("hash", "match", "allocate", "commit", "decode", "free")

BLOCK = 64
HIT_TOKENS = 131_072
RUNNING = 256
PROMPT_TOKENS = 2000
PATH_BLOCKS = 100
VOCABULARY = 128_000

MakeAdapter = Callable[[Pool], Adapter]


@dataclass(slots=True)
class Slice:
    """What one slice of a scenario took: nanoseconds of every call by phase, those left out, and what was done."""

    ns: dict[str, list[int]] = field(default_factory=dict)
    left_out_ns: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0


class Clock:
    """Notes the time of an adapter's calls by phase, without what the adapter leaves out."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._slice = Slice()

    def timed(self, phase: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call whose time is noted under a phase."""
        before = self._adapter.left_out_ns
        since = time.perf_counter_ns()
        result = call(*arguments)
        spent = time.perf_counter_ns() - since
        left_out = self._adapter.left_out_ns - before
        self._slice.ns.setdefault(phase, []).append(spent - left_out)
        self._slice.left_out_ns += left_out
        return result

    def stop(self) -> Slice:
        """Return what was noted since the last stop."""
        done, self._slice = self._slice, Slice()
        return done


class Scenario(Protocol):
    """A pool in some state, and work on it."""

    adapter: Adapter

    def advance(self, count: int) -> Slice:
        """Do a slice of the work: so many requests, steps or prompts."""


@dataclass(slots=True)
class Running:
    """A request in flight, the rest of its output in pieces of one block, and the blocks reserved for it."""

    request: Any
    outputs: list[Any]
    reserved: int
    done: int = 0


class Replay:
    """A closed loop over recorded traffic.

    A request is admitted while there are blocks for its prompt and output, counted as if nothing were shared; so every
    peer sees the same order of calls, and none has to preempt. Then each request in flight decodes a block of tokens.
    """

    def __init__(self, make: MakeAdapter, *, traffic: str, blocks: int, in_flight: int) -> None:
        self._traffic = Traffic.load(Path(traffic))
        self._blocks = blocks - 2
        self._most = in_flight
        self._next = 0
        self._reserved = 0
        self._running: deque[Running] = deque()
        self.adapter = make(Pool(BLOCK, blocks, in_flight, self._traffic.longest + BLOCK))
        self._clock = Clock(self.adapter)

    def advance(self, count: int) -> Slice:
        """Take the next ``count`` requests; after the last one, finish all."""
        last = min(self._next + count, len(self._traffic))
        done = Slice()
        while self._next < last or (last == len(self._traffic) and self._running):
            while self._next < last and self._fits(self._next):
                self._admit(done)
            for _ in range(len(self._running)):
                self._decode(self._running.popleft())
        took = self._clock.stop()
        took.requests, took.prompt_tokens, took.hit_tokens = (
            done.requests,
            done.prompt_tokens,
            done.hit_tokens,
        )
        return took

    def _needed(self, index: int) -> int:
        return -(-sum(self._traffic.lengths(index)) // BLOCK) + 2

    def _fits(self, index: int) -> bool:
        needed = self._needed(index)
        if needed > self._blocks:
            return True  # never fits: it is left out
        return len(self._running) < self._most and self._reserved + needed <= self._blocks

    def _admit(self, done: Slice) -> None:
        index, needed = self._next, self._needed(self._next)
        self._next += 1
        if needed > self._blocks:
            return
        adapter, timed = self.adapter, self._clock.timed
        prompt, output = self._traffic.request(index)
        request = adapter.make_request(index, prompt)
        outputs = [adapter.make_output(output[at : at + BLOCK]) for at in range(0, len(output), BLOCK)]
        timed("hash", adapter.hash, request)
        hit = timed("match", adapter.match, request)
        timed("allocate", adapter.allocate, request)
        timed("commit", adapter.commit, request)
        self._running.append(Running(request, outputs, needed))
        self._reserved += needed
        done.requests += 1
        done.prompt_tokens += len(prompt)
        done.hit_tokens += min(hit, len(prompt) - 1)

    def _decode(self, entry: Running) -> None:
        if entry.done < len(entry.outputs):
            self._clock.timed("decode", self.adapter.decode, entry.request, entry.outputs[entry.done])
            entry.done += 1
        if entry.done < len(entry.outputs):
            self._running.append(entry)
        else:
            self._clock.timed("free", self.adapter.free, entry.request)
            self._reserved -= entry.reserved


class Filled:
    """A pool whose blocks all hold cached content that may be evicted, of requests of ``path`` blocks."""

    def __init__(self, make: MakeAdapter, blocks: int, path: int, max_requests: int, max_tokens: int) -> None:
        self.adapter = make(Pool(BLOCK, blocks, max_requests, max_tokens))
        self._random = np.random.default_rng(1)
        self._numbers = itertools.count()
        for _ in range(blocks // path + 1):
            self.adapter.free(self._admit(self._tokens(path * BLOCK)))

    def _tokens(self, count: int) -> Tokens:
        return self._random.integers(0, VOCABULARY, count, dtype=np.int32)

    def _admit(self, prompt: Tokens) -> Any:
        adapter = self.adapter
        request = adapter.make_request(next(self._numbers), prompt)
        adapter.hash(request)
        adapter.match(request)
        adapter.allocate(request)
        adapter.commit(request)
        return request


class DecodeSteps(Filled):
    """Steps that append a token to each of ``RUNNING`` requests; in ``BLOCK`` steps each one takes a block."""

    def __init__(self, make: MakeAdapter, *, blocks: int, steps: int) -> None:
        longest = PROMPT_TOKENS + BLOCK + steps
        super().__init__(make, blocks, PATH_BLOCKS, RUNNING + 1, longest + BLOCK * PATH_BLOCKS)
        lengths = PROMPT_TOKENS + self._random.integers(0, BLOCK, RUNNING)
        self._requests = [self._admit(self._tokens(int(length))) for length in lengths]
        self._clock = Clock(self.adapter)

    def advance(self, count: int) -> Slice:
        """Do ``count`` steps."""
        for _ in range(count):
            step = [[token] for token in self._tokens(RUNNING).tolist()]
            self._clock.timed("decode", self.adapter.decode_step, self._requests, step)
        return self._clock.stop()


class FullHits(Filled):
    """Prompts of which ``HIT_TOKENS`` are cached and 100 are not, one at a time."""

    def __init__(self, make: MakeAdapter, *, blocks: int) -> None:
        super().__init__(make, blocks, PATH_BLOCKS, 2, HIT_TOKENS + 2 * BLOCK)
        self._cached = self._tokens(HIT_TOKENS)
        self._clock = Clock(self.adapter)
        for _ in range(2):  # the first publishes the prompt, the second is not measured
            self.adapter.free(self._admit(self._cached))

    def advance(self, count: int) -> Slice:
        """Serve ``count`` prompts."""
        adapter, timed = self.adapter, self._clock.timed
        hits = 0
        for _ in range(count):
            prompt = np.concatenate([self._cached, self._tokens(100)])
            request = adapter.make_request(next(self._numbers), prompt)
            timed("hash", adapter.hash, request)
            hits += timed("match", adapter.match, request)
            timed("allocate", adapter.allocate, request)
            timed("commit", adapter.commit, request)
            timed("free", adapter.free, request)
        done = self._clock.stop()
        done.requests, done.prompt_tokens, done.hit_tokens = count, count * HIT_TOKENS, hits
        return done


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes for each cached block: growth of the process, and what the manager counts beside the hash itself."""

    resident: float
    counted: float | None


def measure_memory(make: MakeAdapter, blocks: int) -> Memory:
    """Fill a pool and return what it takes; the first thing that a process does, so that no memory is reused."""
    make(Pool(BLOCK, PATH_BLOCKS, 2, 2 * BLOCK * PATH_BLOCKS))  # what is loaded with the first pool
    gc.collect()
    before = _resident()
    filled = Filled(make, blocks, PATH_BLOCKS, 2, 2 * BLOCK * PATH_BLOCKS)
    gc.collect()
    return Memory((_resident() - before) / blocks, filled.adapter.entry_bytes())


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


SCENARIOS: dict[str, Callable[..., Scenario]] = {"replay": Replay, "decode": DecodeSteps, "hit": FullHits}
