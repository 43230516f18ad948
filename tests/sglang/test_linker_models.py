"""SGLang's engine with FdcacheLinker and other models, and with several ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service_help import ServiceProcess, service_process
from tests.sglang.engine import PAGE, Answer, ask, asked_until, flush, linker_options, running_engine
from tests.sglang.models import LATENTS, STATES, WINDOWS, make_model
from tests.sglang.test_linker import from_host

MODELS = {"windows": WINDOWS, "latents": LATENTS, "states": STATES}


def rounds(engine: Any, prompts: list[list[int]], computed: list[Answer]) -> None:
    """Ask in rounds between which pages are evicted and flushed; everything is found in the end."""
    chosen = random.Random(2)
    for _ in range(3):
        for number in chosen.sample(range(len(prompts)), len(prompts)):
            assert ask(engine, prompts[number]).equals(computed[number])
        flush(engine)
    for prompt, answer in zip(prompts, computed, strict=True):
        assert asked_until(engine, prompt, from_host).equals(answer)


Made = Callable[[str], tuple[Path, list[Answer]]]


@pytest.fixture(scope="module")
def made(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a model of a kind, and the answers of SGLang without fdcache, to which each page of a prompt matters."""
    known: dict[str, tuple[Path, list[Answer]]] = {}

    def make(kind: str) -> tuple[Path, list[Answer]]:
        if kind not in known:
            model = make_model(tmp_path_factory.mktemp(kind), MODELS[kind])
            with running_engine(model, disable_radix_cache=True) as engine:
                answers = [ask(engine, prompt) for prompt in prompts[:5]]
                other = [prompts[1][0], *prompts[0][1:]]
                assert kind == "windows" or not ask(engine, other).equals(answers[0])
            known[kind] = model, answers
        return known[kind]

    return make


@pytest.fixture
def node(tmp_path: Path, computed: list[Answer]) -> Iterator[ServiceProcess]:
    """A service that starts after other engines have ended: one that ends takes all children of its process along."""
    with service_process(tmp_path / "service", FDCACHE_HOST_MEMORY="64MiB", FDCACHE_DISCARD="0") as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "place", "pools"),
    [("windows", "own", 2), ("windows", "service", 2), ("latents", "service", 1), ("states", "own", 2)],
)
def test_other_models(
    prompts: list[list[int]], made: Made, node: ServiceProcess, kind: str, place: str, pools: int
) -> None:
    model, computed = made(kind)
    where = {"FDCACHE_SERVER": node.address} if place == "service" else {"FDCACHE_HOST_MEMORY": "16MiB"}
    if place == "service":
        node.start()
    with running_engine(model, **linker_options(**where)) as engine:
        rounds(engine, prompts[:5], computed)
        if place == "service":
            assert len(node.ask("clients")) == pools, "each pool is a client"
        # of a prompt that ends inside another one, the window or state at its end may not have been kept
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
    node.start()
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
