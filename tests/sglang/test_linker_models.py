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


OPTIONS: dict[str, dict[str, Any]] = {"states": {"page_size": 1, "max_mamba_cache_size": 64}}
"""SGLang keeps states with pages of one token alone, unless its kernels for GPUs note them on the way."""

Made = Callable[[str], tuple[Path, list[Answer], list[Answer]]]


def later(prompt: list[int], answer: Answer) -> list[int]:
    """Return a conversation that goes on."""
    return [*prompt, *answer.tokens, 7, 8, 9]


@pytest.fixture(scope="module")
def made(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a model of a kind, and what SGLang answers without fdcache, to prompts and when they go on.

    The first token of a prompt matters to the answer, unless it is out of all windows.
    """
    known: dict[str, tuple[Path, list[Answer], list[Answer]]] = {}

    def make(kind: str) -> tuple[Path, list[Answer], list[Answer]]:
        if kind not in known:
            model = make_model(tmp_path_factory.mktemp(kind), MODELS[kind])
            with running_engine(model, disable_radix_cache=True, **OPTIONS.get(kind, {})) as engine:
                answers = [ask(engine, prompt) for prompt in prompts[:5]]
                other = [prompts[1][0], *prompts[0][1:]]
                assert kind == "windows" or not ask(engine, other).equals(answers[0])
                longer = [later(*each) for each in zip(prompts, answers, strict=False)]
                known[kind] = model, answers, [ask(engine, prompt) for prompt in longer]
        return known[kind]

    return make


@pytest.fixture
def node(tmp_path: Path, computed: list[Answer]) -> Iterator[ServiceProcess]:
    """A service that starts after other engines have ended: one that ends takes all children of its process along."""
    with service_process(tmp_path / "service", FDCACHE_HOST_MEMORY="64MiB", FDCACHE_DISCARD="0") as running:
        yield running


@pytest.mark.parametrize(("place", "pools"), [("own", 0), ("service", 2)])
def test_sliding_windows(
    prompts: list[list[int]], made: Made, node: ServiceProcess, place: str, pools: int
) -> None:
    model, computed, _ = made("windows")
    where = {"FDCACHE_SERVER": node.address} if place == "service" else {"FDCACHE_HOST_MEMORY": "16MiB"}
    if place == "service":
        node.start()
    with running_engine(model, **linker_options(**where)) as engine:
        rounds(engine, prompts[:5], computed)
        if place == "service":
            assert len(node.ask("clients")) == pools, "each pool is a client"
        # of a prompt that ends inside another one, the window at its end may not have been kept
        shorter = [*prompts[0][: 7 * PAGE], 7]
        first = ask(engine, shorter)
        flush(engine)
        assert ask(engine, shorter).equals(first)


def test_latent_attention(prompts: list[list[int]], made: Made) -> None:
    model, computed, _ = made("latents")
    with running_engine(model, **linker_options(FDCACHE_HOST_MEMORY="16MiB")) as engine:
        rounds(engine, prompts[:5], computed)


def test_states_are_found_when_a_conversation_goes_on(prompts: list[list[int]], made: Made) -> None:
    """SGLang keeps the state at the end of an answer, which is what a longer prompt begins with."""
    model, computed, continued = made("states")
    options = linker_options(FDCACHE_HOST_MEMORY="64MiB") | OPTIONS["states"]
    with running_engine(model, **options) as engine:
        for prompt, answer in zip(prompts, computed, strict=False):
            assert ask(engine, prompt).equals(answer)
        flush(engine)
        for prompt, answer, expected in zip(prompts, computed, continued, strict=False):
            longer = later(prompt, answer)
            for _ in range(5):  # a state that is read before it is loaded shows now and then
                found = asked_until(engine, longer, lambda each: each.cached.get("host", 0) > len(prompts[0]))
                assert found.tokens == expected.tokens
                # the keys of an answer, which were computed one by one, differ from those computed at once
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


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
