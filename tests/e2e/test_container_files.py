"""Commands of the container files, run as processes: engines share the tier of the service beside them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.containers import ROOT, Container, compose, kubernetes
from tests.fastdeploy_help import BLOCK
from tests.service_help import next_line, spawned

SMALL = {"FDCACHE_HOST_MEMORY": "64MiB"}
"""Less than the files', which are for nodes."""


def check(container: Container, **others: str) -> None:
    """Run the check that precedes the engine, and expect no problem."""
    done = subprocess.run(
        container.fdcache,
        env=container.process(others, writes=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def serve_prompt(container: Container, **others: str) -> Any:
    """Run an engine process of the container; it stands in for FastDeploy and uses the adapter in the same way."""
    assert "fastdeploy" in container.command[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fastdeploy_engine"],
        env=container.process(others),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"127.0.0.1:{listening.getsockname()[1]}"


def both(directory: Path) -> dict[str, Container]:
    return compose(directory, "compose.yaml", "compose.serve.yaml")


@pytest.mark.parametrize("containers", [both, kubernetes], ids=["compose", "kubernetes"])
def test_a_second_engine_hits_the_blocks_of_the_first(
    containers: Callable[[Path], dict[str, Container]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = containers(tmp_path_factory.mktemp("c"))  # a short path: a socket's has at most 107 bytes
    service, engine = found["serve"], found["engine"]
    always = SMALL | {"FDCACHE_WRITE_POLICY": "write_through", "FDCACHE_RPC_TIMEOUT": "60s"}
    check(found["check"], **always)
    environment = service.process(SMALL | {"FDCACHE_HTTP_ADDRESS": free_address()})
    with spawned(*service.fdcache, env=environment, stderr=subprocess.DEVNULL) as process:
        while not next_line(process).startswith("ready"):
            pass
        first, second = serve_prompt(engine, **always), serve_prompt(engine, **always)
        assert first["server"] == service.here(service.environment["FDCACHE_SERVER"])
        assert first["found"] == [{"device": 0, "host": 0}, {"device": 4, "host": 0}]
        assert second["found"] == [{"device": 0, "host": 4}, {"device": 4, "host": 0}]
        assert (first["host_hit_tokens"], second["host_hit_tokens"]) == (0, 4 * BLOCK)
        process.terminate()
        assert process.wait() == 0
    again = service.process(SMALL | {"FDCACHE_HTTP_ADDRESS": free_address(), "FDCACHE_DISCARD": "1"})
    with spawned(*service.fdcache, env=again, stderr=subprocess.DEVNULL) as process:
        lines = []
        while not (line := next_line(process)).startswith("ready"):
            lines.append(line.split())
        assert ["recovered", "4", "blocks"] in lines
        process.terminate()
        assert process.wait() == 0
    assert not [
        path for folder in service.mounts.values() for path in folder.rglob("fdcache*") if path.is_file()
    ]


def test_variables_of_the_compose_file_take_effect_in_its_engine(tmp_path: Path) -> None:
    engine = compose(tmp_path, "compose.yaml")["engine"]
    given = {
        "FDCACHE_WRITE_POLICY": "write_back",
        "FDCACHE_DEVICE_BLOCKS": "24",
        "FDCACHE_HOST_MEMORY": "1MiB",
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": "/tmp/blocks",
        "FDCACHE_STORAGE_SIZE": "1MiB",
        "FDCACHE_SWAP_DRAIN_TIMEOUT": "7s",
        "FDCACHE_PLAN_TIMEOUT": "8s",
        "FDCACHE_EVENT_BUFFER": "100",
        "FDCACHE_PREFIX_CACHING": "0",
        "FDCACHE_VERIFY": "all",
    }
    told = serve_prompt(Container(engine.command, engine.environment | given, engine.mounts))
    assert told.pop("host_blocks") > 30
    assert told == {
        "found": [{"device": 0, "host": 0}] * 2,
        "host_hit_tokens": 0,
        "server": None,
        "write_policy": "write_back",
        "device_blocks": [24, 24],
        "storage": "local",
        "drain_timeout": 7.0,
        "plan_timeout": 8.0,
        "event_buffer": 100,
        "verify": "all",
    }
