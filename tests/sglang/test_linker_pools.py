"""FdcacheLinker over pools of SGLang that are kept in part: states of linear attention, and windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from fdcache.errors import UnsupportedLayoutError
from fdcache.integrations.sglang.linker import FdcacheLinker
from tests.service_help import until
from tests.sglang.test_linker_calls import PAGE, TOKENS, arguments, one_rank, parameters
from tests.sglang.test_storage import keys as hex_keys

_ = one_rank  # a fixture of every test here
MAMBA, FULL = [0, 2, 3], [1, 4]


def hybrid(state_size: int = 16, **options: Any) -> Any:
    """Return the parameters of a model with states in three layers and keys and values in two.

    ``state_size``: 0 for layers that keep the last tokens of a convolution alone.
    """
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=state_size,
        conv_kernel=4,
    )
    tokens = HybridReqToTokenPool(
        size=4,
        mamba_size=16,
        mamba_spec_state_size=4,
        max_context_len=512,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=MAMBA),
        mamba_layer_ids=MAMBA,
        enable_mamba_extra_buffer=True,
        **options,
    )
    pool = HybridLinearKVPool(
        size=TOKENS,
        dtype=torch.float32,
        page_size=PAGE,
        head_num=2,
        head_dim=8,
        full_attention_layer_ids=FULL,
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=tokens.mamba_pool,
    )
    return parameters(pool, req_to_token_pool=tokens)


@contextmanager
def linker(params: Any, component: Any, **settings: str) -> Iterator[FdcacheLinker]:
    made = FdcacheLinker(
        arguments(),
        params,
        components={ComponentType.FULL, component},
        extra_config={"FDCACHE_HOST_MEMORY": "8MiB", **settings},
    )
    try:
        yield made
    finally:
        made.close()


def indices(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def part(name: PoolName, keys: list[str], slots: torch.Tensor | None = None) -> PoolTransfer:
    policy = PoolHitPolicy.ALL_PAGES if name is PoolName.KV else PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(name=name, keys=keys, device_indices=slots, hit_policy=policy)


def stored(made: FdcacheLinker, *parts: PoolTransfer) -> bool:
    assert made.offload(list(parts))
    until(lambda: made.num_completed_offloads() == 1, "the offload ends")
    return made.pop_completed_offload()


def loaded(made: FdcacheLinker, rid: str, *parts: PoolTransfer) -> bool:
    assert made.load(rid, list(parts))
    index = made.start_layer_wise_loading()
    made.layer_done_counter.set_consumer(index)
    for layer in range(made.layer_done_counter.num_layers):
        made.layer_done_counter.wait_until(layer)
    return made.finish_layer_wise_loading(index)


def filled(buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    for buffer in buffers:
        buffer.copy_(torch.rand(buffer.shape))
    return [buffer.clone() for buffer in buffers]


@pytest.mark.parametrize("state_size", [16, 0])
def test_a_prompt_is_found_up_to_its_last_state_and_comes_back_with_it(state_size: int) -> None:
    params = hybrid(state_size)
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    states = [*pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal]
    attention = [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer]
    before_states, before = filled(states), filled(attention)
    keys = hex_keys(8)
    ask = [part(PoolName.KV, keys), part(PoolName.MAMBA, keys[-1:])]
    with linker(params, ComponentType.MAMBA) as made:
        assert made.layer_done_counter.num_layers == 5
        assert stored(
            made,
            part(PoolName.KV, keys[:3], indices([1, 2, 3])),
            part(PoolName.MAMBA, keys[2:3], torch.tensor([5])),
        )
        assert made.lookup("a", ask) == [3]
        assert stored(
            made,
            part(PoolName.KV, keys[3:], indices([4, 5, 6, 7, 8])),
            part(PoolName.MAMBA, keys[6:7], torch.tensor([7])),
        )
        assert made.lookup("a", ask) in ([3], [3, 7])
        assert made.lookup("b", ask) == [3, 7]
        for buffer in (*states, *attention):
            buffer.zero_()
        assert loaded(
            made,
            "b",
            part(PoolName.KV, keys[:7], indices([11, 12, 13, 14, 15, 16, 17])),
            part(PoolName.MAMBA, keys[6:7], torch.tensor([9])),
        )
    for buffer, was in zip(states, before_states, strict=True):
        assert torch.equal(buffer[:, 9], was[:, 7])
        assert not buffer[:, 7].any()
    for buffer, was in zip(attention, before, strict=True):
        assert torch.equal(buffer[11 * PAGE : 18 * PAGE], was[PAGE : 8 * PAGE])


def test_the_states_of_a_layer_are_waited_for_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    params, waited = hybrid(), list[int]()
    with linker(params, ComponentType.MAMBA) as made:
        monkeypatch.setattr(made.layer_done_counter, "wait_until", waited.append)
        for layer in MAMBA:
            params.req_to_token_pool.mamba2_layer_cache(layer)
    assert waited == MAMBA


def test_a_prompt_without_a_state_is_not_found() -> None:
    keys = hex_keys(4)
    with linker(hybrid(), ComponentType.MAMBA) as made:
        assert stored(made, part(PoolName.KV, keys, indices([1, 2, 3, 4])))
        assert made.lookup("a", [part(PoolName.KV, keys), part(PoolName.MAMBA, keys[-1:])]) == []
        made.reset()
        assert all(tier.manager.get_stats().live_requests == 0 for tier in made._tiers.values())


def test_side_states_are_refused_by_name() -> None:
    params = hybrid()
    params.token_to_kv_pool_allocator.get_kvcache().mamba_pool.register_slot_state(object())
    with (
        pytest.raises(UnsupportedLayoutError, match="MambaPool named mamba"),
        linker(params, ComponentType.MAMBA),
    ):
        pass


def windows() -> Any:
    """Return the parameters of a model with windows of two pages in two of four layers."""
    pool = SWAKVPool(
        size=TOKENS,
        size_swa=TOKENS,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        device="cpu",
        enable_alt_stream=False,
    )
    params = parameters(pool)
    params.sliding_window_size = 2 * PAGE - 1
    return params


def test_a_prompt_is_found_where_its_window_is_whole() -> None:
    params = windows()
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    buffers = [*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer]
    before = filled(buffers)
    keys = hex_keys(8)
    ask = [part(PoolName.KV, keys), part(PoolName.SWA, keys[-2:])]
    with linker(params, ComponentType.SWA) as made:
        assert stored(made, part(PoolName.KV, keys[:5], indices([1, 2, 3, 4, 5])))
        assert made.lookup("a", ask) == []
        assert stored(
            made,
            part(PoolName.KV, keys[5:], indices([6, 7, 8])),
            part(PoolName.SWA, keys[5:], indices([20, 21, 22])),
        )
        assert made.lookup("b", ask) == [7, 8]
        for buffer in buffers:
            buffer.zero_()
        assert loaded(
            made,
            "b",
            part(PoolName.KV, keys[:7], indices([11, 12, 13, 14, 15, 16, 17])),
            part(PoolName.SWA, keys[5:7], indices([30, 31])),
        )
    for buffer, was in zip(buffers, before, strict=True):
        assert torch.equal(buffer[30 * PAGE : 32 * PAGE], was[20 * PAGE : 22 * PAGE])


def found_in_storage(made: FdcacheLinker, ask: list[PoolTransfer], lengths: list[int]) -> str:
    """Ask as new requests until these lengths are found; return the last one's name."""
    names = (f"again {number}" for number in range(10_000))
    last = ""

    def is_found() -> bool:
        nonlocal last
        last = next(names)
        made.num_completed_offloads()
        return made.lookup(last, ask) == lengths

    until(is_found, "what is in storage is read")
    return last


def test_states_come_back_from_storage(tmp_path: Path) -> None:
    keys, params = hex_keys(40), hybrid()
    state = params.token_to_kv_pool_allocator.get_kvcache().mamba_pool.mamba_cache.temporal
    (before,) = filled([state])
    ask = [part(PoolName.KV, [*keys, "ef" * 32]), part(PoolName.MAMBA, ["ef" * 32])]
    disk = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path), "FDCACHE_STORAGE_SIZE": "16MiB"}
    with linker(params, ComponentType.MAMBA, **disk) as made:
        for number in (3, 25):  # the last one is far before the end of the prompt
            states = part(PoolName.MAMBA, keys[number - 1 : number], torch.tensor([number // 4]))
            assert stored(made, part(PoolName.KV, keys[:number], indices([*range(1, 1 + number)])), states)
        assert stored(made, part(PoolName.KV, keys[25:], indices([*range(26, 41)])))
        settle_storage(made)
    with linker(params, ComponentType.MAMBA, **disk) as made:
        state.zero_()
        assert made.lookup("first", ask) == []
        name = found_in_storage(made, ask, [3, 25])
        kv = part(PoolName.KV, keys[:25], indices([*range(1, 26)]))
        assert loaded(made, name, kv, part(PoolName.MAMBA, keys[24:25], torch.tensor([11])))
    assert torch.equal(state[:, 11], before[:, 6])


def test_windows_come_back_from_storage(tmp_path: Path) -> None:
    keys, params = hex_keys(8), windows()
    buffers = params.token_to_kv_pool_allocator.get_kvcache().swa_kv_pool.k_buffer
    before = filled(buffers)
    ask = [part(PoolName.KV, keys), part(PoolName.SWA, keys[-2:])]
    disk = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path), "FDCACHE_STORAGE_SIZE": "16MiB"}
    with linker(params, ComponentType.SWA, **disk) as made:
        window = part(PoolName.SWA, keys[3:5], indices([20, 21]))
        assert stored(made, part(PoolName.KV, keys[:5], indices([1, 2, 3, 4, 5])), window)
        settle_storage(made)
    with linker(params, ComponentType.SWA, **disk) as made:
        for buffer in buffers:
            buffer.zero_()
        assert made.lookup("first", ask) == []
        name = found_in_storage(made, ask, [5])
        kv = part(PoolName.KV, keys[:5], indices([11, 12, 13, 14, 15]))
        assert loaded(made, name, kv, part(PoolName.SWA, keys[3:5], indices([30, 31])))
    for buffer, was in zip(buffers, before, strict=True):
        assert torch.equal(buffer[30 * PAGE : 32 * PAGE], was[20 * PAGE : 22 * PAGE])


def settle_storage(made: FdcacheLinker) -> None:
    """Wait until all that was stored is in the files, too."""

    def is_written() -> bool:
        made.num_completed_offloads()
        stats = [tier.manager.get_stats() for tier in made._tiers.values()]
        return all(each.counters.blocks_stored >= each.host.ready for each in stats if each.host is not None)

    until(is_written, "pages are written to storage")
