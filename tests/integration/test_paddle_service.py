"""The Paddle engine on the host tier of a real ``fdcache serve``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.paddle_help import ENGINE, GQA, Server, assert_as_without_cache, prompt, tokens
from tests.service_help import service_process, until


def serve_elsewhere(address: str) -> None:
    """Another engine process serves a prompt of 150 tokens and ends; its blocks stay in the service."""
    program = f"""
from dataclasses import replace
from tests.paddle_help import ENGINE, GQA, Server, prompt, tokens
server = Server(GQA, replace(ENGINE, server={address!r}))
server.serve(prompt("before", tokens(0, 150)))
server.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_an_engine_finds_what_another_process_stored_in_the_service(tmp_path: Path) -> None:
    with service_process(tmp_path / "service") as service:
        serve_elsewhere(service.address)
        until(lambda: not service.ask("clients"), "the first engine has said goodbye")
        server = Server(GQA, replace(ENGINE, server=service.address))
        tasks = server.serve(prompt("again", tokens(0, 150)), prompt("other", tokens(1, 100)))
        counters = server.fdcache.manager.get_stats().counters
        assert counters.host_hit_tokens == tasks[0].cached_tokens == 128
        assert counters.loads_failed == 0
        assert_as_without_cache(server, tasks)
        server.close()
        until(lambda: not service.ask("clients"), "the second engine has said goodbye")
        assert service.ask("integrity") == []
        assert service.terminate() == 0
        assert service.leftovers() == []
