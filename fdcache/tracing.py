"""OpenTelemetry spans of matches, loads, copies and calls of a service; none unless ``FDCACHE_TRACES`` asks for them.

    if tracing.spans is not None:
        tracing.spans.of_request("match", "chat-1", began, {"fdcache.tokens": 512})

The parent of a request's spans follows from its id alone (``parent_ids``), so the processes that work for it share one
trace without passing anything on, and an engine can join it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fdcache.errors import ConfigurationError
from fdcache.metadata import SwapPurpose, TransferReport
from fdcache.settings.cache import TraceTarget

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

_MOST_LOADS = 65536
_COPIES = {
    SwapPurpose.EVICT: "evict",
    SwapPurpose.BACKUP: "backup",
    SwapPurpose.STORE: "storage.write",
    SwapPurpose.PREFETCH: "storage.read",
    SwapPurpose.SEND: "send",
    SwapPurpose.FETCH: "fetch",
}
"""Loads are spans of their requests."""

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


def parent_ids(request_id: str) -> tuple[int, int]:
    """Return trace and span id of a request: the first 16 bytes of the SHA-256 of its id, and the next 8."""
    digest = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


class Spans:
    """Records spans with a tracer. Threads may share it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._loads: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._current = threading.local()

    def begin_match(self, request_ids: Sequence[str]) -> int:
        """Return the time; calls of this thread belong to these requests from now on."""
        self._current.requests = request_ids
        return time.time_ns()

    def end_match(self) -> None:
        """End what ``begin_match`` began."""
        self._current.requests = ()

    def of_request(self, name: str, request_id: str, began: int, attributes: Attributes) -> None:
        """Record a span of a request that ends now."""
        self._record(name, began, time.time_ns(), {"fdcache.request": request_id, **attributes}, request_id)

    def load_begins(self, request_id: str, blocks: int) -> None:
        """Record that a load of a request is planned."""
        with self._lock:
            self._loads[request_id] = (time.time_ns(), blocks)
            if len(self._loads) > _MOST_LOADS:
                self._loads.popitem(last=False)

    def load_ended(self, request_id: str, status: str, error: str | None) -> None:
        """Record the span of a load; the end of one that was not noted is ignored."""
        with self._lock:
            noted = self._loads.pop(request_id, None)
        if noted is not None:
            told = {"fdcache.status": status, **({"error.message": error} if error else {})}
            self.of_request("load", request_id, noted[0], {"fdcache.blocks": noted[1], **told})

    def copied(self, report: TransferReport, read_for: Sequence[str] = ()) -> None:
        """Record the copies of a rank's report, as if each had ended now.

        ``read_for``: the requests that wait for its read from storage, which is below the first of them.
        """
        now = time.time_ns()
        for result in report.results:
            if (name := _COPIES.get(result.purpose)) is not None and (
                result.copied_bytes or len(result.failed)
            ):
                requests = read_for if result.purpose is SwapPurpose.PREFETCH else ()
                attributes = {
                    "fdcache.rank": report.rank,
                    "fdcache.bytes": result.copied_bytes,
                    "fdcache.failed_blocks": len(result.failed),
                }
                self._of_requests(name, now - int(1e9 * result.seconds), now, attributes, requests)

    def called(self, kind: str, began: int) -> None:
        """Record a call of the service, below the request whose match makes it."""
        requests: Sequence[str] = getattr(self._current, "requests", ())
        self._of_requests(f"service.{kind}", began, time.time_ns(), {}, requests)

    def _of_requests(
        self, name: str, began: int, ended: int, attributes: Attributes, requests: Sequence[str]
    ) -> None:
        """Record a span for requests, below the first of them."""
        if requests:
            attributes = {**attributes, "fdcache.requests": list(requests)}
        self._record(name, began, ended, attributes, requests[0] if requests else None)

    def _record(
        self, name: str, began: int, ended: int, attributes: Attributes, request_id: str | None = None
    ) -> None:
        context = None if request_id is None else _context(request_id)
        span = self._tracer.start_span(
            f"fdcache.{name}", context=context, start_time=began, attributes=dict(attributes)
        )
        span.end(ended)


spans: Spans | None = None
"""None while no spans are recorded: all that a hot path looks at."""


def follow(target: TraceTarget, service_name: str) -> None:
    """Record spans as the settings say. The first call of a process that asks for some decides.

    An engine that has set up OpenTelemetry itself gets them in its own way; else ``OTEL_`` variables tell the exporter
    where to. Raises ``ConfigurationError`` if the extra ``otel`` is not installed.
    """
    global spans  # noqa: PLW0603
    if target is TraceTarget.OFF or spans is not None:
        return
    try:
        spans = Spans(_tracer(target, service_name))
    except ImportError as error:
        raise ConfigurationError(
            f"FDCACHE_TRACES: {target.value} needs OpenTelemetry: {error}; pip install 'fdcache[otel]', or set off"
        ) from error
    log.info("spans are sent to %s", target.value)


def _tracer(target: TraceTarget, service_name: str) -> Tracer:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        named = Resource.create({SERVICE_NAME: service_name}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=named)
        provider.add_span_processor(BatchSpanProcessor(_exporter(target)))
    return provider.get_tracer("fdcache")


def _exporter(target: TraceTarget) -> SpanExporter:
    if target is TraceTarget.CONSOLE:
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _context(request_id: str) -> Context:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    trace_id, span_id = parent_ids(request_id)
    parent = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(parent))
