"""``fdcache replay --nodes``: services and engines of several nodes, and their report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import typer
from rich.console import Console
from rich.table import Table

from fdcache.replay.config import ReplayConfig
from fdcache.replay.faults import parse_faults
from fdcache.replay.nodes.cluster import NodeFault, NodesConfig
from fdcache.replay.nodes.engine_process import Totals
from fdcache.replay.nodes.routing import Route
from fdcache.replay.nodes.run import NodesReport, replay_nodes
from fdcache.replay.workloads import WorkItem
from fdcache.settings import Settings, Source
from fdcache.storage.objects.variables import ObjectSettings
from fdcache_cli import errors

_OTHERS = ("sweep", "optimum", "hints", "jobs", "plot", "page", "storage", "server", "speed", "pd", "device")


def refuse_with_nodes(context: typer.Context) -> None:
    """Refuse options that a replay of several nodes does not have."""
    for name in _OTHERS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter("a replay of --nodes does not have it", param_hint=f"--{name}")


def run_nodes(
    items: Iterator[WorkItem],
    config: ReplayConfig,
    settings: Settings,
    nodes: int,
    faults: str | None,
    route: Route,
    *,
    json_output: bool,
    should_stop: Callable[[], bool],
) -> int:
    """Run a replay of several nodes, print its report, and return the exit status."""
    planned = _planned(config, settings, nodes, route)
    if faults:
        planned = replace(planned, faults=parse_faults(faults, tuple(NodeFault), planned.random_faults))
    report = replay_nodes(items, planned, should_stop=should_stop)
    if json_output:
        sys.stdout.write(json.dumps(report.to_dict()) + "\n")
    else:
        print_report(report)
    if report.totals.rejected and not report.totals.finished:
        blocks, tokens = config.cache.device_blocks, config.layout.block_size
        sys.stderr.write(
            f"error: each of the {report.totals.rejected} requests is larger than the device tier, {blocks} blocks of "
            f"{tokens} tokens; raise --device-blocks (FDCACHE_DEVICE_BLOCKS)\n"
        )
        return errors.FAILED
    if not report.clean:
        return errors.FAILED
    return errors.INTERRUPTED if report.interrupted else 0


def _planned(config: ReplayConfig, settings: Settings, nodes: int, route: Route) -> NodesConfig:
    tier = config.storage
    way = "nodes" if settings.source("FDCACHE_STORAGE") is Source.DEFAULT else tier.connector.lower()
    engine = replace(config, storage=tier.model_copy(update={"connector": "none"}), storage_options=None)
    given = settings.source("FDCACHE_STORAGE_DIR") is not Source.DEFAULT
    return NodesConfig(
        engine,
        nodes,
        way,
        {
            "FDCACHE_HOST_MEMORY": str(config.cache.host_memory),
            "FDCACHE_EVICTION": config.cache.eviction.value,
            "FDCACHE_STORAGE_SIZE": str(tier.size),
        },
        tier.directory if way == "shared" and given else None,
        settings.group(ObjectSettings) if way == "object" else None,
        settings.server.arena_dir,
        route=route,
    )


def print_report(report: NodesReport) -> None:
    """Print the report as a table."""
    table = Table(
        title=f"fdcache replay --nodes {report.nodes}" + (" (interrupted)" if report.interrupted else ""),
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column()
    totals = report.totals
    rows = {
        "way": f"{report.way}, {'network namespaces' if report.isolated else 'addresses of the loopback'}",
        "route": report.route,
        "requests": f"{report.requests}, {totals.finished} finished, {totals.rejected} too large, "
        f"{report.again} given to an engine again",
        "prompt tokens": f"{totals.prompt_tokens:,}",
        "found": f"{report.hit_rate:.2%}, {_share(totals):.2%} by what nodes share",
        "by node": ", ".join(f"{_rate(each):.1%}" for each in report.by_node),
        "compared": f"{totals.compared_blocks:,} blocks, {totals.wrong_blocks:,} wrong",
        "longest wait": f"{totals.longest_wait:.2f} s"
        + ("" if report.wait_limit is None else f" of at most {report.wait_limit:g} s"),
        "failed loads": f"{totals.failed_loads:,}",
        "faults": ", ".join(f"{name} {count}" for name, count in sorted(report.faults.items()))
        + ("" if sum(report.faults.values()) == report.planned else f" of {report.planned} planned"),
        "left at the end": str(report.left or "nothing"),
        "time": f"{report.wall_seconds:.1f} s",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    Console().print(table)
    for kind, found in (("error", report.broken), ("note", report.errors)):
        for each in found:
            sys.stderr.write(f"{kind}: {each}\n")


def _rate(totals: Totals) -> float:
    return totals.hit_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0


def _share(totals: Totals) -> float:
    return totals.storage_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
