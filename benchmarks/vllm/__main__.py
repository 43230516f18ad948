"""Measure vLLM's engine with no connector, with its own, with LMCache and with fdcache, in one run.

Each engine is a process of its own with the same arguments, and one at a time is measured; their order rotates, and
the engine without a connector comes first and last. Every result is appended to a file as soon as it is there, so that
a run that is cut keeps what it has. Exits 1 if an engine gave wrong tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.vllm import engines, report
from benchmarks.vllm.agents import Play, find_trace
from benchmarks.vllm.comparisons import compare_tokens
from benchmarks.vllm.engines import BESIDE, CONTROLS, GIB, NONE, RESTARTED, Places, StartError
from benchmarks.vllm.meeting import Meeting
from benchmarks.vllm.processes import ROOT, CutError, JobError, Process, Processes, variables
from benchmarks.vllm.shapes import LOADS, SHAPES, Shape, model_folder
from benchmarks.vllm.worker import Job

LOADED = ("chat", "single", "beside", "unique")
PARTS = (*LOADED, "agents", "restart", "tokens")
RANDOM = {"cuda": "random", "cpu": "tiny-random"}


class Run:
    """A run: starts engines, measures them one after the other and keeps what they measure."""

    def __init__(self, options: argparse.Namespace, processes: Processes, places: Places) -> None:
        self.options = options
        self.processes = processes
        self.places = places
        self.meeting = Meeting(options.meet or places.folder / "meeting", options.runs, self._left_s)
        self.records: list[dict[str, Any]] = []
        self._begin = time.monotonic()
        self._least_start_s = 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Write a record to the file, and a line of it to standard output."""
        record |= {"at_s": round(time.monotonic() - self._begin, 1)}
        self.records.append(record)
        with self.options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{record['at_s']:7.1f} s  {report.line(record)}", flush=True)

    def _left_s(self) -> float | None:
        return self.processes.left_s

    def _turn(self) -> AbstractContextManager[None]:
        return self.meeting.turn() if self.options.turns else nullcontext()

    @contextmanager
    def started(
        self, shape: Shape, names: Sequence[str], places: Places | None = None, warm_up: bool = True
    ) -> Iterator[dict[str, Process]]:
        """Start engines at the same time; yield those that are ready. One that fails is reported and left out.

        Runs that meet start theirs at the same time, and begin to measure when all are ready, or take turns then.
        """
        options, places = self.options, places or self.places
        left = self.processes.left_s
        if left is not None and left <= self._least_start_s:
            raise CutError
        model = model_folder(shape, options.home)
        arguments = engines.arguments(
            shape, model, device=options.device, eager=options.eager, compiled=options.compile
        )
        self.meeting.arrive()
        with ExitStack() as stack:
            begun = {}
            for name in names:
                engine = engines.make(name, places, has_states=shape.states is not None)
                job = Job(shape.name, options.scale, arguments, engine.connector, warm_up, len(names) == 1)
                environment = engines.environment(options.device, options.home) | engine.environment
                try:
                    if name == "fdcache-service":
                        log = self.processes.logs / f"{shape.name}-service.log"
                        stack.enter_context(engines.service(places, log, dict(os.environ)))
                    start = self.processes.started(f"{shape.name}-{name}", job, environment)
                    begun[name] = stack.enter_context(start)
                except StartError as error:
                    self.add({"shape": shape.name, "engine": name, "part": "skipped", "why": str(error)})
            ready = {}
            for name, process in begun.items():
                found = self._collect(shape, name, process.results("start", options.start_limit))
                for record in found:
                    self._least_start_s = min(self._least_start_s or 1e9, record["engine_s"])
                    ready[name] = process
            self.meeting.arrive()
            with self._turn():
                yield ready

    def order(self, shape: Shape, name: str, process: Process, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Have an engine carry out an order; return what it measured."""
        return self._collect(shape, name, process.order(order))

    def _collect(self, shape: Shape, name: str, results: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        head, found = {"shape": shape.name, "engine": name}, []
        try:
            for record in results:
                self.add(head | record)
                found.append(record)
        except JobError as error:
            self.add(head | {"part": "skipped", "why": str(error)})
        return found

    def measure(self, shape: Shape, names: Sequence[str], parts: Sequence[str]) -> None:
        """Start engines at the same time and measure them one after the other, while the others wait."""
        with self.started(shape, names) as ready:
            for name, process in ready.items():
                self.order(shape, name, process, {"parts": list(parts)})
                process.end()

    def agents(self, shape: Shape, names: Sequence[str], play: Play) -> None:
        """Have users play the sessions of a trace, with host tiers of shares of what is different in them."""
        for index, share in enumerate(self.options.shares):
            places = replace(self.places, host_bytes=play.host_bytes(share))
            chosen = [name for name in names if name != NONE or not index]
            for wave in waves(chosen, self.options.together):
                with self.started(play.shape, wave, places) as ready:
                    for name, process in ready.items():
                        self.order(shape, name, process, play.order(None if name == NONE else share))
                        process.end()

    def link(self, shape: Shape) -> None:
        """Measure the link between host and device with the bytes of a long prompt."""
        size = LOADS[self.options.scale].single_length * shape.token_bytes
        job = Job(shape.name, "", link_bytes=size)
        with self._turn(), self.processes.started(f"{shape.name}-link", job, {}) as process:
            for record in process.results():
                self.add({"shape": shape.name} | record)

    def restart(self, shape: Shape, names: Sequence[str]) -> None:
        """Fill the storage of engines, and read it in other processes, from the disk."""
        load = LOADS[self.options.scale]
        size = 2 * load.restart * load.single_length * shape.token_bytes
        places = replace(self.places, host_bytes=min(self.places.host_bytes, size))
        filled = []
        with self.started(shape, names, places) as ready:
            for name, process in ready.items():
                if self.order(shape, name, process, {"parts": ["fill"]}):
                    filled.append(name)
                process.leave(30)
        for name in filled:
            forget_pages(places.storage(name))
        with self.started(shape, filled, places) as ready:
            for name, process in ready.items():
                self.order(shape, name, process, {"parts": ["reread"]})
                process.end()


def forget_pages(folder: Path) -> None:
    """Have the kernel drop the pages of a folder's files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order(names: Sequence[str], rounds: int, rotation: int, once: bool = False) -> Iterator[str]:
    """Yield the engines of all rounds: the one without a connector first and last, the others rotated."""
    others = [name for name in names if name != NONE]
    if NONE in names:
        yield NONE
    for round_ in range(rounds):
        first = (rotation + round_) % max(len(others), 1)
        yield from (*others[first:], *others[:first])
    if NONE in names and others and not once:
        yield NONE


def waves(names: Sequence[str], sizes: Sequence[int]) -> Iterator[list[str]]:
    """Yield the engines that start at the same time: so many each time, the last size again and again.

    No engine is twice among them.
    """
    left = list(names)
    counts = itertools.chain(sizes, itertools.repeat(sizes[-1]))
    while left:
        wave = left[: next(counts)]
        wave = wave[: next((at for at, name in enumerate(wave) if name in wave[:at]), len(wave))]
        del left[: len(wave)]
        yield wave


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    names = (*BESIDE, *RESTARTED, *CONTROLS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--engines", nargs="+", choices=names, help="default: all that can run, without controls"
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="default: 8b 70b-tp8; tiny on a CPU")
    parser.add_argument("--scale", choices=LOADS, help="how much is asked; default full, small on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="full CUDA graphs without torch.compile"
    )
    parser.add_argument(
        "--together",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="start so many engines at the same time, to be measured one after the other: all must fit on the "
        "device and in host memory; several numbers: of the first, the second ... (default: 1)",
    )
    parser.add_argument(
        "--meet",
        type=Path,
        metavar="FOLDER",
        help="a new folder shared with runs on other devices: all start their engines at the same time, and none "
        "measures meanwhile",
    )
    parser.add_argument("--runs", type=int, default=1, help="number of runs that meet (default: 1)")
    parser.add_argument(
        "--turns", action="store_true", help="runs that meet share a device: they measure one after the other"
    )
    parser.add_argument(
        "--start-limit",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="leave out an engine that is not ready by then (default: 300)",
    )
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end by then, with what there is")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each engine")
    parser.add_argument("--rotate", type=int, default=0, metavar="N", help="begin with the Nth engine")
    parser.add_argument("--once", action="store_true", help="the engine without a connector comes first only")
    parser.add_argument(
        "--users", type=int, nargs="+", default=[8], metavar="N", help="agents at the same time (default: 8)"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 1.0],
        metavar="X",
        help="host tiers of agents, as shares of what is different in their prompts (default: 0.25 0.5 1)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        default=find_trace(ROOT),
        help="recorded sessions of agents in blocks of 64 tokens (default: those in shared/traces, if any)",
    )
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="default 64; 0.25 on a CPU")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of fdcache's engines"
    )
    parser.add_argument(
        "--python", help="interpreter with vLLM; default: this one, on a CPU that of the connector's tests"
    )
    parser.add_argument(
        "--home", type=Path, default=cache / "fdcache-vllm-bench", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, help="results, a line of JSON each; default: in --home")
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="FILE", help="print the tables of earlier runs, as one"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot times to first token")
    options = parser.parse_args(arguments)
    for setting in options.set:
        if "=" not in setting:
            parser.error(f"--set {setting}: give NAME=VALUE")
    on_cpu = options.device == "cpu"
    options.python = options.python or (str(cpu_interpreter()) if on_cpu else sys.executable)
    options.shape = options.shape or (["tiny"] if on_cpu else ["8b", "70b-tp8"])
    options.scale = options.scale or ("small" if on_cpu else "full")
    options.host_memory = options.host_memory or (0.25 if on_cpu else 64)
    options.home = options.home.resolve()
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    options.out = (options.out or options.home / "results" / f"{stamp}.jsonl").resolve()
    return options


def cpu_interpreter() -> Path:
    """Return the interpreter of the connector's tests, with the oldest version of vLLM that they use."""
    from tests.vllm.environments import VERSIONS, default_home, interpreter

    return interpreter(default_home(), VERSIONS[0])


def measure(run: Run, names: Sequence[str]) -> None:
    """Do the parts of a run; raise ``CutError`` if the time is over."""
    options = run.options
    parts = [part for part in LOADED if part in options.parts]
    chosen = [name for name in names if name not in RESTARTED]
    for shape in map(SHAPES.__getitem__, options.shape):
        if parts:
            run.link(shape)
            ordered = list(order(chosen, options.rounds, options.rotate, options.once))
            for wave in waves(ordered, options.together):
                run.measure(shape, wave, parts)
        for play in played(run, shape) if "agents" in options.parts else ():
            run.agents(shape, chosen, play)
        if "restart" in options.parts:
            run.restart(shape, [name for name in RESTARTED if name in names])
    if "tokens" in options.parts:
        latent = [bool(SHAPES[name].latent) for name in options.shape]
        for is_latent in sorted(set(latent)):
            compare_tokens(run, SHAPES["mla-random" if is_latent else RANDOM[options.device]], names)


def played(run: Run, shape: Shape) -> Iterator[Play]:
    """Yield what agents play at every number of users, or say that there is no trace of them."""
    trace = run.options.trace
    if trace is None or not trace.exists():
        why = f"agents: there is no trace {trace or '(shared/traces)'}; name one in --trace"
        run.add({"part": "skipped", "why": why})
        return
    for users in run.options.users:
        yield Play.of(shape, run.options.scale, trace, users)


def finish(records: list[dict[str, Any]], plot: Path | None) -> int:
    """Print tables and faults, and plot; return the exit status."""
    results = report.Results(records)
    for text in report.report(results):
        print(f"\n{text}")
    wrong = list(report.faults(results))
    for fault in wrong:
        print(f"wrong: {fault}", file=sys.stderr)
    if plot is not None:
        try:
            report.plot(results, plot)
        except ValueError as error:
            print(error, file=sys.stderr)
    return 1 if wrong else 0


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 for wrong tokens, 2 if something is missing."""
    options = parse(arguments)
    if options.report:
        lines = [line for path in options.report for line in path.read_text().splitlines()]
        return finish([json.loads(line) for line in lines], options.plot)
    # A run that is ended ends its engines.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options.home.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget if options.budget else None
    with tempfile.TemporaryDirectory(dir=options.home) as folder:
        settings = dict(setting.split("=", 1) for setting in options.set)
        places = Places(Path(folder), int(options.host_memory * GIB), settings)
        logs = options.out.with_suffix(".logs")
        processes = Processes(
            options.python, Path(folder), logs, deadline, variables(Path(folder), options.device)
        )
        try:
            needs = engines.probe(options.python, processes.variables, Path(folder), options.device)
        except StartError as error:
            print(error, file=sys.stderr)
            return 2
        if needs[NONE]:
            print(
                f"{options.python}: {needs[NONE]}; name an interpreter with vLLM in --python", file=sys.stderr
            )
            return 2
        wanted = options.engines or (*BESIDE, *RESTARTED)
        names = [name for name in wanted if not needs[name]]
        run = Run(options, processes, places)
        run.add({"part": "machine", "machine": machine(), "date": f"{datetime.now():%Y-%m-%d %H:%M}"})
        for name in wanted:
            if needs[name]:
                run.add({"engine": name, "part": "skipped", "why": needs[name]})
        try:
            measure(run, names)
        except CutError:
            print("the time is over; these are the results so far", file=sys.stderr)
        finally:
            run.meeting.leave()
        status = finish(run.records, options.plot)
    print(f"\nresults: {options.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
