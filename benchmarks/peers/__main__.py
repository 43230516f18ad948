"""Measure fdcache beside the cache managers of vLLM and SGLang, and beside a minimal list in C++, in one run.

Each peer is a process of its own, with an environment of its own (python -m benchmarks.peers.setup). They work in
turns, slice by slice, for several rounds; of each call the least time counts. The recorded conversation trace is
replayed, 32 requests in flight, in blocks of 64 tokens; generated chats where there is no trace. Exits 1 if a peer
fails or its hits cannot be right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from benchmarks.harness import find_trace, machine
from benchmarks.peers.environments import (
    NEEDS_A_GPU,
    PEERS,
    MissingError,
    Peer,
    command_of,
    default_home,
    version,
)
from benchmarks.peers.report import Figures, faults, tables, targets
from benchmarks.peers.rounds import (
    Cost,
    PeerProcess,
    Tick,
    WorkerError,
    fastest,
    in_turns,
    memory_of,
    started,
    ticks_of,
)
from benchmarks.peers.scenarios import BLOCK
from benchmarks.peers.traffic import record
from fdcache._core import hash_backends
from fdcache.errors import TraceError
from fdcache.replay.trace import read_trace
from fdcache.replay.workloads import WorkloadName, generate
from fdcache_cli.output import progress_bars

PARTS = ("memory", "replay", "large", "decode", "hit")
SMALL, LARGE = 20_000, 200_000
IN_FLIGHT = 32
TRACE = "conversation_trace.jsonl"


@dataclass(frozen=True)
class Effort:
    """How much is measured: requests, how many of them are a slice, and rounds of each part."""

    requests: int
    slice: int
    replays: int
    decodes: int
    hits: int


FULL, QUICK = Effort(6000, 250, 3, 20, 20), Effort(1000, 250, 2, 5, 5)


class Run:
    """The parts of a run, and their figures."""

    def __init__(self, processes: Sequence[PeerProcess], traffic: Path, effort: Effort) -> None:
        self.figures = Figures()
        self._processes = processes
        self._traffic = traffic
        self._effort = effort

    def slices(self, part: str) -> tuple[list[int], int]:
        """Return the slices of a part, and how often it is begun."""
        effort = self._effort
        if part == "decode":
            return [BLOCK] * effort.decodes, 1
        if part == "hit":
            return [2] * effort.hits, 1
        return [effort.slice] * -(-effort.requests // effort.slice), effort.replays

    def ticks(self, part: str) -> int:
        """Return the number of ticks of a part."""
        return len(self._processes) if part == "memory" else ticks_of(self._processes, *self.slices(part))

    def measure(self, part: str, tick: Tick) -> None:
        """Measure a part."""
        if part == "memory":
            for process in self._processes:
                self.figures.memory[process.peer.name] = memory_of(process, LARGE)
                tick()
        elif part == "decode":
            self._decode(tick)
        elif part == "hit":
            self._hit(tick)
        else:
            self._replay(SMALL if part == "replay" else LARGE, *self.slices(part), tick)

    def _replay(self, blocks: int, slices: list[int], rounds: int, tick: Tick) -> None:
        settings = {"traffic": str(self._traffic), "blocks": blocks, "in_flight": IN_FLIGHT}
        found = in_turns(self._processes, "replay", settings, slices, rounds, tick)
        self.figures.replays[blocks] = {
            peer: sum(map(fastest, zip(*measured, strict=True)), Cost()) for peer, measured in found.items()
        }

    def _decode(self, tick: Tick) -> None:
        slices, rounds = self.slices("decode")
        found = in_turns(
            self._processes, "decode", {"blocks": SMALL, "steps": sum(slices)}, slices, rounds, tick
        )
        for peer, (equal,) in found.items():
            self.figures.steps[peer] = fastest(equal).ns["decode"] / 1000 / BLOCK

    def _hit(self, tick: Tick) -> None:
        slices, rounds = self.slices("hit")
        found = in_turns(self._processes, "hit", {"blocks": SMALL}, slices, rounds, tick)
        self.figures.hits.update({peer: fastest(equal) for peer, (equal,) in found.items()})


def measure(
    peers: Sequence[Peer], parts: Sequence[str], effort: Effort, home: Path, traffic: Path
) -> Figures:
    """Measure the given parts of the given peers."""
    logs = home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with started(peers, home, logs) as processes, progress_bars() as advance:
        run = Run(processes, traffic, effort)
        for part in parts:
            steps, ticks = itertools.count(1), run.ticks(part)
            if advance is None:
                print(f"{part}: {ticks} slices", file=sys.stderr)

            def tick(part: str = part, steps: itertools.count[int] = steps, ticks: int = ticks) -> None:
                if advance is not None:
                    advance(part, next(steps), ticks)

            run.measure(part, tick)
    return run.figures


def runnable(names: Sequence[str] | None, home: Path) -> list[Peer]:
    """Return the peers of these names; without names those that can run, and say on standard error what the rest need.

    Raises ``MissingError`` if one that was named cannot run.
    """
    found = []
    for peer in PEERS if names is None else [one for one in PEERS if one.name in names]:
        try:
            command_of(peer, home)
        except MissingError as error:
            if names is not None:
                raise
            print(f"{peer.name} is not measured: {error}", file=sys.stderr)
        else:
            found.append(peer)
    return found


def write_traffic(trace: Path | None, requests: int, folder: Path) -> str:
    """Write the requests of a trace, or of generated chats, to a folder; return what they are.

    Raises ``TraceError`` for a trace that cannot be read or has no requests.
    """
    if trace is None:
        count = record(generate(WorkloadName.CHAT, requests, 0), folder)
        return f"{count:,} requests of generated chats (there is no shared/traces/{TRACE} beside the tree)"
    count = record(read_trace(trace, requests), folder)
    return f"{count:,} requests of {trace.name}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure; default all")
    parser.add_argument("--peers", nargs="+", choices=names, help="default: all that can run")
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests and one round; the ratios are rough"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"of the replays; default {FULL.replays}: more for a busy machine",
    )
    parser.add_argument(
        "--trace", type=Path, help="a trace in Mooncake's format; default: shared/traces beside the tree"
    )
    parser.add_argument(
        "--home", type=Path, default=default_home(), help="environments; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of tables")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 if a peer fails or a figure cannot be right, 2 if something is missing."""
    options = parse(arguments)
    effort = QUICK if options.quick else FULL
    effort = replace(effort, replays=options.rounds or effort.replays)
    load = os.getloadavg()[0]
    try:
        peers = runnable(options.peers, options.home)
        parts = [part for part in PARTS if part in (options.only or PARTS)]
        with tempfile.TemporaryDirectory() as folder:
            workload = write_traffic(options.trace or find_trace(), effort.requests, Path(folder))
            figures = measure(peers, parts, effort, options.home, Path(folder))
    except (MissingError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    aims = targets(figures, SMALL, LARGE)
    wrong = list(faults(figures))
    versions = {peer.adapter: number for peer in peers if (number := version(peer))}
    if options.json:
        head = {"machine": machine(), "load": load, "date": date.today().isoformat(), "workload": workload}
        head |= {"instructions": hash_backends()}
        ratios = [{**vars(aim), "is_met": aim.is_met} for aim in aims]
        rest = {"targets": ratios, "needs_a_gpu": NEEDS_A_GPU, "faults": wrong}
        print(json.dumps({**head, "versions": versions, **figures.as_json(), **rest}, indent=2))
    else:
        print(f"{machine()}, load {load:.1f}, {date.today().isoformat()}")
        ours = f"fdcache with {' or '.join(hash_backends())} for hashes"
        print(", ".join([ours, *(f"{name} {number}" for name, number in versions.items())]))
        print(f"{workload}, blocks of {BLOCK} tokens, {IN_FLIGHT} in flight, {effort.replays} rounds\n")
        for text in tables(figures, aims):
            print(f"{text}\n")
        print("Not measured, for want of a GPU: " + "; ".join(NEEDS_A_GPU) + ".")
    for fault in wrong:
        print(f"wrong: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
