"""Measure what it costs a service and a step to be seen: by a page, by a router's events, and by spans.

Four services run side by side, each with an engine of this process; a round of steps is made with each in turn, so that
whatever else runs on the machine disturbs all of them. A pair are two figures of one round: with, and without.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from benchmarks.harness import Report, Row, in_turns
from benchmarks.serve.engines import STEP_SECONDS, Engine, engine
from benchmarks.serve.page import BLOCKS, PROMPTS, reading, serving
from fdcache import tracing
from fdcache.settings.cache import WritePolicy

STEPS = 200
_SUBSCRIBER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.connect(sys.argv[1])
socket.subscribe(b"")
while True: socket.recv_multipart()
"""
_RECEIVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *values): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def program(text: str, argument: str) -> Iterator[None]:
    """Run a Python program beside this one."""
    with subprocess.Popen([sys.executable, "-c", text, argument]) as running:
        try:
            time.sleep(1.0)
            yield
        finally:
            running.kill()


class Side:
    """A service and its engine, and what a round of steps takes."""

    def __init__(self, process: psutil.Process, its: Engine, spans: tracing.Spans | None = None) -> None:
        self._process = process
        self._engine = its
        self._spans = spans
        self.steps: list[float] = []

    def round(self) -> float:
        """Make a round; return the share of a core that the service's process takes."""
        tracing.spans = self._spans
        self._engine.begin_round()
        cpu, began = sum(self._process.cpu_times()[:2]), time.monotonic()
        for _ in range(STEPS):
            self._engine.step(PROMPTS, BLOCKS)
            time.sleep(STEP_SECONDS / 2)
        tracing.spans = None
        self.steps.append(statistics.median(self._engine.walls[-1]))
        used: float = sum(self._process.cpu_times()[:2]) - cpu
        return used / (time.monotonic() - began)


def sides(stack: ExitStack) -> dict[str, Side]:
    """Start the services, their readers and the engines."""
    events, receiver = f"tcp://127.0.0.1:{free_port()}", free_port()
    endpoint = f"http://127.0.0.1:{receiver}"
    stack.enter_context(program(_RECEIVER, str(receiver)))
    stack.enter_context(program(_SUBSCRIBER, events))
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint}/v1/traces")))
    stack.callback(provider.shutdown)
    spans = tracing.Spans(provider.get_tracer("bench"))
    made = {}
    for name, more in (
        ("nothing", {}),
        ("a page", {}),
        ("events", {"FDCACHE_KV_EVENTS": events}),
        ("spans", {"FDCACHE_TRACES": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}),
    ):
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        process, url = stack.enter_context(serving(directory, **more))
        its = engine("shared", WritePolicy.WRITE_THROUGH, server=f"ipc://{directory}/fdcache.sock")
        made[name] = Side(process, stack.enter_context(its), spans if name == "spans" else None)
        if name == "a page":
            stack.enter_context(reading(url, 1))
    return made


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=8)


def measure(options: argparse.Namespace, report: Report) -> None:
    with ExitStack() as stack:
        made = sides(stack)
        used = in_turns({name: side.round for name, side in made.items()}, options.rounds)

    def rows() -> Iterator[Row]:
        plain = made["nothing"].steps
        for name, side in made.items():
            more = [mine - none for mine, none in zip(used[name], used["nothing"], strict=True)]
            yield {
                "seen by": name,
                "CPU of the service": f"{statistics.median(used[name]):.1%}",
                "more, median of pairs": f"{statistics.median(more):+.1%}",
                "step, quietest round, us": min(side.steps),
                "to nothing, median of pairs": statistics.median(
                    mine / none for mine, none in zip(side.steps, plain, strict=True)
                ),
            }

    report.table("What it costs to be seen", rows())
