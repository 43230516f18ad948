"""Figures of a run, the ratios between them, and both as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from benchmarks.peers.rounds import Cost
from benchmarks.peers.scenarios import HIT_TOKENS, PHASES, RUNNING, Memory

OURS, FLOOR = "fdcache-int32", "minimal"

HIT_RATE_TOLERANCE = 0.01
"""Managers evict leaves or the ends of paths first, in slightly different orders; more than that is an error."""


@dataclass(frozen=True)
class Figures:
    """What was measured, by peer: replays by number of blocks, microseconds of a decode step, full hits, memory."""

    replays: dict[int, dict[str, Cost]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    hits: dict[str, Cost] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values, times in microseconds."""
        return {
            "us_per_request": {
                str(blocks): {peer: _fields(cost) for peer, cost in costs.items()}
                for blocks, costs in self.replays.items()
            },
            "us_per_decode_step": self.steps,
            "us_per_cached_prompt": {peer: _fields(cost) for peer, cost in self.hits.items()},
            "bytes_per_block": {
                peer: {"resident": one.resident, "counted_beside_hash": one.counted}
                for peer, one in self.memory.items()
            },
        }


def _fields(cost: Cost) -> dict[str, float]:
    return {
        **{phase: cost.us(phase) for phase in cost.ns},
        "total": cost.us(),
        "left_out": cost.left_out_ns / 1000 / cost.requests,
        "requests": cost.requests,
        "hit_rate": cost.hit_rate,
    }


@dataclass(frozen=True)
class Target:
    """A ratio or size and its aim; ``value`` is None if a part of it was not measured."""

    name: str
    value: float | None
    limit: float
    at_least: bool

    @property
    def is_met(self) -> bool | None:
        """True if the aim is reached, None if the value is unknown."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def targets(figures: Figures, small: int, large: int) -> list[Target]:
    """Return the aims, with pools of ``small`` and of ``large`` blocks."""
    replays = figures.replays.get(small, {})
    whole = {peer: cost.us() for peer, cost in replays.items()}.get
    unhashed = {peer: cost.us_without_hashing for peer, cost in replays.items()}.get
    hit = {peer: cost.us_without_hashing for peer, cost in figures.hits.items()}.get
    many = {peer: cost.us() for peer, cost in figures.replays.get(large, {}).items()}.get
    step, memory = figures.steps.get, figures.memory.get(OURS)
    return [
        Target("a request, int32 tokens: vLLM / fdcache", _ratio(whole("vllm"), whole(OURS)), 20, True),
        Target("a request, lists: vLLM / fdcache", _ratio(whole("vllm"), whole("fdcache-list")), 14, True),
        Target("a request: SGLang / fdcache", _ratio(whole("sglang"), whole(OURS)), 7, True),
        Target(
            "a request without hashing: fdcache / minimal",
            _ratio(unhashed(OURS), unhashed(FLOOR)),
            1.8,
            False,
        ),
        Target(f"a decode step of {RUNNING}: vLLM / fdcache", _ratio(step("vllm"), step(OURS)), 40, True),
        Target(f"a decode step of {RUNNING}: fdcache / minimal", _ratio(step(OURS), step(FLOOR)), 1.3, False),
        Target("a cached prompt without hashing: vLLM / fdcache", _ratio(hit("vllm"), hit(OURS)), 40, True),
        Target(
            f"a request, {large:,} blocks / {small:,} blocks", _ratio(many(OURS), whole(OURS)), 1.3, False
        ),
        Target("bytes of an entry beside its hash", memory.counted if memory else None, 128, False),
    ]


def faults(figures: Figures) -> Iterator[str]:
    """Yield what cannot be true of managers that do the same work."""
    for blocks, costs in figures.replays.items():
        least = costs.get(FLOOR)
        for peer, cost in costs.items():
            if (
                least
                and peer.startswith("fdcache")
                and abs(cost.hit_rate - least.hit_rate) > HIT_RATE_TOLERANCE
            ):
                yield f"{peer} hits {cost.hit_rate:.1%} with {blocks:,} blocks, {FLOOR} {least.hit_rate:.1%}"
    for peer, cost in figures.hits.items():
        if cost.hit_tokens != cost.prompt_tokens:
            yield f"{peer} found {cost.hit_tokens:,} of {cost.prompt_tokens:,} cached tokens"


# --- tables -------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return (
            "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"
        )

    return "\n".join(line(cells) for cells in (lines[0], rule, *lines[1:]))


def tables(figures: Figures, aims: Sequence[Target]) -> Iterator[str]:
    """Yield the tables of a run, each with its title."""
    for blocks, costs in figures.replays.items():
        yield _phases(f"us per request, {blocks:,} blocks", costs)
    if figures.steps:
        rows = ([peer, f"{us:.1f}", f"{us / RUNNING:.3f}"] for peer, us in figures.steps.items())
        yield table([f"us per decode step of {RUNNING}", "step", "per request"], rows)
    if figures.hits:
        yield _phases(f"us per cached prompt of {HIT_TOKENS:,} tokens", figures.hits)
    if figures.memory:
        rows = ([peer, f"{one.resident:.0f}", _number(one.counted)] for peer, one in figures.memory.items())
        yield table(["bytes per cached block", "of the process", "counted beside the hash"], rows)
    yield verdicts("ratio", aims)


def verdicts(title: str, aims: Sequence[Target]) -> str:
    """Return the table of ratios and their aims."""
    rows = ([aim.name, _number(aim.value), _limit(aim), _verdict(aim)] for aim in aims)
    return table([title, "value", "target", ""], rows)


def _phases(title: str, costs: Mapping[str, Cost]) -> str:
    phases = [phase for phase in PHASES if any(phase in cost.ns for cost in costs.values())]
    rows = []
    for peer, cost in costs.items():
        left_out = cost.left_out_ns / 1000 / cost.requests
        us = [*(cost.us(phase) for phase in phases), cost.us(), cost.us_without_hashing, left_out]
        rows.append([peer, *(f"{one:.1f}" for one in us), f"{cost.hit_rate:.2%}"])
    return table([title, *phases, "total", "without hash", "left out", "hit rate"], rows)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _limit(aim: Target) -> str:
    return f"{'at least' if aim.at_least else 'at most'} {aim.limit:g}"


def _verdict(aim: Target) -> str:
    return {True: "met", False: "not met", None: "not measured"}[aim.is_met]
