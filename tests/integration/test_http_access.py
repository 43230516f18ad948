"""HTTP of a real service: who may do what, and what strangers on the same machine cannot do to it."""

from __future__ import annotations

import http.client
import json
import re
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from fdcache.errors import ConfigurationError
from fdcache.service.client.connection import Client
from fdcache.service.server import http_server
from fdcache.service.server.endpoints import endpoints
from fdcache.service.server.http import make_app
from fdcache.service.server.http_guard import MAX_BODY, MAX_PROMPT, MAX_REQUESTS
from fdcache.service.server.http_server import MAX_CONNECTIONS, HttpServer
from fdcache.settings import Settings
from fdcache_cli.running_service import is_served
from tests.service_help import TIMEOUT, ServiceProcess, arguments, run, until

COMMANDS = ["/v1/pause", "/v1/resume", "/v1/reset"]


class Web:
    """HTTP of a service process."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service
        until(lambda: "ready" in self.log, "it is ready")
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.log)
        assert found is not None
        self.port = int(found[1])

    @property
    def log(self) -> str:
        return (self.service.directory.parent / f"{self.service.directory.name}.log").read_text()

    @property
    def key_path(self) -> Path:
        return self.service.directory / "fdcache.sock.key"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key_path.read_text().strip()}"}

    @property
    def process(self) -> psutil.Process:
        assert self.service.process is not None
        return psutil.Process(self.service.process.pid)

    @property
    def state(self) -> str:
        return str(self.service.ask("stats")["state"])

    def line(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT)

    def await_no_lines(self) -> None:
        """Wait until the connections of former tests are closed, a while after these have closed their ends."""

        def lines() -> list[str]:
            return [each.status for each in self.process.net_connections("tcp") if each.status != "LISTEN"]

        until(lambda: not lines(), "no connection is open")

    def send(self, method: str, path: str, headers: Mapping[str, str] = {}, body: str = "") -> int:
        """Return the status of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)) as line:
            with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may come before all is sent
                line.request(method, path, body or None, dict(headers))
            return line.getresponse().status


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("web")
    with ServiceProcess(folder / "s", FDCACHE_HTTP_ADDRESS="127.0.0.1:0") as service:
        service.start()
        yield Web(service)


class TestKey:
    def test_only_the_user_of_the_service_can_read_it(self, web: Web) -> None:
        assert web.key_path.stat().st_mode & 0o777 == 0o600
        assert web.key_path.parent.stat().st_mode & 0o777 == 0o700
        assert len(web.key_path.read_text().strip()) >= 32
        assert web.key_path.read_text().strip() not in web.log
        assert str(web.key_path) in web.log

    @pytest.mark.parametrize("path", COMMANDS)
    def test_a_command_needs_it(self, web: Web, path: str) -> None:
        json_body = {"Content-Type": "application/json"}
        assert web.send("POST", path, json_body, '{"dry_run": true}') == 401
        assert web.state == "ready"
        assert web.send("POST", path, json_body | web.bearer, '{"dry_run": true}') == 200
        assert web.state == ("paused" if path == "/v1/pause" else "ready")
        web.service.ask("resume")

    def test_probes_metrics_and_views_do_not(self, web: Web) -> None:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/stats", "/v1/config"):
            assert web.send("GET", path) == 200

    def test_the_command_line_of_the_user_needs_none(self, web: Web) -> None:
        assert run("reset", "--server", web.service.address, "--yes").returncode == 0

    def test_a_start_makes_a_new_one_and_an_end_removes_it(self, tmp_path: Path) -> None:
        with ServiceProcess(tmp_path / "s", FDCACHE_HTTP_ADDRESS="127.0.0.1:0") as service:
            service.start()
            former = Web(service).bearer
            service.kill()
            (tmp_path / "s.log").write_text("")
            service.start()
            again = Web(service)
            assert again.bearer != former
            assert again.send("POST", "/v1/resume", former) == 401
            assert again.send("POST", "/v1/resume", again.bearer) == 200
            assert service.terminate() == 0
            assert service.leftovers() == []

    def test_api_keys_and_the_users_key_open_everything_where_they_are_set(self, tmp_path: Path) -> None:
        settings = {"FDCACHE_HTTP_ADDRESS": "127.0.0.1:0", "FD_API_KEY": "from-the-setting"}
        with ServiceProcess(tmp_path / "s", **settings) as service:
            service.start()
            web = Web(service)
            assert web.send("GET", "/healthz") == 200
            for method, path in (("GET", "/metrics"), ("GET", "/v1/stats"), ("POST", "/v1/resume")):
                assert web.send(method, path) == 401
                assert web.send(method, path, {"Authorization": "Bearer from-the-setting"}) == 200
                assert web.send(method, path, web.bearer) == 200


class TestOtherSites:
    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://["])
    def test_a_page_of_another_site_sends_nothing(self, web: Web, origin: str) -> None:
        form = {"Origin": origin, "Content-Type": "application/x-www-form-urlencoded"}
        assert web.send("POST", "/v1/pause", form, "a=b") == 403
        assert web.send("POST", "/v1/pause", form | web.bearer, "a=b") == 403
        assert web.send("GET", "/v1/stats", {"Origin": origin}) == 403
        assert web.state == "ready"

    @pytest.mark.parametrize("site", ["cross-site", "same-site"])
    def test_another_page_embeds_nothing_and_may_link(self, web: Web, site: str) -> None:
        image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        assert web.send("GET", "/v1/stats", image) == 403
        assert web.send("GET", "/openapi.json", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"}) == 200

    def test_the_own_page_may(self, web: Web) -> None:
        own = {"Origin": f"http://127.0.0.1:{web.port}", "Sec-Fetch-Site": "same-origin"}
        assert web.send("POST", "/v1/resume", own | web.bearer) == 200

    @pytest.mark.parametrize("path", ["/healthz", "/metrics", "/v1/stats", "/openapi.json", "/v1/nothing"])
    def test_a_name_that_leads_here_reads_nothing(self, web: Web, path: str) -> None:
        for host in ("evil.example", "127.evil.example:9470", "192.0.2.1", "[", ""):
            assert web.send("GET", path, {"Host": host}) == 421

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]:9470"])
    def test_names_of_loopback_are_answered(self, web: Web, host: str) -> None:
        assert web.send("GET", "/v1/stats", {"Host": host}) == 200


class TestLimits:
    def test_a_long_body_is_refused_before_the_key_is_looked_at(self, web: Web) -> None:
        before = web.process.memory_info().rss
        for length in (MAX_BODY + 1, 600 << 20, 10**18):
            with web.line() as line:
                line.sendall(
                    b"POST /v1/reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length
                )
                assert line.recv(100).startswith(b"HTTP/1.1 413 ")
        assert web.process.memory_info().rss - before < 8 << 20

    def test_a_long_prompt_is_taken_with_the_key_only(self, web: Web) -> None:
        prompt = json.dumps({"tokens": list(range(100_000))})
        assert MAX_BODY < len(prompt) < MAX_PROMPT
        wrong = "Authorization: Bearer " + "x" * 43 + "\r\n"
        for length, keys in ((len(prompt), ""), (len(prompt), wrong)):
            with web.line() as line:
                head = (
                    f"POST /v1/explain HTTP/1.1\r\nHost: localhost\r\n{keys}Content-Length: {length}\r\n\r\n"
                )
                line.sendall(head.encode())
                assert line.recv(100).startswith(b"HTTP/1.1 413 ")
        json_body = {"Content-Type": "application/json"} | web.bearer
        assert web.send("POST", "/v1/explain", json_body, prompt) == 404, "there is no namespace"
        assert web.send("POST", "/v1/reset", json_body, prompt) == 413

    @pytest.mark.parametrize("path", ["/v1/reset", "/v1/pause", "/metrics"])
    def test_a_body_of_unknown_length_ends_with_the_connection(self, web: Web, path: str) -> None:
        before = web.process.memory_info().rss
        chunk = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
        with web.line() as line:
            line.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
            )
            with pytest.raises(OSError):
                for _ in range(600):
                    line.sendall(chunk)
        assert web.process.memory_info().rss - before < 16 << 20

    def test_a_body_up_to_the_limit_is_read(self, web: Web) -> None:
        body = json.dumps({"dry_run": True}).ljust(MAX_BODY)
        kind = {"Content-Type": "application/json"}
        assert web.send("POST", "/v1/reset", kind | web.bearer, body) == 200

    def test_idle_connections_leave_descriptors_to_engines_and_room_to_probes(self, web: Web) -> None:
        web.await_no_lines()
        before = web.process.num_fds()
        most = before + MAX_CONNECTIONS + 40
        former = resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE, (most, former[1]))
        length, idle = len(web.log), []
        try:
            for _ in range(1100):
                idle.append(web.line())
                if len(idle) % 100 == 0:
                    assert web.send("GET", "/readyz") == 200
                    assert run("inspect", "tiers", "--server", web.service.address).returncode == 0
            assert web.process.num_fds() < most
            assert web.log[length:] == ""
        finally:
            for each in idle:
                each.close()
            resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE, former)
        until(lambda: web.process.num_fds() <= before, "the connections are closed")
        assert web.send("GET", "/v1/stats") == 200

    def test_without_descriptors_it_serves_on_and_says_so(self, web: Web) -> None:
        """Descriptors that others took: what HTTP takes leaves some."""
        web.await_no_lines()  # what closes later would leave descriptors to new clients
        former = resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE)
        length = len(web.log)
        with Client(web.service.address, timeout=TIMEOUT) as engine, ExitStack() as lines:
            assert engine.ask("stats")["state"] == "ready"
            lines.callback(resource.prlimit, web.process.pid, resource.RLIMIT_NOFILE, former)
            set_limit = partial(resource.prlimit, web.process.pid, resource.RLIMIT_NOFILE)

            def takes_no_clients() -> bool:  # a file that was open for a moment may have been counted
                set_limit((web.process.num_fds() * 9 // 8, former[1]))
                return "new clients are refused" in web.log[length:]

            until(takes_no_clients, "it takes no clients")
            for _ in range(10):
                assert not is_served(web.service.address)
                assert engine.ask("stats")["state"] == "ready", "clients that it has are served"
            set_limit((web.process.num_fds(), former[1]))
            waiting = [lines.enter_context(web.line()) for _ in range(60)]
            until(lambda: "Too many open files" in web.log[length:], "it takes no connections")
            for _ in range(50):
                assert not is_served(web.service.address)
            for each in waiting:
                each.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert engine.ask("stats")["state"] == "ready"
            resource.prlimit(web.process.pid, resource.RLIMIT_NOFILE, former)
            for each in waiting:
                assert each.recv(100).startswith(b"HTTP/1.1 200 ")
        until(lambda: is_served(web.service.address), "it takes clients again")
        assert web.state == "ready"
        assert web.log[length:].count("\n") == 3

    def test_senseless_requests_are_not_logged(self, web: Web) -> None:
        length = len(web.log)
        for _ in range(20):
            with web.line() as line:
                line.sendall(b"\x16\x03\x01 senseless\r\n\r\n")
                assert line.recv(100).startswith(b"HTTP/1.1 400 ")
        with web.line() as line:
            line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: %s" % (b"x" * (1 << 20)))
            assert line.recv(100).startswith(b"HTTP/1.1 400 ")
        assert web.log[length:] == ""

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
    def test_a_number_that_json_cannot_repeat_is_refused(self, web: Web, number: str) -> None:
        length = len(web.log)
        headers = {"Content-Type": "application/json", **web.bearer}
        assert web.send("POST", "/v1/reset", headers, f'{{"older_than": {number}}}') == 422
        assert web.send("POST", "/v1/reset", headers, f'{{"unknown": {number}}}') == 422
        assert web.log[length:] == ""

    def test_clients_that_do_not_read_keep_nobody_from_the_views(self, web: Web) -> None:
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with ExitStack() as lines:
            for _ in range(MAX_REQUESTS):
                line = lines.enter_context(socket.socket())
                line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                line.connect(("127.0.0.1", web.port))
                line.settimeout(0.1)  # until nothing more is taken
                with suppress(TimeoutError):
                    while True:
                        line.sendall(request * 300)
            assert [web.send("GET", "/v1/stats") for _ in range(4)] == [200] * 4


@contextmanager
def alone(directory: Path) -> Iterator[HttpServer]:
    """HTTP without a service behind it: views wait until their timeout."""
    server = HttpServer(f"ipc://{directory}/none.sock", (), "127.0.0.1", 0)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class TestDeadlines:
    @pytest.mark.parametrize(
        "sent",
        [
            b"",
            b"GET /healthz HT",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
            b"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nab",
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
        ],
        ids=["nothing", "half a line", "half a head", "half a body", "half of the next head"],
    )
    def test_a_client_that_sends_no_whole_request_is_cut_off(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
    ) -> None:
        monkeypatch.setattr(http_server, "STEP_SECONDS", 0.3)
        with alone(tmp_path) as server, socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as line:
            line.sendall(sent)
            received = b""
            try:
                while more := line.recv(65536):
                    received += more
            except ConnectionResetError:
                pass
            assert received.count(b"HTTP/1.1") == sent.count(b"\r\n\r\nGET")

    def test_a_client_that_does_not_read_is_cut_off(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_server, "STEP_SECONDS", 0.3)
        with alone(tmp_path) as server, socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", server.port))
            line.settimeout(TIMEOUT)
            ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
            with pytest.raises(OSError):
                while True:
                    line.sendall(ask * 100)


def test_views_in_progress_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fdcache.service.server.http_server.make_app", partial(make_app, timeout=0.2))
    ask = b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with alone(tmp_path) as server:
        lines = [
            socket.create_connection(("127.0.0.1", server.port), TIMEOUT) for _ in range(MAX_REQUESTS + 1)
        ]
        for line in lines:
            line.sendall(ask)
        answers = []
        for line in reversed(lines):
            answer = b""
            while not answer.endswith(b"}"):
                answer += line.recv(1000)
            answers.append(answer.decode())
        assert sum(f"{MAX_REQUESTS} requests are in progress" in each for each in answers) == 1
        assert all(each.startswith("HTTP/1.1 503 ") for each in answers)
        for line in lines:
            line.close()


class TestAddress:
    def settings(self, directory: Path, address: str, **others: str) -> Settings:
        given = arguments(directory, **others) | {"FDCACHE_HTTP_ADDRESS": address}
        return Settings.load(environ={}, arguments=given)

    @pytest.mark.parametrize("address", ["127.0.0.1:1", "127.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"])
    def test_loopback_needs_no_api_key(self, tmp_path: Path, address: str) -> None:
        assert endpoints(self.settings(tmp_path, address)).http is not None

    @pytest.mark.parametrize("host", ["127.example.com", "127.0.0.1.nip.example", "localhost"])
    def test_a_name_counts_by_its_addresses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
    ) -> None:
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda name, *given, **named: real("192.0.2.7", *given, **named)
        )
        with pytest.raises(ConfigurationError, match="reachable from other machines; set FD_API_KEY"):
            endpoints(self.settings(tmp_path, f"{host}:1"))
        assert endpoints(self.settings(tmp_path, f"{host}:1", FD_API_KEY="k")).http == (host, 1)

    @pytest.mark.parametrize("host", ["127.nosuch.invalid", "a" * 80])
    def test_a_name_without_an_address_is_refused(self, tmp_path: Path, host: str) -> None:
        with pytest.raises(ConfigurationError, match=f"FDCACHE_HTTP_ADDRESS: {host} has no address"):
            endpoints(self.settings(tmp_path, f"{host}:1"))

    def test_an_address_that_others_reach_has_any_name_and_needs_a_key(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fdcache.service.server.http_server.make_app", partial(make_app, timeout=0.2))
        server = HttpServer(f"ipc://{tmp_path}/none.sock", ("k",), "0.0.0.0", 0)
        server.start()
        try:
            for path, key, status in (("/healthz", "", 200), ("/metrics", "", 401), ("/metrics", "k", 503)):
                line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT)
                headers = {"Host": "cache.example:9470"} | ({"Authorization": f"Bearer {key}"} if key else {})
                line.request("GET", path, headers=headers)
                assert line.getresponse().status == status
                line.close()
        finally:
            server.stop()
        assert list(tmp_path.iterdir()) == []

    def test_the_address_that_was_bound_decides(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="reachable from other machines"):
            HttpServer(f"ipc://{tmp_path}/none.sock", (), "0.0.0.0", 0)
        assert list(tmp_path.iterdir()) == []
