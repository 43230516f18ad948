"""The network between the nodes of a replay: relays that can be cut, are slow or full, and namespaces."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fdcache.replay.nodes.network import Network, Relay, enter_namespace
from tests.service_help import TIMEOUT

HERE = "127.0.0.1"


class Store(BaseHTTPRequestHandler):
    """Answers every request with the bytes that came with it."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.do_PUT()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def store() -> Iterator[tuple[str, int]]:
    server = HTTPServer((HERE, 0), Store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield HERE, server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(2)
    yield made
    made.close()


def ask(network: Network, node: int, port: int, method: str = "GET", body: bytes = b"") -> bytes:
    """Send a request from the namespace of a node."""
    found: list[bytes | OSError] = []

    def run() -> None:
        path = network.path_of(node)
        if path is not None:
            enter_namespace(path)
        request = urllib.request.Request(f"http://{HERE}:{port}/", data=body or None, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                found.append(answer.read())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = found
    if isinstance(result, OSError):
        raise result
    return result


def change(network: Network, relay: Relay, fault: str, *, on: bool, by: int = 1) -> None:
    network.change(lambda: relay.change(fault, by, on=on))


def test_a_relay_reaches_another_namespace_and_nothing_else_does(
    network: Network, store: tuple[str, int]
) -> None:
    relay = network.relay(0, store)
    assert ask(network, 0, relay.port, "PUT", b"x" * 300_000) == b"x" * 300_000
    if not network.is_isolated:
        pytest.skip("network namespaces are not allowed here")
    for node, port in ((0, store[1]), (1, relay.port)):
        with pytest.raises(urllib.error.URLError, match="refused"):
            ask(network, node, port)


def test_a_relay_between_two_nodes(network: Network) -> None:
    port = network.free_port(1)
    relay = network.relay(0, (HERE, port), 1)
    with pytest.raises((urllib.error.URLError, OSError)):
        ask(network, 0, relay.port)  # nobody is there

    def listen() -> None:
        if (path := network.path_of(1)) is not None:
            enter_namespace(path)
        with HTTPServer((HERE, port), Store) as server:
            ready.set()
            server.handle_request()

    ready = threading.Event()
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert ready.wait(TIMEOUT)
    assert ask(network, 0, relay.port, "PUT", b"hello") == b"hello"
    thread.join(TIMEOUT)


def test_a_cut_relay_is_silent_until_all_who_cut_it_have_mended_it(
    network: Network, store: tuple[str, int]
) -> None:
    relay = network.relay(0, store)
    for by in (1, 2):
        change(network, relay, "cut", on=True, by=by)
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(ask(network, 0, relay.port, "PUT", b"late")))
    thread.start()
    change(network, relay, "cut", on=False, by=1)
    thread.join(0.2)
    assert answers == []
    change(network, relay, "cut", on=False, by=2)
    thread.join(TIMEOUT)
    assert answers == [b"late"]


def test_a_slow_relay_takes_its_time(network: Network, store: tuple[str, int]) -> None:
    relay = network.relay(0, store)
    change(network, relay, "slow", on=True)
    start = time.monotonic()
    assert ask(network, 0, relay.port, "PUT", b"x") == b"x"
    assert time.monotonic() - start >= 2 * Relay.slowness


def test_a_full_bucket_takes_nothing_and_gives_what_it_has(network: Network, store: tuple[str, int]) -> None:
    relay = network.relay(0, store)
    change(network, relay, "full", on=True)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(network, 0, relay.port, "PUT", b"x" * 300_000)
    assert refused.value.code == 507
    refused.value.close()
    assert ask(network, 0, relay.port) == b""
    change(network, relay, "full", on=False)
    assert ask(network, 0, relay.port, "PUT", b"x") == b"x"


def test_a_network_that_ends_leaves_nobody_waiting(store: tuple[str, int]) -> None:
    network = Network(1)
    relay = network.relay(0, store)
    change(network, relay, "cut", on=True)
    if network.is_isolated:
        network.close()
        return
    with socket.create_connection((HERE, relay.port)) as connection:
        network.close()
        connection.settimeout(TIMEOUT)
        assert connection.recv(1) == b""
