"""What a policy could know of sessions: tables that are made from the very sessions on which they are then used.

A model of one tier and of sessions that share nothing: of each session the tier holds the beginning of its last
prompt, and what the next one leaves behind is dropped at once. A session goes by the Gittins index of its class and
age, from rates over the whole trace; ``over`` drops sessions that are over first, ``within`` those that do not return
so soon, ``optimum`` those that return last.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Report, Row
from fdcache.replay.trace import read_trace

BLOCK = 64
SIZES = (6154, 8000, 10000, 16000)
AGES = [2 ** (age / 1.5) - 1 for age in range(24)]
CLASS_REQUESTS = 3.0
"""Requests whose weight the rates of all classes have in those of one."""


@dataclass
class Step:
    """A request: when it was sent, its session, blocks of its prompt and output, and those it shares with the last."""

    at: float
    session: int
    blocks: int
    output: int
    shared: int
    before: int | None
    after: int | None = None


def steps_of(trace: Path) -> list[Step]:
    """Return the requests of a trace; a session has those that begin alike."""
    steps: list[Step] = []
    last: dict[int, tuple[int, list[int]]] = {}
    for item in read_trace(trace, id_tokens=BLOCK):
        ids = item.streams[: int(item.lengths.sum()) // BLOCK].tolist()
        before, old = last.get(ids[0], (None, []))
        pairs = zip(ids, old, strict=False)
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(old)))
        if before is not None:
            steps[before].after = len(steps)
        last[ids[0]] = len(steps), ids
        output = item.output_length
        steps.append(Step(item.timestamp_ms / 1000, ids[0], len(ids), output, shared, before))
    return steps


def found(steps: Sequence[Step], slots: int, rank: Callable[[Step, float], float]) -> float:
    """Return the share of the blocks of prompts that is found if the session of the lowest rank goes first."""
    held: dict[int, int] = {}
    last: dict[int, Step] = {}
    hits = 0
    for step in steps:
        hits += min(held.get(step.session, 0), step.shared)
        held[step.session], last[step.session] = step.blocks, step
        beyond = sum(held.values()) + step.output // BLOCK - slots
        others = [session for session in held if session != step.session]
        for session in sorted(others, key=lambda each: rank(last[each], step.at)):
            gone = min(held[session], max(beyond, 0))
            held[session] -= gone
            beyond -= gone
    return hits / sum(step.blocks for step in steps)


def gittins(rates: Sequence[float]) -> list[float]:
    """Return for each age the most hits a second that keeping a block for any time gives."""
    best = [0.0] * len(rates)
    for first in range(len(rates)):
        alive, hits, seconds = 1.0, 0.0, 0.0
        for age in range(first, len(rates)):
            chance = -math.expm1(-rates[age] * (AGES[age + 1] - AGES[age]))
            hits += alive * chance
            seconds += alive * chance / rates[age]
            best[first] = max(best[first], hits / seconds)
            alive *= 1 - chance
    return best


def by_tables(steps: Sequence[Step], kind: Callable[[Step], object]) -> Callable[[Step, float], float]:
    """Return the rank by tables of these classes, made of all steps."""
    uses: dict[object, list[float]] = {}
    risks: dict[object, list[float]] = {}
    for step in steps:
        waited = (steps[-1] if step.after is None else steps[step.after]).at - step.at
        for name in ("all", (kind(step),)):
            used, risk = uses.setdefault(name, [0.0] * 23), risks.setdefault(name, [0.0] * 23)
            for age in range(23):
                risk[age] += min(max(waited - AGES[age], 0.0), AGES[age + 1] - AGES[age])
                used[age] += step.after is not None and AGES[age] < waited <= AGES[age + 1]
    base = [
        (uses["all"][age] + 0.5) / (risks["all"][age] + 0.5 * (AGES[age] + 60) / 0.3) for age in range(23)
    ]
    worth = {
        name: gittins(
            [
                (uses[name][age] + CLASS_REQUESTS) / (risks[name][age] + CLASS_REQUESTS / base[age])
                for age in range(23)
            ]
        )
        for name in uses
    }

    def rank(step: Step, now: float) -> float:
        place = min(1.5 * math.log2(1 + now - step.at), 21.5)
        row, age = worth[(kind(step),)], int(place)
        return row[age] + (place - age) * (row[age + 1] - row[age])

    return rank


def group(number: float, *limits: float) -> int:
    return sum(number > limit for limit in limits)


def ranks(steps: Sequence[Step]) -> dict[str, Callable[[Step, float], float]]:
    """Return the orders that are compared, by what they tell apart."""

    def output(step: Step) -> int:
        return group(step.output, 4, 32, 128, 512)

    def new(step: Step) -> int:
        return group((step.blocks - step.shared) * BLOCK, 512, 2048, 8192, 32768)

    def pause(step: Step) -> int:
        return -1 if step.before is None else group(step.at - steps[step.before].at, 8, 30, 120, 600)

    def longest(step: Step) -> int:
        """Group the longest of the last eight pauses of a session."""
        pauses = [0.0]
        while step.before is not None and len(pauses) < 9:
            before = steps[step.before]
            pauses.append(step.at - before.at)
            step = before
        return group(max(pauses), 30, 120, 600)

    def later_than(seconds: float) -> Callable[[Step, float], float]:
        """Have sessions go first that do not return within so many seconds, by last use among themselves."""

        def rank(step: Step, now: float) -> float:
            returns = step.after is not None and steps[step.after].at - step.at <= seconds
            return step.at if returns else step.at - 1e9

        return rank

    kinds: dict[str, Callable[[Step], object]] = {
        "age": lambda step: 0,
        "output": output,
        "new": new,
        "pause": pause,
        "output and new": lambda step: (output(step), new(step)),
        "output and pause": lambda step: (output(step), pause(step)),
        "longest pause": longest,
        "output and length": lambda step: (
            output(step),
            group(step.blocks, 400, 800, 1200, 1600, 2000, 2400),
        ),
        "session": lambda step: step.session,
        "session and output": lambda step: (step.session, output(step)),
    }
    return {
        "last use": lambda step, now: step.at,
        **{name: by_tables(steps, kind) for name, kind in kinds.items()},
        "over": later_than(math.inf),
        "within 60 s": later_than(60),
        "within 120 s": later_than(120),
        "optimum": lambda step, now: -math.inf if step.after is None else -steps[step.after].at,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, help="sessions in blocks of 64 tokens (JSONL)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks (default 6154 to 16000)")


def measure(options: argparse.Namespace, report: Report) -> None:
    steps = steps_of(options.trace)
    orders = ranks(steps)

    def rows() -> Iterator[Row]:
        for slots in options.sizes:
            shares = {name: found(steps, slots, rank) for name, rank in orders.items()}
            least, best = shares.pop("last use"), shares.pop("optimum")
            closed = {name: (share - least) / max(best - least, 1e-9) for name, share in shares.items()}
            yield {"blocks": slots, "last use": least, "optimum": best} | closed

    report.table("Share of the prompts' blocks found, and of the gap to the optimum that is closed", rows())
