"""SGLang's engine with FdcacheLinker and other models, and with several ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service_help import ServiceProcess, service_process
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush, linker_options, running_engine
from tests.sglang.models import WINDOWS, make_model
from tests.sglang.test_linker import from_host


def rounds(engine: Any, prompts: list[list[int]], computed: list[Answer]) -> None:
    """Ask in rounds between which pages are evicted and flushed; everything is found in the end."""
    chosen = random.Random(2)
    for _ in range(3):
        for number in chosen.sample(range(len(prompts)), len(prompts)):
            assert ask(engine, prompts[number]).equals(computed[number])
        flush(engine)
    for prompt, answer in zip(prompts, computed, strict=True):
        assert asked_until(engine, prompt, from_host).equals(answer)


@pytest.fixture(scope="module")
def windows(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    """A model with sliding windows, and the answers of SGLang without fdcache."""
    model = make_model(tmp_path_factory.mktemp("windows"), WINDOWS)
    with running_engine(model, disable_radix_cache=True, load_format="dummy") as engine:
        return model, [ask(engine, prompt) for prompt in prompts[:5]]


@pytest.fixture
def node(
    tmp_path: Path, computed: list[Answer], windows: tuple[Path, list[Answer]]
) -> Iterator[ServiceProcess]:
    """A service that starts after other engines have ended: one that ends takes all children of its process along."""
    with service_process(tmp_path / "service", FDCACHE_HOST_MEMORY="64MiB", FDCACHE_DISCARD="0") as running:
        running.start()
        yield running


@pytest.mark.parametrize("place", ["own", "service"])
def test_sliding_windows(
    prompts: list[list[int]], windows: tuple[Path, list[Answer]], node: ServiceProcess, place: str
) -> None:
    model, computed = windows
    where = {"FDCACHE_SERVER": node.address} if place == "service" else {"FDCACHE_HOST_MEMORY": "16MiB"}
    with running_engine(model, load_format="dummy", **linker_options(**where)) as engine:
        rounds(engine, prompts[:5], computed)
        if place == "service":
            assert len(node.ask("clients")) == 2, "each pool is a client"
        # of a prompt that ends inside another one, the window at its end may not have been kept
        shorter = [*prompts[0][: 7 * PAGE], 7]
        first = ask(engine, shorter)
        flush(engine)
        assert ask(engine, shorter).equals(first)


def test_two_ranks_find_what_both_have(
    model: Path,
    prompts: list[list[int]],
    computed: list[Answer],
    node: ServiceProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    with running_engine(model, tp_size=2, **linker_options(FDCACHE_SERVER=node.address)) as engine:
        expected = [ask(engine, prompt) for prompt in prompts[:4]]
        assert [answer.tokens for answer in expected] == [answer.tokens for answer in computed[:4]]
        rounds(engine, prompts[:4], expected)
        assert len(node.ask("clients")) == 2
        node.kill()
        flush(engine)
        assert ask(engine, prompts[0]).equals(expected[0])
        node.start()
        assert asked_until(engine, prompts[0], from_host).equals(expected[0])
