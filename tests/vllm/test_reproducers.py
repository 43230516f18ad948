"""What others have answered wrongly, as their threads describe it: here the tokens are those without a connector."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

from fdcache.integrations.vllm.scheduler import SchedulerSide
from tests.vllm.engine import connector_config, generate, running_engine
from tests.vllm.observed import Observed
from tests.vllm.stand_in import StandIn
from tests.vllm.test_families import FAMILIES, size_of

Answers = list[list[int]]

LOAD: dict[str, Any] = {"max_num_seqs": 16, "num_gpu_blocks_override": 80, "max_num_batched_tokens": 256}


def crowd() -> Answers:
    """Prompts of many users, most of which share one of a few beginnings."""
    chosen = random.Random(31210)
    beginnings = [[chosen.randrange(3, 500) for _ in range(96)] for _ in range(4)]
    return [
        [*beginnings[number % 4], *(chosen.randrange(3, 500) for _ in range(chosen.randrange(20, 90)))]
        for number in range(24)
    ]


def test_vllm_31210_answers_are_right_under_load(model: Path) -> None:
    """Under load, blocks from host memory had the bytes of others, and the same prompt had many answers.

    Here the device is short of blocks, every prompt is asked again and again among 16 that run at once, and loads,
    evictions and copies out overlap.
    """
    prompts = crowd()
    with running_engine(model, enable_prefix_caching=False, **LOAD) as llm:
        alone = generate(llm, prompts)
    with running_engine(model, connector_config(FDCACHE_HOST_MEMORY="16MiB"), **LOAD) as llm:
        engine = Observed(llm)
        for turn in range(6):
            order = random.Random(turn).sample(range(len(prompts)), len(prompts))
            assert engine.answers([prompts[i] for i in order]) == [alone[i] for i in order]
        assert engine.counters.host_hit_tokens > 4 * 96 * 6
        assert engine.counters.loads_failed == 0
        engine.corrupt_host_records()
        engine.forget_device()
        assert engine.answers(prompts) != alone, "bytes of the host are not read"


def test_lmcache_4463_keys_and_values_of_one_tensor_come_back_as_they_were(model: Path) -> None:
    """vLLM packs keys and values of a head side by side; read as two tensors they came back as other bytes."""
    prompts = crowd()[:8]
    with running_engine(model, enable_prefix_caching=False) as llm:
        alone = generate(llm, prompts)
    with running_engine(model, connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_VERIFY="all")) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) == alone
        engine.forget_device()
        for tensor in engine.tensors:
            tensor.fill_(0x5A)
        assert engine.answers(prompts[:1]) == alone[:1]
        assert engine.counters.host_hit_tokens > 0
        for tensor in engine.tensors:
            rows = tensor[(tensor != 0x5A).any(dim=1)]
            size = rows.shape[1] // 8
            assert len(rows), "nothing was loaded"
            assert all(bool((part != 0x5A).any()) for part in rows.split(size, dim=1))


def lose_index(engine: StandIn, output: Any) -> None:
    """Leave the index of what was loaded as it was in the device blocks before."""
    place, stride = engine._places["layer.3"]
    for name in output.finished_recving or ():
        for block in engine.scheduler.kv_cache_manager.get_block_ids(name)[-1]:
            if block:
                engine.bytes[place + block * stride : place + block * stride + 64] ^= 0x5A


@pytest.mark.parametrize("broken", [None, lose_index])
def test_sglang_38031_the_index_is_loaded_with_latents_and_states(
    broken: Callable[[StandIn, Any], None] | None, model: Path
) -> None:
    """States and latents came back from host memory, and the index that chooses among them did not."""
    specs, groups, room = FAMILIES["GLM-5 Flash"]
    assert groups.split()[-1] == "all/64"
    engine = StandIn(
        model,
        specs,
        num_blocks=room,
        block_size=size_of(specs),
        broken=broken,
        FDCACHE_HOST_MEMORY="64MiB",
    )
    for turn in range(3):
        for number, prompt in enumerate(crowd()):
            engine.add(f"{turn}.{number}", prompt)
        engine.run()
    assert engine.manager.get_stats().counters.host_hit_tokens > 500
    assert (engine.wrong > 0) == (broken is not None)
    engine.close()


@pytest.mark.parametrize("is_early", [False, True])
def test_vllm_45704_a_copy_out_begins_once_the_step_has_written(
    is_early: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies out of blocks that the step was still writing left what they held before. The control offers them so."""
    if is_early:
        learn = SchedulerSide._learn_blocks

        def offering(side: SchedulerSide, output: Any) -> Any:
            computed = learn(side, output)
            side._offers.step(computed)
            return computed

        monkeypatch.setattr(SchedulerSide, "_learn_blocks", offering)
    prompts = crowd()[:8]
    with running_engine(model, enable_prefix_caching=False, **LOAD) as llm:
        alone = generate(llm, prompts)
    with running_engine(model, connector_config(FDCACHE_HOST_MEMORY="16MiB"), **LOAD) as llm:
        engine = Observed(llm)
        assert engine.answers(prompts) == alone
        engine.forget_device()
        assert (engine.answers(prompts) != alone) == is_early
        assert engine.counters.host_hit_tokens > 8 * 90
