"""Comparison of two runs of the same traffic: their tokens and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from examples.paddle_engine.engine import Task
from fdcache import CacheManager
from fdcache.settings.kinds import format_size
from fdcache.tiers.statistics import Counters

NEAR_TIE = 1e-3
"""In ordinary mode a token may differ if the two best scores of both runs are closer than this, because rounding can
swap them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its tasks in order, and the seconds from its first step to its last."""

    tasks: Sequence[Task]
    seconds: float

    @property
    def ttft(self) -> NDArray[np.float64]:
        """Seconds from submission to the first token, one per task."""
        return np.array([(task.first_token or np.nan) - task.arrival for task in self.tasks])

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return sum(len(task.tokens) for task in self.tasks)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Numbers of compared tokens and near ties, and the other differences."""

    compared: int
    near_ties: int
    differences: tuple[str, ...]

    @classmethod
    def of(cls, first: Run, second: Run, *, exact: bool) -> Agreement:
        """Compare task by task, up to the first difference; the texts diverge after it."""
        compared = near_ties = 0
        differences = []
        for a, b in zip(first.tasks, second.tasks, strict=True):
            for place, (one, other) in enumerate(zip(a.samples, b.samples, strict=True)):
                compared += 1
                if one.token != other.token:
                    if not exact and max(one.margin, other.margin) < NEAR_TIE:
                        near_ties += 1
                    else:
                        differences.append(f"{a.name}: token {place} is {other.token} instead of {one.token}")
                    break
        return cls(compared, near_ties, tuple(differences))


def show_cache(manager: CacheManager) -> None:
    """Print the tiers and the write policy in force."""
    cache = manager.settings
    host = f"{manager.num_host_blocks:,} blocks of {cache.server or format_size(cache.host_memory)}"
    print(f"cache: device {manager.num_device_blocks:,} blocks; host {host}; {cache.write_policy.value}")


def show(without: Run, with_cache: Run, counters: Counters, agreement: Agreement) -> None:
    """Print both runs side by side."""
    table = Table(title="the same traffic without and with fdcache")
    for column in ("", "without", "with", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    rows = [
        ("TTFT, mean", "ms", without.ttft.mean() * 1e3, with_cache.ttft.mean() * 1e3),
        ("TTFT, median", "ms", np.median(without.ttft) * 1e3, np.median(with_cache.ttft) * 1e3),
        (
            "TTFT, 90th percentile",
            "ms",
            np.quantile(without.ttft, 0.9) * 1e3,
            np.quantile(with_cache.ttft, 0.9) * 1e3,
        ),
        ("throughput", "tokens/s", without.tokens / without.seconds, with_cache.tokens / with_cache.seconds),
    ]
    for name, unit, before, after in rows:
        table.add_row(f"{name} ({unit})", f"{before:,.1f}", f"{after:,.1f}", f"{after / before:.2f}")
    console = Console()
    console.print(table)
    hits = ", ".join(f"{tokens:,} {tier}" for tier, tokens in _hits(counters).items())
    console.print(f"prompt tokens looked up: {counters.lookup_tokens:,}; found: {hits}")
    console.print(
        f"tokens equal: {agreement.compared - agreement.near_ties - len(agreement.differences):,} "
        f"of {agreement.compared:,}; near ties: {agreement.near_ties}"
    )
    for difference in agreement.differences:
        console.print(f"[red]{difference}[/red]")


def plot(without: Run, with_cache: Run, counters: Counters, path: Path) -> None:
    """Plot TTFT over prompt length for both runs, and the tokens found by tier."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 1), layout="constrained")
    lengths = [len(task.prompt.tokens) for task in without.tasks]
    for run, label, colour in (
        (without, "without fdcache", "#b0463c"),
        (with_cache, "with fdcache", "#2d6a8e"),
    ):
        left.scatter(lengths, run.ttft * 1e3, s=22, label=label, color=colour, alpha=0.8)
    left.set_xlabel("prompt tokens")
    left.set_ylabel("time to first token (ms)")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    bottom = 0
    computed = counters.lookup_tokens - sum(_hits(counters).values())
    colours = ("#2d6a8e", "#7fb069", "#c9a227", "#c8c8c8")
    for (tier, tokens), colour in zip(
        (*_hits(counters).items(), ("computed", computed)), colours, strict=True
    ):
        right.bar(["prompt tokens"], [tokens], bottom=[bottom], label=tier, color=colour)
        bottom += tokens
    right.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _hits(counters: Counters) -> dict[str, int]:
    return {
        "device": counters.device_hit_tokens,
        "host": counters.host_hit_tokens,
        "storage": counters.storage_hit_tokens,
    }
