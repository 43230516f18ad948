"""Weights that are replaced in a running engine: both doors find nothing of the former ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.service_help import ServiceProcess
from tests.sglang.engine import (
    Answer,
    ask,
    asked_until,
    flush,
    linker_options,
    running_engine,
    storage_options,
)
from tests.sglang.passages import WHOLE
from tests.sglang.test_engine import from_storage
from tests.sglang.test_linker import from_host
from tests.vllm.engine import make_model

DOORS = [
    pytest.param(linker_options, from_host, id="linker"),
    pytest.param(storage_options, from_storage, id="storage"),
]
Door = Callable[..., dict[str, Any]]
Found = Callable[[Answer], bool]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def recomputed(other: Path, prompts: list[list[int]]) -> list[Answer]:
    """The answers of the other weights, without a cache."""
    with running_engine(other, disable_radix_cache=True) as engine:
        return [ask(engine, prompt) for prompt in prompts[:2]]


@contextmanager
def serving(service: ServiceProcess, model: Path, options: Door) -> Iterator[Any]:
    """Run an engine at the service, which is started anew: an engine that ends takes it along."""
    service.kill()
    service.start()
    with running_engine(model, **options(FDCACHE_SERVER=service.address)) as engine:
        yield engine


@pytest.mark.parametrize(("options", "found"), DOORS)
def test_pages_of_former_weights_are_not_found(
    options: Door,
    found: Found,
    model: Path,
    other: Path,
    prompts: list[list[int]],
    computed: list[Answer],
    recomputed: list[Answer],
    service: ServiceProcess,
) -> None:
    assert computed[0].tokens != recomputed[0].tokens
    with serving(service, model, options) as engine:
        assert ask(engine, prompts[0]).equals(computed[0])
        assert asked_until(engine, prompts[0], found).equals(computed[0])
        flush(engine)  # an update fails while SGLang is busy, as with what it has answered last
        done = engine.update_weights_from_disk(str(other))
        assert done[0], done
        assert ask(engine, prompts[0]).equals(recomputed[0])
        assert asked_until(engine, prompts[0], found).equals(recomputed[0])
        _load_tensors(engine, model)  # the first weights again, which SGLang does not name
        answer = ask(engine, prompts[0])
        assert answer.equals(computed[0])
        assert not found(answer)
        assert asked_until(engine, prompts[0], found).equals(computed[0])
    with serving(service, model, options) as engine:  # the pages of its weights were kept
        answer = asked_until(engine, prompts[0], found)
        assert answer.equals(computed[0])


@pytest.mark.parametrize(("options", "found"), DOORS)
def test_nothing_is_found_or_stored_between_an_update_and_a_flush(
    options: Door,
    found: Found,
    model: Path,
    other: Path,
    prompts: list[list[int]],
    recomputed: list[Answer],
    service: ServiceProcess,
) -> None:
    with serving(service, model, options) as engine:
        ask(engine, prompts[1])
        asked_until(engine, prompts[1], found)
        _load_tensors(engine, other, flush_cache=False)
        ask(engine, prompts[1])  # from SGLang's own device pages, of the former weights
        longer = [*prompts[1][:WHOLE], *prompts[0][:64], 7]
        ask(engine, longer)  # pages of both weights
        flush(engine)
        assert ask(engine, prompts[1]).equals(recomputed[1])
        assert asked_until(engine, prompts[1], found).equals(recomputed[1])


def _load_tensors(engine: Any, folder: Path, **options: Any) -> None:
    tensors = list(load_file(folder / "model.safetensors").items())
    engine.begin_weight_update()
    engine.update_weights_from_tensor(tensors, **options)
    engine.end_weight_update()
