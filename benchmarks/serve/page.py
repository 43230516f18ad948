"""Measure what the page costs: the service's time for it, and the steps of an engine, with and without readers in turn.

The engine, its steps and the service are those of the other parts, with 64 more clients registered. Exits 1 if one
page takes 1% of the service's thread or more.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.harness import Report, Row
from benchmarks.serve.engines import STEP_SECONDS, engine, registered
from fdcache.service.client.connection import Client
from fdcache.settings.cache import WritePolicy

CLIENTS, STEPS, PROMPTS, BLOCKS = 64, 200, 2, 16
GOAL = 0.01
READERS = (0, 1, 4)
_READER = """
import sys, urllib.request
while True:
    with urllib.request.urlopen(sys.argv[1] + "/v1/page/events") as stream:
        for line in stream: pass
"""


@contextmanager
def serving(directory: str, **more: str) -> Iterator[tuple[psutil.Process, str]]:
    """Run a service; yield its process and the address of its HTTP."""
    settings = {
        "FDCACHE_RUNTIME_DIR": directory,
        "FDCACHE_SERVER": f"ipc://{directory}/fdcache.sock",
        "FDCACHE_HOST_MEMORY": "64MiB",
        "FDCACHE_DISCARD": "1",
        "FDCACHE_HTTP_ADDRESS": "127.0.0.1:0",
        **more,
    }
    command = [sys.executable, "-m", "fdcache_cli.main", "serve"]
    with subprocess.Popen(
        command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            if found := re.match(r"http +(http://\S+)", line):
                url = found[1]
            if line.startswith("ready"):
                break
        try:
            yield psutil.Process(process.pid), url
        finally:
            process.terminate()


@contextmanager
def reading(url: str, readers: int) -> Iterator[None]:
    """Read the updates of ``readers`` pages."""
    running = [subprocess.Popen([sys.executable, "-c", _READER, url]) for _ in range(readers)]
    try:
        time.sleep(1.0 if readers else 0.0)
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def asked_seconds(client: Client) -> float:
    """Return the time that the service's thread has spent on questions."""
    found = client.ask("stats")["totals"]["latencies"]["kinds"].get("ask")
    return float(found["total"]) if found else 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=6)


def measure(options: argparse.Namespace, report: Report) -> bool:
    steps: dict[int, list[float]] = {readers: [] for readers in READERS}
    spent: dict[int, list[float]] = {readers: [] for readers in READERS}
    used: dict[int, list[float]] = {readers: [] for readers in READERS}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        process, url = stack.enter_context(serving(directory))
        for _ in range(CLIENTS):
            (Path(directory) / "clients").mkdir(exist_ok=True)
            stack.enter_context(registered(directory))
        its = stack.enter_context(
            engine("shared", WritePolicy.WRITE_THROUGH, server=f"ipc://{directory}/fdcache.sock")
        )
        client = stack.enter_context(Client(f"ipc://{directory}/fdcache.sock"))
        for _ in range(options.rounds):
            for readers in READERS:
                with reading(url, readers):
                    its.begin_round()
                    asked, cpu, began = asked_seconds(client), sum(process.cpu_times()[:2]), time.monotonic()
                    for _ in range(STEPS):
                        its.step(PROMPTS, BLOCKS)
                        time.sleep(STEP_SECONDS / 2)
                    wall = time.monotonic() - began
                    used[readers].append((sum(process.cpu_times()[:2]) - cpu) / wall)
                    spent[readers].append((asked_seconds(client) - asked) / wall)
                    steps[readers].append(statistics.median(its.walls[-1]))

    def rows() -> Iterator[Row]:
        for readers in READERS:
            pairs = [mine / none for mine, none in zip(steps[readers], steps[0], strict=True)]
            yield {
                "pages": readers,
                "time of the service's thread": f"{statistics.median(spent[readers]):.2%}",
                "CPU of the process": f"{statistics.median(used[readers]):.1%}",
                "step, quietest round, us": min(steps[readers]),
                "median of pairs": statistics.median(pairs),
            }

    report.table("Pages that are read", rows())
    return statistics.median(spent[1]) - statistics.median(spent[0]) < GOAL
