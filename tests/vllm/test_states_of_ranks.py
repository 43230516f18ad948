"""Latents beside states with two ranks: what both have alike is kept once, and the states of each by itself."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

from tests.service_help import local_service
from tests.vllm.stand_in import StandIn
from tests.vllm.test_families import FAMILIES, conversations, size_of

HYBRIDS = ("Kimi Linear", "GLM-5 Flash")
PAGE = 32


def engine_of(family: str, model: Path, num_blocks: int | None = None, **options: Any) -> StandIn:
    """Two ranks of a family, by default with device blocks that are too few for all prompts."""
    specs, _, room = FAMILIES[family]
    if "FDCACHE_SERVER" not in options:
        options.setdefault("FDCACHE_HOST_MEMORY", "64MiB")
    return StandIn(model, specs, num_blocks=num_blocks or room, block_size=size_of(specs), ranks=2, **options)


def ask_twice(engine: StandIn) -> None:
    """Ask for conversations twice, a few at a time."""
    for turn in range(2):
        for number, prompt in enumerate(conversations()):
            engine.add(f"{turn}.{number}", prompt)
            if number % 3 == 2:
                engine.run()
        engine.run()


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("memory", ["64MiB", "1MiB"])
def test_each_rank_reads_the_latents_of_both_and_its_own_states(
    family: str, memory: str, model: Path
) -> None:
    engine = engine_of(family, model, FDCACHE_HOST_MEMORY=memory)
    layout = engine.manager.layout
    assert (layout.replicas, layout.record_ranks) == (2, 1)
    ask_twice(engine)
    counters = engine.manager.get_stats().counters
    assert counters.host_hit_tokens > 500
    assert (engine.manager.get_stats().host.evictions > 0) == (memory == "1MiB")
    assert engine.wrong == 0
    for number in range(12):
        assert engine.answers[f"0.{number}"][-8:] == engine.answers[f"1.{number}"][-8:]
    engine.close()


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_taken_for_alike_are_noticed(
    family: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each rank then has the states of one of them."""
    monkeypatch.setattr("fdcache.integrations.vllm.config.groups_of_ranks", lambda groups, ranks: groups)
    engine = engine_of(family, model)
    ask_twice(engine)
    assert engine.manager.get_stats().counters.host_hit_tokens > 500
    assert engine.wrong
    engine.close()


@pytest.mark.parametrize("family", HYBRIDS)
def test_latents_take_half_of_the_host_memory(
    family: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a layout in which each rank keeps all of its own, as where ranks are on several nodes."""
    taken = []
    for is_apart in (False, True):
        if is_apart:
            monkeypatch.setattr("fdcache.integrations.vllm.config.replicas_of", lambda *_: 1)
        engine = engine_of(family, model)
        layout = engine.manager.layout
        for number, prompt in enumerate(conversations()[:4]):
            engine.add(f"{number}", prompt[: 3 * PAGE])
            engine.run()
        assert engine.wrong == 0
        taken.append(engine.manager.get_stats().host.ready * layout.block_bytes)
        latents = 4 * (3 * PAGE // layout.block_size) * layout.page_records * layout.block_bytes
        engine.close()
    once, apart = taken
    assert apart - once == latents // 2


def test_records_that_differ_are_computed_on_all_ranks(model: Path) -> None:
    """A rank that reads a bad record of its own takes the load for failed on both."""
    engine = engine_of("Kimi Linear", model)
    prompts = conversations()
    for number, prompt in enumerate(prompts):
        engine.add(f"0.{number}", prompt)
    engine.run()
    worker: Any = engine.worker._worker
    (extent,) = worker._controller.host_arena.extents
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent.nbytes).from_address(extent.address))
    memory[:: engine.manager.layout.record_bytes] ^= 1
    for number, prompt in enumerate(prompts):
        engine.add(f"1.{number}", prompt)
    engine.run()
    counters = engine.manager.get_stats().counters
    assert counters.blocks_corrupt_in_host > 0
    assert engine.wrong == 0
    engine.close()


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_restart_finds_the_states_of_each_rank(family: str, model: Path, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        engine = engine_of(
            family,
            model,
            FDCACHE_STORAGE="local",
            FDCACHE_STORAGE_DIR=str(tmp_path),
            FDCACHE_STORAGE_SIZE="256MiB",
            FDCACHE_PREFETCH_POLICY="wait_complete",
        )
        ask_twice(engine)
        found.append(engine.manager.get_stats().counters.storage_hit_tokens)
        assert engine.wrong == 0
        engine.close()
    assert found[1] > max(found[0], 300)


def test_two_engines_at_a_service_have_each_others_states(model: Path, tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        engines = [engine_of("Kimi Linear", model, FDCACHE_SERVER=service.address) for _ in range(2)]
        for turn, engine in enumerate((*engines, *engines)):
            before = engine.manager.get_stats().counters.host_hit_tokens
            for number, prompt in enumerate(conversations()):
                engine.add(f"{turn}.{number}", prompt)
            engine.run()
            assert turn == 0 or engine.manager.get_stats().counters.host_hit_tokens - before > 300
            assert engine.wrong == 0
        for engine in engines:
            engine.close()
