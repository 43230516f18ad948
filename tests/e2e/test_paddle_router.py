"""The router of the examples with a prefill and a decode engine, one of which may die or stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from examples.paddle_engine.server import Ask
from examples.pd_router import Router
from tests.paddle_help import GQA, Server, prompt, tokens
from tests.service_help import until

COUNT = 12
pytestmark = pytest.mark.slow


@contextmanager
def engine(role: str, folder: Path, ranks: int = 1, theirs: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in a process of its own, or of each rank, whose peers have ``theirs`` ranks."""
    model = [f"--{each.name.replace('_', '-')}={getattr(GQA, each.name)}" for each in fields(GQA)]
    command = [sys.executable, "-m", "examples.paddle_engine", "--role", role, *model]
    given = {
        "FDCACHE_TRANSFER_DIR": str(folder),
        "FDCACHE_TRANSFER_ADDRESS": f"ipc://{folder}/{role}-rank",
        "FDCACHE_TRANSFER_TIMEOUT": "2",
        "FDCACHE_TRANSFER_PEER_RANKS": str(theirs),
    }
    command += ["--listen", f"ipc://{folder}/{role}", "--device-blocks", "64", "--ranks", str(ranks)]
    process = subprocess.Popen(command, env={**os.environ, **given}, start_new_session=True)
    try:
        yield process
    finally:
        signal_all(process, signal.SIGKILL)
        process.wait()


def signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to an engine and the processes of its ranks."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@pytest.fixture(scope="module")
def prompts() -> list[Ask]:
    return [
        Ask(
            f"p{seed}",
            tokens(seed, 60 + 29 * (seed % 5), GQA.vocab),
            8,
            seed=seed,
            temperature=0.5 * (seed % 2),
        )
        for seed in range(COUNT)
    ]


@pytest.fixture(scope="module")
def expected(prompts: list[Ask]) -> dict[str, list[int]]:
    """What one engine that caches nothing generates."""
    alone = Server(GQA, cached=False)
    tasks = alone.serve(
        *(prompt(each.name, each.tokens, temperature=each.temperature, seed=each.seed) for each in prompts)
    )
    return {task.name: [sample.token for sample in task.samples] for task in tasks}


class Deployment:
    """Two engines behind a router."""

    def __init__(self, stack: ExitStack, folder: Path, ranks: tuple[int, int] = (1, 1)) -> None:
        self._stack, self._folder = stack, folder
        self._ranks = {"prefill": ranks, "decode": ranks[::-1]}
        self.processes = {role: self.start(role) for role in ("prefill", "decode")}
        self.router = Router(f"ipc://{folder}/prefill", f"ipc://{folder}/decode")

    def start(self, role: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(engine(role, self._folder, *self._ranks[role]))

    def serve(self, prompts: list[Ask], fault: Callable[[], None]) -> dict[str, list[int]]:
        """Serve half of the prompts, let something happen, and serve the others."""
        router = self.router
        answers = dict(router.serve(prompts[: COUNT // 2]))
        for each in prompts[COUNT // 2 : -2]:
            router.ask(each)
        fault()
        return {**answers, **router.serve(prompts[-2:])}

    def ended(self, role: str) -> dict[str, int]:
        """Return how the hand-overs of an engine have ended."""
        here = getattr(self.router, role).here
        return here.ended if here else {}


@pytest.fixture
def make_deployment(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    with ExitStack() as stack:
        yield partial(Deployment, stack, tmp_path)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=["1-1", "2-1", "1-2"])
def test_the_tokens_are_those_of_one_engine(
    make_deployment: Callable[..., Deployment],
    prompts: list[Ask],
    expected: dict[str, list[int]],
    ranks: tuple[int, int],
) -> None:
    deployment = make_deployment(ranks)
    assert deployment.serve(prompts, lambda: None) == expected

    def told() -> bool:
        deployment.router.step()
        return deployment.ended("decode").get("fetch done", 0) >= COUNT // 2

    until(told, "decode has fetched blocks")
    deployment.processes["prefill"].terminate()
    deployment.processes["decode"].terminate()
    assert {each.wait() for each in deployment.processes.values()} == {0}


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("prefill killed", (1, 1)),
        ("prefill stopped", (1, 1)),
        ("decode killed", (1, 1)),
        ("prefill killed", (2, 1)),
        ("decode killed", (1, 2)),
    ],
)
def test_the_tokens_are_the_same_when_an_engine_fails(
    make_deployment: Callable[..., Deployment],
    prompts: list[Ask],
    expected: dict[str, list[int]],
    what: str,
    ranks: tuple[int, int],
) -> None:
    deployment = make_deployment(ranks)
    role, _, how = what.partition(" ")
    process = deployment.processes[role]

    def fault() -> None:
        signal_all(process, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "killed":
            process.wait()
            deployment.start(role)

    assert deployment.serve(prompts, fault) == expected
    signal_all(process, signal.SIGCONT)
