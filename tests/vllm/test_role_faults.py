"""Random kills, stops and aborts of prefill and decode engines behind a router: every answer is that of one engine."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from fdcache.errors import TransferNotFoundError
from fdcache.transfer.nixl import find_nixl
from tests.service_help import until
from tests.vllm.engine import make_tokenizer
from tests.vllm.served import Server, completion, free_port, running
from tests.vllm.test_roles import Pair

try:
    find_nixl()
except TransferNotFoundError:
    pytest.skip(
        "vLLM's memory on a CPU is read through NIXL, which is not installed", allow_module_level=True
    )

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

_ROLES = ("kv_producer", "kv_consumer")
_FAULTS = [
    (fault, role) for fault, times in (("stop", 8), ("abort", 10), ("kill", 2)) for role in _ROLES * times
]
_CLIENTS, _TOKENS = 3, 12


class Clients:
    """Threads that ask a router for answers without a pause, again if there is none, and compare them."""

    def __init__(self, router: Server, alone: Server) -> None:
        self._router, self._alone = router, alone
        self._end = threading.Event()
        self.right = self.again = 0
        self.wrong: list[tuple[list[int], list[int]]] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(_CLIENTS)]

    def __enter__(self) -> Clients:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for each in self._threads:
            each.join()

    def until_more_are_right(self) -> None:
        """Wait for an answer."""
        before = self.right
        until(lambda: self.right > before, "an answer after a fault", 240)

    def _run(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self._end.is_set():
            prompt = [chosen.randrange(3, 500) for _ in range(chosen.randrange(17, 220))]
            expected = self._alone.tokens(prompt, _TOKENS)
            while not self._end.is_set():
                with suppress(OSError, HTTPException, ValueError, KeyError):
                    answer = self._router.tokens(prompt, _TOKENS)
                    with self._lock:
                        self.right += answer == expected
                        self.wrong += [(answer, expected)] * (answer != expected)
                    break
                with self._lock:
                    self.again += 1
                time.sleep(0.2)


@pytest.mark.parametrize("options", [[], ["--at-once"]], ids=["after prefill", "at once"])
def test_answers_are_those_of_one_engine_whatever_becomes_of_the_others(
    options: list[str], model: Path, tmp_path: Path
) -> None:
    pair, chosen = Pair(make_tokenizer(model), tmp_path), random.Random(7)
    ports = {role: engine.port for role, engine in zip(_ROLES, (pair.prefill, pair.decode), strict=True)}
    command = [sys.executable, "-m", "examples.openai_router", "--port", str(free_port())]
    command += [f"--prefill=http://127.0.0.1:{ports['kv_producer']}"]
    command += [f"--decode=http://127.0.0.1:{ports['kv_consumer']}", *options]
    try:
        with running(pair.prefill, pair.decode, pair.alone):
            router = Server(command, int(command[4]), tmp_path / "router.log")
            with running(router), Clients(router, pair.alone) as clients:
                faults = chosen.sample(_FAULTS, len(_FAULTS))
                for fault, role in faults:
                    _do(fault, role, pair, ports, router, chosen)
                    clients.until_more_are_right()
            assert not clients.wrong, clients.wrong[:2]
            assert clients.right > len(faults)
            until(lambda: pair.is_clean, "the end of every hand-over")
            assert pair.decode.counter("vllm:fdcache_inconsistencies_total") == 0
    finally:
        pair.prefill.kill()
        pair.decode.kill()


def _do(
    fault: str, role: str, pair: Pair, ports: dict[str, int], router: Server, chosen: random.Random
) -> None:
    """Kill an engine and start another at its port, stop one for a while, or let the client of a request go."""
    engine = pair.prefill if role == "kv_producer" else pair.decode
    if fault == "kill":
        engine.kill()
        made = pair.start(role, ports[role])
        if role == "kv_producer":
            pair.prefill = made
        else:
            pair.decode = made
        made.wait()
    elif fault == "stop":
        os.killpg(engine.process.pid, signal.SIGSTOP)
        time.sleep(chosen.uniform(0.1, 2.0))
        os.killpg(engine.process.pid, signal.SIGCONT)
    else:
        prompt = [chosen.randrange(3, 500) for _ in range(200)]
        with suppress(OSError, HTTPException):
            router.post("/v1/completions", completion(prompt, 100), timeout=chosen.uniform(0.01, 1.0))
