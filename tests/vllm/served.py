"""vLLM's own servers as processes on this machine, and requests to them over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.vllm.engine import BLOCK_SIZE

_START_SECONDS = 500.0  # a slow machine inspects the model for a minute


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A process that answers at a port of this machine."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        health: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port, self.log = port, log
        self._health = health
        variables = os.environ | (environment or {})
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=variables, start_new_session=True
            )

    def wait(self) -> None:
        """Wait until it answers."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self._health}", timeout=5):
                    return
            except (OSError, HTTPException):
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-4000:])

    def kill(self) -> None:
        """Kill it and its children at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def post(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        """Return the answer to a request. Raises ``OSError`` if there is none."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def tokens(self, prompt: Sequence[int], num_tokens: int = 8, **fields: Any) -> list[int]:
        """Return the tokens that a prompt is answered with."""
        answer = self.post("/v1/completions", completion(prompt, num_tokens, **fields))
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def counter(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(value) for _, value in found)


def completion(prompt: Sequence[int], num_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a request for a completion."""
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def start_engine(
    model: Path,
    log: Path,
    transfer: dict[str, Any] | None,
    environment: Mapping[str, str] | None = None,
    **options: object,
) -> Server:
    """Start ``vllm serve`` with the small model; ``options`` are more of its arguments, None for none of that name."""
    port = int(str(options.get("port", 0))) or free_port()
    given = {
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": "model",
        "dtype": "float32",
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": 60,
        "max-model-len": 512,
        "max-num-seqs": 4,
        "max-num-batched-tokens": 64,
        "kv-cache-memory-bytes": 1 << 28,
        "compilation-config": json.dumps({"custom_ops": ["none"]}),
        "seed": 0,
        **({} if transfer is None else {"kv-transfer-config": json.dumps(transfer)}),
        **options,
    }
    arguments = [
        text for name, value in given.items() if value is not None for text in (f"--{name}", str(value))
    ]
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    return Server([*serve, str(model), "--enforce-eager", *arguments], port, log, environment=environment)


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Wait for servers, and kill them in the end."""
    try:
        for each in servers:
            each.wait()
        yield
    finally:
        for each in servers:
            each.kill()
