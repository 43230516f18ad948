"""OpenTelemetry spans of an engine and a service, as a receiver of OTLP gets them."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fdcache import tracing
from fdcache.errors import ConfigurationError
from fdcache.settings.cache import TraceTarget
from tests.service_help import ServiceProcess


class Receiver(ThreadingHTTPServer):
    """Keeps the spans that it gets, by the name of the service that sends them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: dict[str, list[Any]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {item.key: item.value.string_value for item in each.resource.attributes}
            spans = [span for scope in each.scope_spans for span in scope.spans]
            self.spans.setdefault(names["service.name"], []).extend(spans)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        is_packed = self.headers.get("content-encoding") == "gzip"
        self.server.take(gzip.decompress(body) if is_packed else body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *values: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """The spans of a service and an engine that have ended."""
    directory: Path = tmp_path_factory.mktemp("run")
    receiver = Receiver()
    environ = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{receiver.server_port}",
        "FDCACHE_TRACES": "otlp",
    }
    storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(directory / "storage")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with ServiceProcess(directory / "s", **storage, FDCACHE_STORAGE_SIZE="8MiB") as service:
            service.start()
            engine = {**environ, "FDCACHE_SERVER": service.address}
            subprocess.run([sys.executable, "-m", "tests.traced_engine"], env=engine, check=True)
            assert service.terminate() == 0
    receiver.shutdown()
    receiver.server_close()
    yield receiver.spans


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes}


def named(received: dict[str, list[Any]], service: str, name: str) -> list[Any]:
    return [span for span in received[service] if span.name == f"fdcache.{name}"]


def test_match_and_load_have_the_request_as_parent(received: dict[str, list[Any]]) -> None:
    trace_id, parent_id = tracing.parent_ids("waits")
    spans = [*named(received, "fdcache-engine", "match"), *named(received, "fdcache-engine", "load")]
    its = [span for span in spans if attributes(span)["fdcache.request"] == "waits"]
    assert {int.from_bytes(span.trace_id, "big") for span in its} == {trace_id}
    assert {int.from_bytes(span.parent_span_id, "big") for span in its} == {parent_id}
    *_, match, load = sorted(its, key=lambda span: span.end_time_unix_nano)
    assert attributes(match)["fdcache.storage_blocks"] == 10
    assert attributes(load)["fdcache.status"] == "confirmed"
    assert match.start_time_unix_nano <= match.end_time_unix_nano <= load.end_time_unix_nano


def test_a_call_of_the_service_belongs_to_the_request_that_makes_it(received: dict[str, list[Any]]) -> None:
    calls = named(received, "fdcache-engine", "service.match")
    trace_id, _ = tracing.parent_ids("waits")
    assert any(int.from_bytes(span.trace_id, "big") == trace_id for span in calls)
    assert all(span.parent_span_id != b"" for span in calls)


def test_backups_and_reads_of_storage_have_their_bytes_and_times(received: dict[str, list[Any]]) -> None:
    (reads, writes) = (named(received, "fdcache-serve", f"storage.{way}") for way in ("read", "write"))
    backups = named(received, "fdcache-engine", "backup")
    for spans, blocks in ((reads, 10), (writes, 10), (backups, 10)):
        assert sum(attributes(span)["fdcache.bytes"] for span in spans) >= blocks * 256
        assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in spans)


def test_a_read_of_storage_belongs_to_the_request_that_waits_for_it(received: dict[str, list[Any]]) -> None:
    trace_id, parent_id = tracing.parent_ids("waits")
    reads = named(received, "fdcache-serve", "storage.read")
    assert {int.from_bytes(span.trace_id, "big") for span in reads} == {trace_id}
    assert {int.from_bytes(span.parent_span_id, "big") for span in reads} == {parent_id}


def test_nothing_is_recorded_or_loaded_unless_it_is_asked_for() -> None:
    script = (
        "import sys; from tests.traced_engine import *; from fdcache import tracing;"
        "CacheManager.from_settings(layout()).close();"
        "print(tracing.spans, [name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "FDCACHE_TRACES"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None []\n"


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"FDCACHE_TRACES: otlp needs .*fdcache\[otel\]"):
        tracing.follow(TraceTarget.OTLP, "engine")
