"""Agents: recorded sessions that several users play at the same time, each request after the answer to the one before.

A trace says of each request which blocks its prompt has, by ids that are equal where the text was. The tokens are made
from the ids, so that what sessions share among their own requests is shared here, and users who play the same session
have nothing in common.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import percentiles
from benchmarks.vllm.driver import Answer, Driver
from benchmarks.vllm.shapes import BLOCK, LONGEST, Shape
from fdcache.replay.workloads import stream_tokens

TRACE = "agents-12.jsonl.xz"
ID_TOKENS = 64
"""Tokens of an id in the recorded sessions."""
LEAST_BLOCKS = 160


@dataclass(frozen=True)
class AgentLoad:
    """How much of the sessions is played.

    ``divisor`` makes contexts, answers and the device's cache so many times smaller, with the same shares among them.
    Each user plays at most ``requests``; gaps are multiplied by ``gap`` and at most ``longest_gap_s``.
    """

    divisor: int
    requests: int
    gap: float
    longest_gap_s: float


AGENTS = {
    "full": AgentLoad(1, 40, 0.2, 20.0),
    "half": AgentLoad(2, 20, 0.1, 10.0),
    "short": AgentLoad(4, 5, 0.05, 5.0),
    "brief": AgentLoad(4, 10, 0.03, 3.0),
    "small": AgentLoad(64, 6, 0.01, 0.3),
}
"""By the names of the loads."""


@dataclass(frozen=True)
class Step:
    """A request of a session: seconds after the one before it was sent, and the tokens of its prompt by ids."""

    gap_s: float
    ids: Sequence[int]
    length: int
    output: int


def find_trace(root: Path) -> Path | None:
    """Return the recorded sessions beside a tree, None where they are missing."""
    places = (root / "shared", root.parent / "shared")
    return next((path for place in places if (path := place / "traces" / TRACE).exists()), None)


def shape_of(shape: Shape, load: AgentLoad) -> Shape:
    """Return a shape whose device is as much smaller as the contexts, and that takes all that fits it."""
    blocks = max(shape.device_blocks // load.divisor, LEAST_BLOCKS)
    return replace(shape, device_blocks=blocks, longest=min(LONGEST, (blocks - 1) * BLOCK))


def read_sessions(trace: Path, load: AgentLoad, longest: int) -> list[list[Step]]:
    """Return the sessions of a trace; a session has the requests that begin with the same id.

    A session ends before the first request that has more than ``longest`` tokens with its answer.
    """
    opened = lzma.open if trace.suffix == ".xz" else open
    sessions: dict[int, list[Step]] = {}
    last: dict[int, float] = {}
    over: set[int] = set()
    with opened(trace, "rt") as lines:
        for line in filter(str.strip, lines):
            request = json.loads(line)
            ids, sent = request["hash_ids"], request["timestamp"] / 1000
            name = ids[0]
            length = min(-(-request["input_length"] // load.divisor), len(ids) * (ID_TOKENS // load.divisor))
            output = max(request["output_length"] // load.divisor, 1)
            steps = sessions.setdefault(name, [])
            if length + output > longest:
                over.add(name)
            if name not in over and len(steps) < load.requests:
                gap = min((sent - last.get(name, sent)) * load.gap, load.longest_gap_s)
                steps.append(Step(gap, ids, length, output))
            last[name] = sent
    return [steps for steps in sessions.values() if steps]


def users_of(sessions: Sequence[list[Step]], users: int) -> list[list[Step]]:
    """Return what each user plays; where there are more users than sessions, some play the same."""
    return [sessions[user % len(sessions)] for user in range(users)]


@dataclass(frozen=True)
class Bounds:
    """What is known of a load before it runs."""

    prompt_tokens: int
    ceiling: int
    """Tokens of prompts that a cache without an end would find."""
    working_set: int
    """Tokens that are different, in whole blocks."""

    @classmethod
    def of(cls, played: Sequence[list[Step]], load: AgentLoad) -> Bounds:
        """Count the whole blocks of prompts that an earlier request of their user had."""
        per_id = ID_TOKENS // load.divisor
        prompts = ceiling = different = 0
        for steps in played:
            seen: set[int] = set()
            for step in steps:
                prompts += step.length
                path = 0
                for end in range(BLOCK, step.length + 1, BLOCK):
                    # The ids that reach into this block, and all before it.
                    path = hash((path, *step.ids[(end - BLOCK) // per_id : -(-end // per_id)]))
                    if path not in seen:
                        different += BLOCK
                    elif end < step.length:
                        ceiling += BLOCK
                    seen.add(path)
        return cls(prompts, ceiling, different)


@dataclass(frozen=True)
class Play:
    """A load of agents on a shape: what is asked of an engine with a host tier of a share of the working set."""

    shape: Shape
    scale: str
    trace: Path
    users: int
    bounds: Bounds

    @classmethod
    def of(cls, shape: Shape, scale: str, trace: Path, users: int) -> Play:
        """Read the sessions, and count what is known of them."""
        load = AGENTS[scale]
        small = shape_of(shape, load)
        played = users_of(read_sessions(trace, load, small.longest), users)
        return cls(small, scale, trace, users, Bounds.of(played, load))

    def host_bytes(self, share: float) -> int:
        """Return the bytes of a host tier."""
        return int(share * self.bounds.working_set * self.shape.token_bytes)

    def order(self, share: float | None) -> dict[str, Any]:
        """Return the order to an engine; ``share`` is None for one without a host tier."""
        bounds = self.bounds
        labels = {"users": self.users, "share": share, "ceiling_tokens": bounds.ceiling}
        labels |= {"prompt_tokens": bounds.prompt_tokens, "working_set_tokens": bounds.working_set}
        order = {"trace": str(self.trace), "scale": self.scale, "longest": self.shape.longest}
        return {"agents": order | {"labels": labels}}


def prompt_of(step: Step, user: int, load: AgentLoad, vocabulary: int) -> NDArray[np.int32]:
    """Return the tokens of a prompt; another user has others for the same ids."""
    per_id = ID_TOKENS // load.divisor
    used = -(-step.length // per_id)
    lengths = np.full(used, per_id, dtype=np.int64)
    lengths[-1] = step.length - (used - 1) * per_id
    streams = np.array(step.ids[:used], dtype=np.uint64)
    return 3 + stream_tokens(streams, lengths, user) % np.int32(vocabulary - 3)


async def agents(driver: Driver, played: Sequence[list[Step]], load: AgentLoad) -> dict[str, Any]:
    """Have all users play at the same time; measure the requests that follow the first of each."""
    vocabulary = driver.shape.vocabulary
    prompts = [
        [prompt_of(step, user, load, vocabulary) for step in steps] for user, steps in enumerate(played)
    ]

    async def play(user: int) -> list[Answer]:
        found: list[Answer] = []
        for step, tokens in zip(played[user], prompts[user], strict=True):
            prompt = tokens.tolist()
            if found:
                await asyncio.sleep(max(found[-1].sent + step.gap_s - time.perf_counter(), 0))
            found.append(await driver.ask(prompt, step.output, forced=3 + user % (vocabulary - 3)))
        return found

    before, begin = driver.counted(), time.perf_counter()
    answers = await asyncio.gather(*map(play, range(len(played))))
    seconds = time.perf_counter() - begin
    every = [answer for of_user in answers for answer in of_user]
    later = [answer for of_user in answers for answer in of_user[1:]]
    gaps = [(end - start) * 1000 for answer in every for start, end in answer.gaps]
    return {
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(every) / seconds, 3),
        "ttft_ms": {
            "first": percentiles([of_user[0].ttft_ms for of_user in answers]),
            "later": percentiles([answer.ttft_ms for answer in later]),
        },
        "itl_ms": percentiles(gaps),
        "longest_prompt": max(step.length for steps in played for step in steps),
        "cached_tokens": sum(answer.cached for answer in every),
        **driver.counted().since(before),
    }
