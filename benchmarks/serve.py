"""What a service costs: look-ups from many clients, the scheduler thread's time a step, and a run without reuse.

    python -m benchmarks.serve [--seconds 3]

The echo is an empty ZeroMQ ROUTER/DEALER round trip over ipc:// on the same machine in the same run: what any
such service pays before it does anything. Of a scheduler's steps the quietest of several rounds counts, so that
others on the machine change little. Exits 1 when a run without reuse costs 1% of a step of 20 ms or more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.serve_node import BLOCKS, Results, ask_echo, ask_service, echo, serve
from benchmarks.serve_steps import GOAL, print_steps

CLIENTS = (1, 8, 64)
STEPS = ((1, 32), (8, 8))
"""New prompts in a step, and blocks of each."""


def measure(
    target: Callable[[str, float, Results], None], directory: str, clients: int, seconds: float
) -> dict[str, float]:
    context = multiprocessing.get_context("fork")
    results: Results = context.Queue()
    processes = [context.Process(target=target, args=(directory, seconds, results)) for _ in range(clients)]
    for process in processes:
        process.start()
    times = np.concatenate([results.get() for _ in processes])
    for process in processes:
        process.join()
    return {
        "per_second": len(times) / (0.9 * seconds),
        "p50_us": float(np.percentile(times, 50)) * 1e6,
        "p99_us": float(np.percentile(times, 99)) * 1e6,
    }


def print_lookups(directory: str, seconds: float) -> None:
    print(f"| clients | echo/s | p50, p99 us | look-ups of {BLOCKS} blocks/s | p50, p99 us | to echo's p50 |")
    print("|---|---|---|---|---|---|")
    for clients in CLIENTS:
        base = measure(ask_echo, directory, clients, seconds)
        ours = measure(ask_service, directory, clients, seconds)
        print(
            f"| {clients} | {base['per_second']:,.0f} | {base['p50_us']:.0f}, {base['p99_us']:.0f} "
            f"| {ours['per_second']:,.0f} | {ours['p50_us']:.0f}, {ours['p99_us']:.0f} "
            f"| {ours['p50_us'] / base['p50_us']:.1f} |"
        )


def measure_all(directory: str, seconds: float) -> bool:
    """Print every table; whether a run without reuse is within its goal."""
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print_lookups(directory, seconds)
    server = f"ipc://{directory}/fdcache.sock"
    verdicts = [print_steps(server, prompts, blocks) for prompts, blocks in STEPS]
    good = all(verdicts)
    print(f"\nA run without reuse {'stays below' if good else 'does not stay below'} {GOAL:.0%} of a step.")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fdcache-bench-") as directory:
        Path(directory).chmod(0o700)
        stop = context.Event()
        started = []
        try:
            for target in (serve, echo):
                ready = context.Event()
                process = context.Process(target=target, args=(directory, ready, stop))
                process.start()
                started.append(process)
                assert ready.wait(60)
            good = measure_all(directory, seconds)
        finally:
            stop.set()
            for process in started:
                process.join(20)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
