"""FdcacheTier below vLLM's own tiering manager, over the service of the node."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="this vLLM has other tiers")


from tests.service_help import LocalService, local_service, until
from tests.vllm.offloading import Offloading, counted, fill, keys_of


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path / "service", FDCACHE_HOST_MEMORY="4MiB") as service:
        yield service


def below(service: LocalService, **settings: Any) -> list[dict[str, Any]]:
    """The tier over the service of the node, and no folder."""
    named = {"FDCACHE_SERVER": service.address, "FDCACHE_RPC_TIMEOUT": "5", **settings}
    return [{"type": "FdcacheTier", "module_path": "fdcache.integrations.vllm.tier", **named}]


def joined(service: LocalService, **changes: Any) -> Offloading:
    """An engine that has begun its session: its first chunks are stored and gone from its memory."""
    offloading = Offloading(Path(), tiers=below(service), **changes)
    prompts = itertools.count(os.getpid() << 8)

    def stores() -> bool:
        fill(offloading, [next(prompts)])
        return counted(offloading, "stored") > 0

    until(stores, "the service takes chunks")
    return offloading


def test_two_engines_find_each_others_chunks_in_the_service_of_the_node(service: LocalService) -> None:
    first, second = joined(service), joined(service)
    fill(first, range(8))
    assert [second.load(keys_of(prompt, 8)) for prompt in range(8)] == [8] * 8
    fill(second, range(20, 28))
    assert [first.load(keys_of(prompt, 8)) for prompt in (*range(20, 28), 3)] == [8] * 9
    first.close()
    assert second.load(keys_of(1, 8)) == 8
    second.close()


def pushed_out(offloading: Offloading, prompt: int) -> int:
    """Store a prompt and others that push it out of vLLM's memory; return how many of its chunks are found."""
    fill(offloading, range(prompt, prompt + 8))
    return offloading.load(keys_of(prompt, 8))


def has_stored(service: LocalService, chunks: int) -> bool:
    return bool(service.ask("storage")["blocks"] >= chunks)


def test_chunks_that_left_the_services_memory_come_from_its_storage(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "files")}
    settings = {"FDCACHE_HOST_MEMORY": "2MiB", "FDCACHE_STORAGE_SIZE": "16MiB", **storage}
    with local_service(tmp_path / "service", **settings) as service:
        first, second = joined(service), joined(service)
        for prompt in range(100):  # three times as much as the memory of the service
            fill(first, [prompt])
            # A disk that is slower than the engine loses chunks, which are counted: nothing waits for it.
            until(partial(has_stored, service, 8 * (prompt + 1)), "the chunks are in storage")
        until(lambda: all(second.load(keys_of(prompt, 8)) == 8 for prompt in range(60)), "all are found")
        first.close()
        second.close()


def test_without_the_service_chunks_are_computed_and_found_once_it_is_back(tmp_path: Path) -> None:
    service = LocalService(tmp_path / "service")
    offloading = joined(service)
    fill(offloading, range(8))
    service.crash()
    prompts = itertools.count(1000, 8)
    until(lambda: pushed_out(offloading, next(prompts)) == 0, "nothing is found without it")
    assert offloading.load(keys_of(next(prompts) - 1, 8)) == 8, "vLLM's own memory has the last prompt"
    with local_service(tmp_path / "service"):
        until(lambda: pushed_out(offloading, next(prompts)) == 8, "chunks are stored and found again")
        offloading.close()


@pytest.mark.parametrize("change", [{"model": "another"}, {"groups": 2}, {"FDCACHE_WEIGHTS": "tuned"}])
def test_engines_of_other_models_find_nothing_in_the_service(
    service: LocalService, change: dict[str, Any]
) -> None:
    first = joined(service)
    fill(first, range(4))
    weights = {name: change[name] for name in change if name.startswith("FDCACHE_")}
    others = {name: change[name] for name in change if name not in weights}
    other = Offloading(Path(), tiers=below(service, **weights), **others)
    prompts = itertools.count(1000, 8)
    until(lambda: pushed_out(other, next(prompts)) == 8, "its own chunks are found")
    assert other.load(keys_of(0, 8)) == 0
    first.close()
    other.close()


def test_random_prompts_of_two_engines_get_their_own_bytes(service: LocalService) -> None:
    chosen = random.Random(2)
    engines = [joined(service), joined(service)]
    found = 0
    for turn in range(400):
        offloading, keys = chosen.choice(engines), keys_of(chosen.randrange(60), chosen.randrange(1, 17))
        if chosen.random() < 0.5:
            offloading.store(keys)
        else:
            found += offloading.load(keys)
        if turn % 3 == 0:
            offloading.step()
    assert found > 0
    for offloading in engines:
        offloading.settle()
        offloading.close()
