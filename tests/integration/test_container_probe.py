"""The probe of the container files against a real HTTP server."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

PROBE = Path(__file__).parents[2] / "examples/container/probe.py"


class Handler(BaseHTTPRequestHandler):
    """Answers /health to all, /locked to who has the key, everything else with 503."""

    def do_GET(self) -> None:
        locked = self.path == "/locked" and self.headers["Authorization"] != "Bearer k1"
        self.send_response(401 if locked else 200 if self.path in ("/health", "/locked") else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep the output of the tests free of requests."""


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a running server."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def probe(*arguments: object) -> int:
    command = [sys.executable, "-S", str(PROBE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_probe_tells_well_from_unwell(address: str) -> None:
    assert probe(f"{address}/health") == 0
    assert probe(f"{address}/ready") == 1


def test_probe_presents_the_first_key_of_a_file(address: str, tmp_path: Path) -> None:
    key = tmp_path / "FD_API_KEY"
    key.write_text("k1,k2\n")
    assert probe(f"{address}/locked") == 1
    assert probe(f"{address}/locked", key) == 0


def test_probe_of_nothing_fails(address: str) -> None:
    assert probe("http://127.0.0.1:9/health") == 1
    assert probe() == 1
