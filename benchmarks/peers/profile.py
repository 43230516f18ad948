"""Show where one scenario's time goes in one peer of this environment: each phase's calls, then Python's functions.

    python -m benchmarks.peers.profile decode [--peer fdcache-list] [--functions 20]

Times of phases are measured without the profiler, in microseconds of a call. Native code counts for the Python function
that calls it; the profiler makes calls of Python functions slower than they are.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import find_trace, machine
from benchmarks.peers.__main__ import IN_FLIGHT, SMALL, write_traffic
from benchmarks.peers.environments import PEERS, MissingError, Peer, command_of, default_home
from benchmarks.peers.report import table
from benchmarks.peers.scenarios import BLOCK, SCENARIOS, Scenario

DRIVER = Path(__file__).parent
HERE = [peer.name for peer in PEERS if peer.environment is None]
COUNTS = {"replay": 2000, "decode": 10 * BLOCK, "hit": 50}


def begin(scenario: str, peer: Peer, traffic: Path) -> Scenario:
    """Return a scenario as a worker begins it."""
    _, options = command_of(peer, default_home())
    make = partial(import_module(f"benchmarks.peers.adapters.{peer.adapter}").make, **options)
    settings: dict[str, dict[str, Any]] = {
        "replay": {"traffic": str(traffic), "in_flight": IN_FLIGHT},
        "decode": {"steps": COUNTS["decode"]},
        "hit": {},
    }
    return SCENARIOS[scenario](make, blocks=SMALL, **settings[scenario])


def phases(scenario: Scenario, count: int) -> str:
    """Return a table of the calls of each phase."""
    rows = []
    for phase, ns in scenario.advance(count).ns.items():
        us = np.array(ns) / 1000
        shown = [us.mean(), *np.percentile(us, [10, 50, 90, 99]), us.sum() / 1000]
        rows.append([phase, f"{len(us):,}", *(f"{one:.1f}" for one in shown)])
    return table(["us of a call", "calls", "mean", "p10", "p50", "p90", "p99", "all, ms"], rows)


def functions(scenario: Scenario, count: int, most: int) -> str:
    """Return a table of the functions that take most time themselves, those of the driver left out."""
    profiler = cProfile.Profile()
    profiler.runcall(scenario.advance, count)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for (file, line, name), (_, number, own, *_rest) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        place = Path(file)
        if place.parent != DRIVER:
            where = name if file == "~" else f"{place.parent.name}/{place.name}:{line} {name}"
            spent[where] += own
            calls[where] += number
    rows = [[name, f"{calls[name]:,}", f"{own * 1000:.1f}"] for name, own in spent.most_common(most)]
    return table(["function", "calls", "itself, ms"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", choices=COUNTS)
    parser.add_argument("--peer", choices=HERE, default=HERE[0])
    parser.add_argument("--functions", type=int, default=20, help="how many to show; default: %(default)s")
    options = parser.parse_args(arguments)
    peer = next(peer for peer in PEERS if peer.name == options.peer)
    count = COUNTS[options.scenario]
    with tempfile.TemporaryDirectory() as folder:
        print(machine())
        if options.scenario == "replay":
            print(write_traffic(find_trace(), count, Path(folder)))
        try:
            begun = [begin(options.scenario, peer, Path(folder)) for _ in range(2)]
        except MissingError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"\n{phases(begun[0], count)}\n\n{functions(begun[1], count, options.functions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
