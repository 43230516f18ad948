"""A plug-in of vLLM that adds up the CPU time of its scheduler's steps and of the connector's hooks on the worker.

vLLM loads it in every process of the engine (``vllm.general_plugins``), because the driver puts a distribution that
names it on PYTHONPATH. Each process keeps its sums in a small file of its own in the folder that
``BENCHMARK_TIMES`` names; the driver reads them while the engine runs. CPU time of the thread counts, not elapsed
time: waiting for a GPU or for another process is not work.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

FOLDER = "BENCHMARK_TIMES"
HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""Hooks of a connector on the worker; those of the scheduler's side are part of its steps."""


TRACED: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("arrival", lambda nothing: True),
    ("match", lambda found: found[0]),
    ("submit", lambda nothing: True),
    ("report", lambda found: found[1]),
)
"""Names of what is traced, and with which results of the hook."""


def hook_of(name: str, connector: type[Any], base: type[Any]) -> str:
    """Return the hook that is traced by a name: copies are submitted with the metadata, or before the forward pass."""
    if name == "submit":
        early = "bind_connector_metadata"
        return early if getattr(connector, early) is not getattr(base, early) else "start_load_kv"
    return {"arrival": "on_new_request", "match": "get_num_new_matched_tokens", "report": "get_finished"}[
        name
    ]


@dataclass(frozen=True)
class Times:
    """Steps that computed tokens, and nanoseconds of CPU time: of all of the scheduler, and of the worker's hooks."""

    steps: int = 0
    schedule_ns: int = 0
    update_ns: int = 0
    hooks_ns: int = 0

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __sub__(self, other: Times) -> Times:
        return Times(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    @property
    def us_per_step(self) -> float:
        """Microseconds of scheduler and hooks for each step."""
        return (self.schedule_ns + self.update_ns + self.hooks_ns) / 1000 / max(self.steps, 1)


NAMES = tuple(field.name for field in fields(Times))
FORMAT = struct.Struct(f"<{len(NAMES)}q")


class Sums:
    """The sums of this process, in a file; a process made by fork begins a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = 0
        self._values = [0] * len(NAMES)
        self._view: mmap.mmap | None = None

    def add(self, name: str, amount: int) -> None:
        """Add to one of the sums."""
        if self._process != os.getpid():
            self._open()
        self._values[NAMES.index(name)] += amount
        assert self._view is not None
        FORMAT.pack_into(self._view, 0, *self._values)

    def _open(self) -> None:
        self._process = os.getpid()
        self._values = [0] * len(NAMES)
        path = self._folder / f"{self._process}.times"
        path.write_bytes(bytes(FORMAT.size))
        with path.open("r+b") as file:
            self._view = mmap.mmap(file.fileno(), FORMAT.size)


Event = tuple[str, float, float]
"""Its name, and when it began and ended: seconds of ``time.perf_counter``, which all processes share."""

TRACING = "tracing"
PHASES = ("arrival", "to match", "match to submit", "copy and report", "to step", "step")
"""From the request until the connector has been told of it, to its match, to its copies' submission, to the worker's
report that they have ended, to the step that has the request's last tokens, and to the first token."""


class Trace:
    """The events of this process, in a file, while the driver wants them."""

    def __init__(self, folder: Path) -> None:
        self._flag = folder / TRACING
        self._folder = folder
        self.is_wanted = False

    def renew(self) -> None:
        """Look if the driver wants events."""
        self.is_wanted = self._flag.exists()

    def add(self, name: str, begin: float) -> None:
        """Write an event that has just ended."""
        self.write("trace", (name, begin, time.perf_counter()))

    def write(self, kind: str, values: Sequence[Any]) -> None:
        """Write a line to the file of a kind."""
        with (self._folder / f"{os.getpid()}.{kind}").open("a") as file:
            file.write(json.dumps(values) + "\n")


def events(folder: Path) -> list[Event]:
    """Return the events of all processes in the order of their ends."""
    lines = [line for path in folder.glob("*.trace") for line in path.read_text().splitlines()]
    return sorted((tuple(json.loads(line)) for line in lines), key=lambda event: event[2])


def phases(found: Iterable[Event], sent: float, came: float) -> dict[str, float]:
    """Return the milliseconds of each phase of a request that was alone; those it did not have are missing."""
    mine = [event for event in found if sent <= event[1] and event[2] <= came]

    def first(name: str, after: float) -> Event | None:
        return next((event for event in mine if event[0] == name and event[2] >= after), None)

    times: dict[str, float] = {}
    at = sent
    for phase, name in zip(PHASES, ("arrival", "match", "submit", "report", "step"), strict=False):
        if (event := first(name, at)) is not None:
            _, begin, end = event
            until = begin if name == "match" else end
            times[phase] = (until - at) * 1000
            at = until
    times[PHASES[-1]] = (came - at) * 1000
    return times


def traced(
    function: Callable[..., Any], trace: Trace, name: str, counts: Callable[[Any], Any], renews: bool = False
) -> Callable[..., Any]:
    """Return the function, written down each time its result counts; with ``renews`` it looks if that is wanted."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if renews:
            trace.renew()
        if not trace.is_wanted:
            return function(*arguments, **named)
        begin = time.perf_counter()
        result = function(*arguments, **named)
        if counts(result):
            trace.add(name, begin)
        return result

    return call


def read(folder: Path) -> Times:
    """Return the sums of all processes."""
    found = [Times(*FORMAT.unpack(path.read_bytes())) for path in folder.glob("*.times")]
    return sum(found, Times())


def timed(function: Callable[..., Any], sums: Sums, name: str) -> Callable[..., Any]:
    """Return the function, its CPU time added to a sum."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        begin = time.thread_time_ns()
        try:
            return function(*arguments, **named)
        finally:
            sums.add(name, time.thread_time_ns() - begin)

    return call


def install() -> None:
    """Time vLLM's scheduler and every connector of a worker; nothing where the driver asked for no times."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
    from vllm.v1.core.sched.scheduler import Scheduler

    from benchmarks.vllm import timeline

    sums, trace = Sums(Path(folder)), Trace(Path(folder))
    schedule = timed(Scheduler.schedule, sums, "schedule_ns")
    create = KVConnectorFactory.create_connector

    @functools.wraps(schedule)
    def counted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        if output.total_num_scheduled_tokens:
            sums.add("steps", 1)
        return output

    def create_timed(*arguments: Any, **named: Any) -> Any:
        connector = create(*arguments, **named)
        if connector.role is KVConnectorRole.WORKER:
            for hook in HOOKS:
                setattr(connector, hook, timed(getattr(connector, hook), sums, "hooks_ns"))
        for name, counts in TRACED:
            hook = hook_of(name, type(connector), KVConnectorBase_V1)
            found = traced(getattr(connector, hook), trace, name, counts, renews=name == "submit")
            setattr(connector, hook, found)
        return connector

    Scheduler.schedule = traced(
        counted, trace, "step", lambda output: output.total_num_scheduled_tokens, renews=True
    )
    Scheduler.update_from_output = timed(Scheduler.update_from_output, sums, "update_ns")
    KVConnectorFactory.create_connector = create_timed
    timeline.install(trace)


def write_distribution(folder: Path, name: str, group: str, entry: str) -> None:
    """Write a distribution with one entry point; with ``folder`` on PYTHONPATH vLLM finds it."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {entry}\n")
