"""A proxy before a server of S3 that disturbs what passes."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

PAGE = 4096


class FaultyProxy:
    """Forwards requests to ``target`` and, while a fault is set, does something else with some of them.

    Faults: ``500``, ``403`` and ``501`` are answered in place of the server, whose headers a 501 needs; ``hang``
    answers when the fault is over; ``cut`` ends the connection in the middle of an answer; ``short`` answers with half
    of what was asked for; ``flip`` changes a byte. The last three concern answers longer than a page.
    """

    def __init__(self, target: str) -> None:
        self.fault = ""
        self.methods: Iterable[str] = ("GET", "PUT", "HEAD", "POST", "DELETE")
        self.left = -1
        """How many answers are still disturbed; -1 without end."""

        self.seen: list[str] = []
        self.over = threading.Event()
        self.over.set()
        self._lock = threading.Lock()
        host = target.removeprefix("http://")

        class Handler(_Handler):
            proxy = self
            server_host = host

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def disturb(self, fault: str, methods: Iterable[str] = ("GET", "PUT", "HEAD"), times: int = -1) -> None:
        self.methods, self.left = tuple(methods), times
        self.over.clear()
        self.fault = fault

    def calm(self) -> None:
        self.fault = ""
        self.over.set()

    def takes(self, method: str, fault: str) -> bool:
        """Return True if this request is to be disturbed in this way."""
        with self._lock:
            if self.fault != fault or method not in self.methods or not self.left:
                return False
            self.left -= 1
            return True

    def close(self) -> None:
        self.calm()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: ClassVar[FaultyProxy]
    server_host: ClassVar[str]

    def _serve(self) -> None:
        proxy, method = self.proxy, self.command
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        proxy.seen.append(method)
        if proxy.takes(method, "hang"):
            proxy.over.wait(60)
        for status in (500, 403):
            if proxy.takes(method, str(status)):
                self._answer(status, {}, b"<Error><Code>Injected</Code></Error>")
                return
        if self.headers.get("If-None-Match") and proxy.takes(method, "501"):
            self._answer(501, {}, b"<Error><Code>NotImplemented</Code></Error>")
            return
        status, headers, content = self._forward(method, body)
        if method == "GET" and len(content) > PAGE:
            for fault, change in _CHANGES.items():
                if proxy.takes(method, fault):
                    content = change(content)
            if proxy.takes(method, "cut"):
                self._answer(status, headers, content[: len(content) // 2], len(content))
                self.close_connection = True
                return
        self._answer(status, headers, content)

    def _forward(self, method: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection(self.server_host, timeout=60)
        try:
            sent = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            link.request(method, self.path, body or None, sent)
            answer = link.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            link.close()

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        given = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", given or str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Say nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True  # a client that was killed

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


_CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "flip": _flipped,
    "short": lambda content: content[: len(content) // 2],
}
