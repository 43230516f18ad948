"""Every kind of layers that vLLM groups: its own grouping, scheduler and block tables; a stand-in checks the bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.vllm import models
from tests.vllm.stand_in import StandIn

F32 = torch.float32


def full(heads: int = 2, dim: int = 16, block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=dim, dtype=F32)


def sliding(heads: int = 2, dim: int = 16, window: int = 40) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=heads, head_size=dim, dtype=F32, sliding_window=window
    )


def chunked() -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=16, dtype=F32, attention_chunk_size=64
    )


def state(page: int | None = None, block: int = 32, drafts: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block,
        shapes=((3, 16), (8, 16)),
        dtypes=(F32, F32),
        page_size_padded=page,
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )


def latent(dim: int, dtype: torch.dtype, block: int = 16) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=dim, dtype=dtype)


_PAGE = full(block=32).page_size_bytes
_LATENT = _INDEXED = latent(72, F32, 32).page_size_bytes

FAMILIES: dict[str, tuple[list[KVCacheSpec], str, int]] = {
    "Llama": ([full()] * 3, "", 32),
    "Gemma 3": ([sliding()] * 5 + [full()], "last/16 last/16 last/16 last/16 last/16 all/16", 96),
    "gpt-oss": ([sliding(), full()] * 2, "last/16 all/16", 52),
    "MiMo-V2": ([sliding(heads=4)] * 4 + [full(heads=2)] * 2, "last/16 last/16 all/32", 52),
    "Gemma 4": (
        [sliding(heads=4, dim=16)] * 5 + [full(heads=2, dim=64)],
        "last/32 last/32 last/32 last/32 last/32 all/16",
        72,
    ),
    "OpenELM": ([full(heads=1), full(heads=2), full(heads=3)], "", 32),
    "DeepSeek V3": ([latent(72, F32)] * 3, "", 32),
    "DeepSeek V3.2": ([latent(72, F32), latent(132, torch.uint8)] * 2, "", 32),
    "Llama 4": ([chunked()] * 3 + [full()], "chunk/16 chunk/16 chunk/16 all/16", 68),
    "Qwen3-Next": ([state(_PAGE)] * 3 + [full(block=32)], "state/32 state/32 state/32 all/32", 40),
    "Jamba": (([state(_PAGE)] * 7 + [full(block=32)]) * 2, " ".join(["state/32"] * 7 + ["all/32"]), 80),
    "Kimi Linear": (
        [state(_LATENT)] * 3 + [latent(72, F32, 32)],
        "state/32 state/32 state/32 all/32",
        40,
    ),
    "GLM-5 Flash": (
        [state(_INDEXED)] * 2 + [latent(72, F32, 32), latent(144, torch.uint8, 32)],
        "state/32 state/32 all/32 all/64",
        60,
    ),
    "Mamba": ([state()] * 3, "state/32", 7),
}
"""Layers of each family, the groups that vLLM makes of them, and device blocks that are too few for all prompts."""


def size_of(specs: list[KVCacheSpec]) -> int:
    """The block size that vLLM chooses for the whole model."""
    return 32 if any(isinstance(spec, MambaSpec) for spec in specs) else 16


def conversations(seed: int = 0) -> list[list[int]]:
    """Prompts, some of which continue others."""
    chosen = random.Random(seed)
    first = [[chosen.randrange(3, 500) for _ in range(chosen.randrange(90, 260))] for _ in range(6)]
    return [*first, *([*each, *(chosen.randrange(3, 500) for _ in range(50))] for each in first)]


SERVED = (
    "Llama",
    "Qwen3",
    "Gemma 3",
    "Gemma 4",
    "gpt-oss",
    "Llama 4",
    "MiMo-V2",
    "DeepSeek V3",
    "DeepSeek V3.2",
)
STATES_AND_OTHERS = ("Qwen3-Next", "Jamba", "OpenELM")


@pytest.mark.parametrize("family", SERVED + STATES_AND_OTHERS)
def test_each_family_runs_in_the_engine_or_by_its_cache_specs(family: str) -> None:
    """Each has a negative control there: test_models changes bytes in host memory, this file where they are loaded."""
    assert family in FAMILIES or family in models.FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_layer_reads_is_right_while_blocks_are_evicted(family: str, model: Path) -> None:
    specs, groups, room = FAMILIES[family]
    engine = StandIn(model, specs, num_blocks=room, block_size=size_of(specs), FDCACHE_HOST_MEMORY="64MiB")
    layout = engine.manager.layout
    assert " ".join(f"{group.reach}/{group.block_size}" for group in layout.groups) == groups
    prompts = conversations()
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            engine.add(f"{turn}.{number}", prompt)
            if number % 3 == 2:
                engine.run()
        engine.run()
    counters = engine.manager.get_stats().counters
    assert counters.host_hit_tokens > 500
    assert engine.wrong == 0
    for number in range(len(prompts)):
        assert engine.answers[f"0.{number}"][-8:] == engine.answers[f"1.{number}"][-8:]
    engine.close()


@pytest.mark.parametrize("family", ["Gemma 4", "DeepSeek V3.2", "GLM-5 Flash", "Jamba"])
def test_no_layer_reads_wrong_bytes_when_many_requests_run_at_once(family: str, model: Path) -> None:
    """Others have answered wrongly here: under load, and where an index or a state was not loaded with the rest.

    Among them are prompts that end at the end of a page, and some that leave a common beginning at different places.
    """
    specs, _, room = FAMILIES[family]
    engine = StandIn(model, specs, num_blocks=room, block_size=size_of(specs), FDCACHE_HOST_MEMORY="64MiB")
    chosen = random.Random(5)
    common = [chosen.randrange(3, 500) for _ in range(192)]
    prompts = [
        *([*common[:cut], *(chosen.randrange(3, 500) for _ in range(40))] for cut in (64, 100, 128, 192)),
        common[:128],
        common,
        *conversations(1),
    ]
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            engine.add(f"{turn}.{number}", prompt)
        engine.run()
    assert engine.manager.get_stats().counters.host_hit_tokens > 500
    assert engine.wrong == 0
    for number in range(len(prompts)):
        assert len({tuple(engine.answers[f"{turn}.{number}"][-8:]) for turn in range(3)}) == 1
    engine.close()


DRAFTS = {
    "gpt-oss": [sliding(), full(), sliding(), full(), full()],
    "MiMo-V2": [*[sliding(heads=4)] * 4, *[full(heads=2)] * 3],
    "Gemma 4": [*[sliding(heads=4, dim=16)] * 5, full(heads=2, dim=64), sliding(heads=4, dim=16)],
    "Qwen3-Next": [*[state(_PAGE, drafts=2)] * 3, full(block=32), full(block=32)],
    "GLM-5": [*[latent(72, F32), latent(132, torch.uint8)] * 2, latent(72, F32)],
}
"""Layers of families, the last of which proposes tokens."""


@pytest.mark.parametrize("family", DRAFTS)
def test_a_layer_that_proposes_tokens_reads_what_belongs_to_the_tokens_after(
    family: str, model: Path
) -> None:
    """What it keeps of a token follows from the next one, too; what it keeps of rejected tokens is never stored."""
    specs = DRAFTS[family]
    engine = StandIn(
        model, specs, num_blocks=100, block_size=size_of(specs), drafts=2, FDCACHE_HOST_MEMORY="64MiB"
    )
    prompts = conversations()
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            engine.add(f"{turn}.{number}", prompt, 40)
            if number % 3 == 2:
                engine.run()
        engine.run()
        # Continue what was answered with another token than the one that followed.
        prompts = [
            [*prompt, *engine.answers[f"{turn}.{number}"][: 9 + number], 501, *prompt[:30]]
            for number, prompt in enumerate(prompts)
        ]
    assert engine.accepted > 100 and engine.rejected > 100
    assert engine.manager.get_stats().counters.host_hit_tokens > 500
    assert engine.wrong == 0
    engine.close()


def test_a_key_without_the_next_token_gives_such_a_layer_what_belongs_to_another(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr("fdcache.integrations.vllm.settings._has_drafts", lambda config: False)
    specs = DRAFTS["gpt-oss"]
    engine = StandIn(model, specs, num_blocks=100, drafts=2, FDCACHE_HOST_MEMORY="64MiB")
    for number, prompt in enumerate(conversations()):
        engine.add(f"first.{number}", prompt)
        engine.run()
    for number, prompt in enumerate(conversations()):
        engine.add(f"second.{number}", [*prompt[:80], 501, *prompt[81:]])
        engine.run()
    assert engine.wrong
    engine.close()


def swap_loaded(engine: StandIn, output: Any) -> None:
    """Exchange bytes of device blocks that were loaded for a request."""
    for name in output.finished_recving or ():
        blocks = sorted(
            {
                block
                for group in engine.scheduler.kv_cache_manager.get_block_ids(name)
                for block in group
                if block
            }
        )
        for place, stride in set(engine._places.values()):
            pages = [
                engine.bytes[place + block * stride : place + block * stride + 64] for block in blocks[:2]
            ]
            if len(pages) == 2:
                pages[0][:], pages[1][:] = pages[1].copy(), pages[0].copy()


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_loaded_into_the_wrong_places_are_noticed(family: str, model: Path) -> None:
    specs, _, room = FAMILIES[family]
    broken: Callable[[StandIn, Any], None] = flip_loaded if family == "Mamba" else swap_loaded
    engine = StandIn(
        model,
        specs,
        num_blocks=room,
        block_size=size_of(specs),
        broken=broken,
        FDCACHE_HOST_MEMORY="64MiB",
    )
    for turn in range(2):
        for number, prompt in enumerate(conversations()):
            engine.add(f"{turn}.{number}", prompt)
        engine.run()
    assert engine.wrong
    engine.close()


def flip_loaded(engine: StandIn, output: Any) -> None:
    for name in output.finished_recving or ():
        for block in {
            block
            for group in engine.scheduler.kv_cache_manager.get_block_ids(name)
            for block in group
            if block
        }:
            for place, stride in set(engine._places.values()):
                engine.bytes[place + block * stride] ^= 1


@pytest.mark.parametrize("family", ["MiMo-V2", "Llama 4", "Qwen3-Next", "Mamba"])
def test_a_restart_finds_in_storage_what_each_layer_needs(family: str, model: Path, tmp_path: Path) -> None:
    specs, _, room = FAMILIES[family]
    prompts, found = conversations(), []
    for life in range(2):
        engine = StandIn(
            model,
            specs,
            num_blocks=room,
            block_size=size_of(specs),
            FDCACHE_HOST_MEMORY="64MiB",
            FDCACHE_STORAGE="local",
            FDCACHE_STORAGE_DIR=str(tmp_path),
            FDCACHE_STORAGE_SIZE="256MiB",
            FDCACHE_PREFETCH_POLICY="wait_complete",
        )
        for number, prompt in enumerate(prompts):
            engine.add(f"{life}.{number}", prompt)
            if number % 3 == 2:
                engine.run()
        engine.run()
        found.append(engine.manager.get_stats().counters.storage_hit_tokens)
        assert engine.wrong == 0
        engine.close()
    assert found[1] > max(found[0], 300)
