"""``fdcache replay --sweep``: its progress bar, table, JSON and picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import takewhile
from pathlib import Path

import typer

from fdcache.errors import TraceError
from fdcache.replay.capacities import Axis
from fdcache.replay.parallel import PointFailure
from fdcache.replay.points import PointResult
from fdcache.replay.sweep import Sweep, SweepConfig, SweepPoint, run_sweep
from fdcache.replay.sweep_plot import write_sweep_plot
from fdcache.replay.workloads import WorkItem
from fdcache.settings.cache import EvictionPolicy
from fdcache.settings.kinds import readable_size
from fdcache_cli import errors
from fdcache_cli.output import print_line, print_table, progress_bars

_WITHOUT_PART = (
    "storage",
    "storage_size",
    "server",
    "groups",
    "chunk_tokens",
    "speed",
    "page",
    "device",
    "load_failures",
)
"""Parameters of the command that a sweep has no use for."""


def refuse_options(context: typer.Context, sweep: str | None) -> None:
    """Raise ``BadParameter`` for an option that contradicts ``--sweep``, or needs it."""
    axis = None if sweep is None else sweep.partition("=")[0].replace("-", "_")
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        option = f"--{name.replace('_', '-')}"
        if sweep is None and name in ("optimum", "jobs"):
            raise typer.BadParameter("only a --sweep has it", param_hint=option)
        if sweep is not None and name in _WITHOUT_PART:
            raise typer.BadParameter("a sweep has no use for it; leave it out", param_hint=option)
        if name == axis:
            raise typer.BadParameter("--sweep gives its values; leave it out", param_hint=option)


def parse_policies(text: str | None) -> tuple[EvictionPolicy, ...]:
    """Return the policies of ``--eviction``, without repetition. Raises ``BadParameter`` for an unknown one."""
    if text is None:
        return ()
    known = [policy.value for policy in EvictionPolicy]
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--eviction")
    return tuple(EvictionPolicy(name) for name in names)


def sweep_and_print(
    items: Iterable[WorkItem],
    config: SweepConfig,
    *,
    json_output: bool,
    plot: Path | None,
    should_stop: Callable[[], bool],
) -> int:
    """Run a sweep, print it, and return the exit status. Raises ``TraceError`` for a workload without requests."""
    requests = list(takewhile(lambda _: not should_stop(), items))
    if not requests and not should_stop():
        raise TraceError("there is no request to replay")
    with nullcontext() if json_output else progress_bars() as advance:
        progress = advance or (lambda name, done, total: None)
        sweep = run_sweep(requests, config, on_progress=progress, should_stop=should_stop)
    if json_output:
        print_line(json.dumps(sweep.to_dict()))
    else:
        print_sweep(sweep)
    for point, reason in sweep.failures:
        sys.stderr.write(f"error: {point}: {reason}\n")
    if plot is not None:
        write_sweep_plot(sweep, plot)
    if not sweep.clean:
        return errors.FAILED
    return errors.INTERRUPTED if sweep.interrupted else 0


def print_sweep(sweep: Sweep) -> None:
    """Print a table: a row for each capacity, hit rates and, with the optimum, the share of the gap closed."""
    policies = [policy.value for policy in sweep.config.policies]
    has_gap = sweep.config.optimum and EvictionPolicy.LRU in policies
    compared = [name for name in policies if has_gap and name != EvictionPolicy.LRU]
    tier = "device" if sweep.config.capacities.axis is Axis.DEVICE_BLOCKS else "host"
    header = [f"{tier} memory", "blocks", *policies]
    if sweep.config.optimum:
        header += ["optimum", *(f"gap closed by {name}" for name in compared)]
    rejects = any(_rejected(point) for point in sweep.points)
    rows = [_row(point, policies, compared, sweep.config.optimum) for point in sweep.points]
    if rejects:
        header.append("rejected requests")
        rows = [[*row, f"{_rejected(point):,}"] for row, point in zip(rows, sweep.points, strict=True)]
    print_table(header, rows)
    results = [result for point in sweep.points for result in point.policies.values()]
    verified = sum(result.verified_blocks for result in results if isinstance(result, PointResult))
    if verified:
        corrupt = sum(result.corrupt_blocks for result in results if isinstance(result, PointResult))
        print_line(f"{verified:,} reused blocks compared, {corrupt:,} corrupt")
    if sweep.interrupted:
        print_line("interrupted: a dash is a point that was not run")


def _row(point: SweepPoint, policies: Sequence[str], compared: Sequence[str], optimum: bool) -> list[str]:
    row = [readable_size(point.memory), f"{point.blocks:,}"]
    row += [
        "failed" if isinstance(point.policies.get(name), PointFailure) else _percent(point.hit_rate(name))
        for name in policies
    ]
    if optimum:
        row += [_percent(point.optimum), *(_percent(point.gap_closed(name)) for name in compared)]
    return row


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _rejected(point: SweepPoint) -> int:
    results = (result for result in point.policies.values() if isinstance(result, PointResult))
    return max((result.rejected for result in results), default=0)
