"""Measure how long an engine waits for the service while tools ask long questions, and what waits in memory.

An engine sends a heartbeat every 2 ms to `fdcache serve`, a process of its own, and a tool asks a short question.
Meanwhile other processes ask for `explain`, read their answers or do not. The memory is the service's, resident.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import psutil
import zmq

from benchmarks.harness import Report, Row
from benchmarks.serve.engines import registered
from fdcache.errors import ServiceError
from fdcache.service.client.connection import Client, Connection
from fdcache.service.wire.address import SCHEME
from fdcache.service.wire.protocol import Ask, Heartbeat, encode_request

LONG, USUAL = 100_000, 10_000
"""Hashes of a long question, and of those that many tools ask at once."""
SLOW_TOOLS = 20
UNREAD = 200
"""Questions of a tool that reads no answer."""


@contextmanager
def service(directory: Path, **others: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run ``fdcache serve``; yield its address and process."""
    directory.chmod(0o700)
    address = f"{SCHEME}{directory}/fdcache.sock"
    settings = {
        "FDCACHE_SERVER": address,
        "FDCACHE_RUNTIME_DIR": str(directory),
        "FDCACHE_ARENA_DIR": str(directory),
        "FDCACHE_HTTP_ADDRESS": "off",
        "FDCACHE_HOST_MEMORY": "16MiB",
        **others,
    }
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "-m", "fdcache_cli.main", "serve"]
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)
    try:
        with Client(address, timeout=60) as client:
            client.ask("stats")
        yield address, psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def hashes(count: int) -> list[str]:
    """Return hashes that the service does not have."""
    return [os.urandom(32).hex() for _ in range(count)]


def send_heartbeats(directory: Path, seconds: float, done: Callable[[], bool]) -> list[float]:
    """Return the waits of an engine for the answers to its heartbeats, for so long and until ``done``."""
    waits = []
    with registered(str(directory)) as (line, _):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or not done():
            began = time.perf_counter()
            line.call(Heartbeat(b"{}"), 120)
            waits.append(time.perf_counter() - began)
            time.sleep(0.002)
    return waits


def ask_config(address: str, stop: Event, waits: list[float]) -> None:
    """Ask a short question again and again."""
    with Client(address, timeout=120) as client:
        while not stop.is_set():
            began = time.perf_counter()
            client.ask("config")
            waits.append(time.perf_counter() - began)
            time.sleep(0.01)


def explain(address: str, count: int, stop: Event) -> None:
    """Ask to explain a path, once at least, until ``stop``."""
    path = hashes(count)
    with Client(address, timeout=120) as client:
        while True:
            client.ask("explain", namespace="", hashes=path)
            if stop.is_set():
                return


def ask_unread(address: str, count: int, questions: int, sent: Event, stop: Event) -> None:
    """Send questions as fast as the service takes them, and read no answer."""
    line = Connection(address)
    line.socket.setsockopt(zmq.RCVHWM, 1)
    data = encode_request(0, 1, Ask("explain", {"namespace": "", "hashes": hashes(count)}))
    for _ in range(questions):
        try:
            line.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            break
    sent.set()
    stop.wait()
    line.close()


def row(name: str, waits: list[float]) -> Row:
    """Return the distribution of waits in milliseconds."""
    p50, p99, most = (float(np.percentile(waits, share)) * 1e3 for share in (50, 99, 100))
    return {
        "an engine's heartbeats, while": name,
        "answers": len(waits),
        "p50 ms": p50,
        "p99 ms": p99,
        "longest ms": most,
    }


def waits_of(directory: Path, address: str, seconds: float) -> Iterator[Row]:
    """Yield the waits of an engine while nobody, one tool and many tools ask."""
    context = multiprocessing.get_context("spawn")
    yield row("nothing else is asked", send_heartbeats(directory, seconds, lambda: True))
    stop = context.Event()
    stop.set()
    tool = context.Process(target=explain, args=(address, LONG, stop))
    tool.start()
    waits = send_heartbeats(directory, 0, lambda: not tool.is_alive())
    yield row(
        f"a tool asks to explain {LONG:,} blocks" + ("" if not tool.exitcode else ", which fails"), waits
    )
    stop = context.Event()
    tools = [context.Process(target=explain, args=(address, USUAL, stop)) for _ in range(SLOW_TOOLS)]
    for each in tools:
        each.start()
    time.sleep(3)
    with multiprocessing.Manager() as manager:
        short = manager.list()
        other = context.Process(target=ask_config, args=(address, stop, short))
        other.start()
        waits = send_heartbeats(directory, seconds, lambda: len(short) > 2)
        stop.set()
        for each in (*tools, other):
            each.join()
        yield row(f"{SLOW_TOOLS} tools ask to explain {USUAL:,} each", waits)
        yield row("the same, a tool's short question", list(short))


def memory_of(address: str, process: psutil.Process) -> Iterator[Row]:
    """Yield the growth of the service while a client does not read what it asked for."""
    context = multiprocessing.get_context("spawn")
    for count, questions in ((USUAL, UNREAD), (LONG, UNREAD // 10)):
        before, most = process.memory_info().rss, 0
        sent, stop = context.Event(), context.Event()
        tool = context.Process(target=ask_unread, args=(address, count, questions, sent, stop))
        tool.start()
        while not sent.wait(0.01):
            most = max(most, process.memory_info().rss)
        quiet = time.monotonic() + 3
        while time.monotonic() < quiet:
            used = process.cpu_times().user
            most = max(most, process.memory_info().rss)
            time.sleep(0.05)
            if process.cpu_times().user - used > 0.02:
                quiet = time.monotonic() + 3
        stop.set()
        tool.join()
        yield {
            "a tool that reads no answer asks": f"to explain {count:,} blocks, {questions} times",
            "the service grows by, MiB": (most - before) >> 20,
        }
        with Client(address, timeout=120) as client:
            client.ask("stats")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0)


def measure(options: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="fdcache-bench-") as name:
        directory = Path(name)
        with service(directory) as (address, process):
            report.table("Waits of an engine", waits_of(directory, address, options.seconds))
            try:
                report.table("Memory of what is not read", memory_of(address, process))
            except ServiceError as error:
                report.note(f"the service does not answer: {error}")
