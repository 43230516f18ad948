"""Progress and report of ``fdcache replay``: a bar on standard error, and a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fdcache.replay.report import MANAGER_CALLS, Report
from fdcache.replay.statistics import CopyTraffic, Tally
from fdcache.settings.kinds import readable_size

_REFRESH_SECONDS = 0.1


@contextmanager
def progress_bar(total: int | None) -> Iterator[Callable[[Tally], None] | None]:
    """Yield a function that draws the counts so far; None when standard error is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("hit rate {task.fields[hit_rate]:.1%}  corrupt {task.fields[corrupt]}"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
    task = bar.add_task("replay", total=total, hit_rate=0.0, corrupt=0)
    due = 0.0

    def advance(tally: Tally) -> None:
        nonlocal due
        if (now := time.monotonic()) < due:
            return
        if not due:
            bar.start()  # not earlier: storage being opened has its own bar
        due = now + _REFRESH_SECONDS
        ended = tally.finished + tally.rejected
        bar.update(task, completed=ended, hit_rate=tally.hit_rate, corrupt=tally.corrupt_blocks)
        bar.refresh()

    try:
        yield advance
    finally:
        bar.stop()


def print_report(report: Report) -> None:
    """Print the report as a table."""
    tally = report.tally
    table = Table(
        title="fdcache replay" + (" (interrupted)" if report.interrupted else ""), show_header=False
    )
    table.add_column(style="bold")
    table.add_column()
    rows = {
        "requests": f"{tally.requests}, {tally.finished} finished, {tally.rejected} rejected (larger than the pool)",
        "prompt tokens": f"{tally.prompt_tokens:,}",
        "found in the cache": f"{tally.hit_rate:.1%}: "
        + ", ".join(f"{tier} {tokens:,}" for tier, tokens in tally.hit_tokens.items()),
        "blocks compared": f"{tally.verified_blocks:,}",
        "corrupt blocks": _colored(tally.corrupt_blocks),
        "leaked": f"{_colored(report.leaked_slots)} slots, {_colored(report.leaked_pins)} pins",
        "invariants": "[green]hold[/]"
        if report.integrity_error is None
        else f"[red]{report.integrity_error}[/]",
        "preemptions": f"{tally.preemptions:,}",
        "evictions": f"device {report.evictions:,}, host {report.host_evictions:,}",
        "loads that failed": f"{tally.failed_loads:,} ({tally.recomputed_tokens:,} tokens recomputed)",
        "host to device": _traffic(tally.h2d),
        "device to host": _traffic(tally.d2h),
        **_storage_rows(report),
        "manager, us per request": _calls(report),
        "time": f"{report.wall_seconds:.1f} s, {tally.steps:,} steps",
        "peak memory": readable_size(report.peak_rss_bytes),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


def _storage_rows(report: Report) -> dict[str, str]:
    storage = report.to_dict()["storage"]
    if storage is None:
        return {}
    tally = report.tally
    return {
        "storage": f"{storage['connector']}, {', '.join(storage['states'])}; {storage['restored_blocks']:,} blocks "
        f"from earlier, {storage['stored']:,} stored, {storage['hits']:,} read, {storage['corrupt']:,} refused",
        "from and to storage": f"{_traffic(tally.from_storage)}, {_traffic(tally.to_storage)}",
    }


def _colored(count: int) -> str:
    return f"[green]{count}[/]" if count == 0 else f"[red]{count:,}[/]"


def _traffic(traffic: CopyTraffic) -> str:
    speed = f" ({traffic.bytes / traffic.seconds / 1e9:.1f} GB/s while copying)" if traffic.seconds else ""
    return readable_size(traffic.bytes) + speed


def _calls(report: Report) -> str:
    calls = ((name, report.manager_us[name]) for name in MANAGER_CALLS)
    times = (f"{name} {us['p50']:.1f} ({us['p99']:.1f})" for name, us in calls)
    return "p50 (p99): " + ", ".join(times)
