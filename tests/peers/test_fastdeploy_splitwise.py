"""FastDeploy's roles prefill and decode: its real scheduler, engine loops, queue and protocol, one process for each.

Every prefill, and decode's step for the first token, check all the KV that they find; every answer is the model's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.peers.fastdeploy_source import missing
from tests.service_help import until

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

_REQUESTS = 32
_SECONDS = 120.0


class Role:
    """An instance in a process of its own, and what it has answered."""

    def __init__(self, role: str, folder: Path, environment: dict[str, str], **options: Any) -> None:
        self.port = free_port()
        (folder / "run").mkdir(0o700, exist_ok=True)
        given = {"role": role, "port": self.port, "queue": free_port(), **options}
        self._log = (folder / f"{role}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.fastdeploy_splitwise", json.dumps(given)],
            env={**os.environ, "FDCACHE_RUNTIME_DIR": str(folder / "run"), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.is_ready = False
        self.answers: dict[str, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            answer = json.loads(line) if line.startswith("{") else {}
            self.is_ready |= "ready" in answer
            self.summary = answer.get("summary", self.summary)
            if "name" in answer:
                self.answers[answer["name"]] = answer

    def wait(self) -> None:
        """Wait until it serves."""
        until(lambda: self.is_ready or self.process.poll() is not None, "it is ready", _SECONDS)
        assert self.is_ready, Path(self._log.name).read_text()[-3000:]

    def write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it, and the processes of its queue."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Pair:
    """A prefill and a decode instance, and the router between them."""

    def __init__(self, prefill: Role, decode: Role) -> None:
        self.prefill, self.decode = prefill, decode
        self.jobs: dict[str, tuple[list[int], int]] = {}

    def ask(self, name: str, prompt: list[int], outputs: int) -> None:
        """Send a request to both, as FastDeploy's router does."""
        info = {
            "prefill_ip": "127.0.0.1",
            "decode_ip": "127.0.0.1",
            "prefill_connector_port": self.prefill.port,
            "decode_connector_port": self.decode.port,
            "transfer_protocol": "rdma",
            "decode_tp_size": 1,
        }
        self.jobs[name] = (prompt, outputs)
        for role in (self.prefill, self.decode):
            role.write(json.dumps({"name": name, "prompt": prompt, "outputs": outputs, "info": info}))

    def wrong_answers(self) -> dict[str, Any]:
        """Return the answers that are not the model's, beside what the model answers."""
        from tests.peers.fastdeploy_worker import answer_to

        found = {}
        for name, (prompt, outputs) in self.jobs.items():
            answer, expected = self.decode.answers[name], answer_to(prompt, max(outputs, 2))
            if answer["tokens"][:-1] != expected:
                found[name] = (answer, expected)
        return found

    def _all_answered(self) -> bool:
        """Ask again for what decode has preempted, as FastDeploy's router does."""
        for name, answer in list(self.decode.answers.items()):
            if name in self.jobs and "does not have enough blocks" in (answer["error"] or ""):
                self.ask(f"{name}-retry", *self.jobs.pop(name))
        return all(name in self.decode.answers for name in self.jobs)

    def serve(self, *, garbage: bool = False) -> dict[str, Any]:
        """Wait for every answer and the end of both; return what decode says about the whole.

        With ``garbage`` prefill reads loads that fail, whose tokens are dropped.
        """
        until(self._all_answered, "decode has answered", _SECONDS)
        for role in (self.decode, self.prefill):
            role.write("")
            role.process.wait(_SECONDS)
        until(lambda: self.decode.summary and self.prefill.summary, "both have ended", _SECONDS)
        for role in (self.prefill, self.decode):
            assert role.summary["tracebacks"] == []
            assert role.summary["wrong"] == [] or (garbage and role is self.prefill)
            assert set(role.summary["held"].values()) == {0}
        return self.decode.summary


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


@contextmanager
def pair(
    folder: Path, *, decode: dict[str, str] | None = None, wait: int = 30, **options: Any
) -> Iterator[Pair]:
    environment = {"FDCACHE_TRANSFER": "ipc", "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS": f"{wait}"}
    roles = [
        Role("prefill", folder, environment, **options),
        Role("decode", folder, {**environment, **(decode or {})}, **options),
    ]
    try:
        for role in roles:
            role.wait()
        yield Pair(*roles)
    finally:
        for role in roles:
            role.end()


def ask_many(roles: Pair) -> None:
    """Ask for prompts of which some begin alike."""
    random = np.random.default_rng(3)
    for index in range(_REQUESTS):
        shared = np.random.default_rng(index % 8).integers(3, 50, 40 + 11 * (index % 8)).tolist()
        own = random.integers(3, 50, int(random.integers(1, 30))).tolist()
        roles.ask(f"{index}", shared + own, int(random.integers(1, 20)))


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("write_through", marks=pytest.mark.slow),
        pytest.param("write_through_selective", marks=pytest.mark.slow),
        "write_back",
    ],
)
def test_every_request_is_handed_over_by_fastdeploys_protocol(tmp_path: Path, policy: str) -> None:
    with pair(tmp_path, policy=policy) as roles:
        ask_many(roles)
        summary = roles.serve()
        assert roles.wrong_answers() == {}
        assert summary["checked"]
        assert summary["handovers"]["done"] > _REQUESTS // 2
        assert set(summary["handovers"]) <= {"done", "declined"}


@pytest.mark.slow
def test_two_ranks_and_little_room(tmp_path: Path) -> None:
    """Decode evicts blocks for what it fetches, in plans that no batch carries, and tells prefill to ask again."""
    with pair(tmp_path, policy="write_back", ranks=2, blocks=40) as roles:
        ask_many(roles)
        summary = roles.serve()
        assert roles.wrong_answers() == {}
        assert summary["handovers"]["done"]


@pytest.mark.slow
def test_what_cannot_be_fetched_is_computed(tmp_path: Path) -> None:
    refused = {
        "FDCACHE_LOOKAHEAD_TOKENS": "1"
    }  # by prefill, which then holds the blocks until its wait is over
    with pair(tmp_path, decode=refused, wait=1) as roles:
        ask_many(roles)
        summary = roles.serve()
        assert roles.wrong_answers() == {}
        assert set(summary["handovers"]) <= {"refused", "declined"}


@pytest.mark.slow
def test_loads_that_fail_at_prefill_reach_no_client(tmp_path: Path) -> None:
    with pair(tmp_path, policy="write_back", blocks=24, failing=0.3) as roles:
        ask_many(roles)
        roles.serve(garbage=True)
        assert roles.wrong_answers() == {}
