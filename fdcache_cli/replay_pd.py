"""``fdcache replay --pd``: a prefill and a decode process, and their report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping

import typer
from rich.console import Console
from rich.table import Table

from fdcache.replay.config import ReplayConfig
from fdcache.replay.faults import parse_faults
from fdcache.replay.pd import RANDOM_FAULTS, FaultKind, PdConfig, PdReport, parse_ranks, replay_pd
from fdcache.replay.workloads import WorkItem
from fdcache.settings.peers import PeerSettings
from fdcache_cli import errors

_OTHERS = (
    "sweep",
    "optimum",
    "hints",
    "policies",
    "jobs",
    "plot",
    "storage",
    "storage_size",
    "server",
    "groups",
    "ranks",
    "speed",
)
_ALONE = ("verify", "load_failures")


def require_pd(pd: bool, options: Mapping[str, object]) -> None:
    """Refuse options that only a --pd has."""
    for name, value in options.items():
        if value is not None and not pd:
            raise typer.BadParameter("only a --pd has it", param_hint=name)


def refuse_with_pd(context: typer.Context) -> None:
    """Refuse options that a --pd does not have."""
    for name in (*_OTHERS, *_ALONE):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter("a --pd does not have it", param_hint=f"--{name.replace('_', '-')}")


def run_and_print(
    items: Iterator[WorkItem],
    config: ReplayConfig,
    peers: PeerSettings,
    faults: str | None,
    ranks: str | None,
    *,
    json_output: bool,
    should_stop: Callable[[], bool],
) -> int:
    """Run a replay of prefill and decode, print its report, and return the exit status."""
    pd = PdConfig(
        layout=config.layout,
        cache=config.cache,
        transfer=config.transfer,
        peers=peers,
        concurrency=config.concurrency,
        chunk_tokens=config.chunk_tokens,
        seed=config.seed,
        faults=parse_faults(faults, tuple(FaultKind), RANDOM_FAULTS) if faults else {},
        ranks=parse_ranks(ranks) if ranks else None,
        device=config.device,
    )
    report = replay_pd(items, pd, should_stop=should_stop)
    if json_output:
        sys.stdout.write(json.dumps(report.to_dict()) + "\n")
    else:
        print_report(report)
    if report.rejected and not report.requests:
        blocks, tokens = config.cache.device_blocks, config.layout.block_size
        sys.stderr.write(
            f"error: each of the {report.rejected} prompts is larger than half of the device tier, {blocks} blocks of "
            f"{tokens} tokens; raise --device-blocks (FDCACHE_DEVICE_BLOCKS)\n"
        )
        return errors.FAILED
    if not report.clean:
        return errors.FAILED
    return errors.INTERRUPTED if report.interrupted else 0


def print_report(report: PdReport) -> None:
    """Print the report as a table."""
    table = Table(
        title="fdcache replay --pd" + (" (interrupted)" if report.interrupted else ""), show_header=False
    )
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "requests": f"{report.requests}, {report.finished} finished, {report.aborted} aborted, "
        f"{report.rejected} too large",
        "prompt tokens": f"{report.prompt_tokens:,}, {report.decode_computed_tokens:,} of them computed by decode",
        "blocks asked for": f"{report.fetched_blocks:,}",
        "compared by decode": f"{report.compared_blocks:,} blocks, {report.wrong_blocks:,} wrong",
        "hand-overs": _listed(report.transfers),
        "faults": _listed(report.faults),
        "left at the end": _listed(+report.left) or "nothing",
        "time": f"{report.wall_seconds:.1f} s",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    Console().print(table)
    for role, found in report.errors.items():
        for error in found:
            sys.stderr.write(f"note: {role}: {error}\n")


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
