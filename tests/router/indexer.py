"""Dynamo's indexer as a process, and what it knows compared with what a service has."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.error import URLError

from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from tests.router.environments import interpreter
from tests.service_engine import BLOCK
from tests.service_help import TIMEOUT, until

MODEL = "m"


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Prompt:
    """Tokens of a tenant."""

    tokens: tuple[int, ...]
    tenant: str | None = None


Found = tuple[int, int, int]
"""Tokens found on devices, there or in the host tier, and in any tier, from the start on."""


class Indexer:
    """A running indexer. ``worker`` is the number of a service."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return json.loads(answer.read() or b"null")

    def is_there(self) -> bool:
        try:
            self.call("/workers")
        except (URLError, ConnectionError):
            return False
        return True

    def follow(self, worker: int, address: str, replay: str | None = None) -> None:
        """Subscribe to another service."""
        body = {"instance_id": worker, "endpoint": address, "model_name": MODEL, "block_size": BLOCK}
        self.call("/register", body | ({} if replay is None else {"replay_endpoint": replay}))

    def query(self, prompt: Prompt) -> dict[str, Any]:
        """Return what the indexer answers, by worker."""
        body: dict[str, Any] = {"token_ids": prompt.tokens, "model_name": MODEL}
        if prompt.tenant is not None:
            body["cache_salt"] = prompt.tenant
        found: dict[str, Any] = self.call("/query", body)["instances"]
        return found

    def ask(self, prompt: Prompt, worker: int = 1) -> Found:
        """Return what a request with this prompt would find at a worker."""
        found = self.query(prompt).get(str(worker))
        return (0, 0, 0) if found is None else (found["gpu"], found["cpu"], found["disk"])


@contextmanager
def indexer(folder: Path, *addresses: str, block_size: int = BLOCK) -> Iterator[Indexer]:
    """Run an indexer that follows services at these addresses, the first as worker 1."""
    python, port = interpreter("dynamo"), free_port()
    assert python is not None
    workers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
    with (folder / "indexer.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(python), "-m", "dynamo.indexer", "--block-size", str(block_size), "--port", str(port)),
                *("--workers", workers, "--model-name", MODEL),
            ],
            stdout=log,
            stderr=log,
        )
        try:
            made = Indexer(port)
            until(made.is_there, "the indexer answers")
            yield made
        finally:
            process.kill()
            process.wait()


def in_service(address: str, prompt: Prompt) -> Found:
    """Return what a service has of a prompt."""
    with Client(address) as client:
        found = Control(client).explain(Prefix(prompt.tokens, tenant=prompt.tenant))
    places = [(bool(block.devices), block.tier == "host", block.tier is not None) for block in found.blocks]
    device, host, known = (leading(each[i] for each in places) for i in range(3))
    return device * BLOCK, max(device, host) * BLOCK, max(device, known) * BLOCK


def leading(values: Iterable[bool]) -> int:
    """Return how many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, values))
