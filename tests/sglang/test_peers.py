"""sglang#38031 in SGLang's own code: the pools of its HiCache, with what they lack on a CPU.

pip install --target FOLDER --no-deps sglang==0.5.20
PYTHONPATH=FOLDER python -m tests.sglang tests/sglang/test_peers.py
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sglang import stand_ins

SGLANG = version("sglang")
if SGLANG != "0.5.20":
    pytest.skip(
        f"SGLang 0.5.20 has the fault, not {SGLANG}: see the first lines of this file",
        allow_module_level=True,
    )

stand_ins.install()
assembler = import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler")
memory_pool = import_module("sglang.srt.mem_cache.memory_pool")

PAGE, LAYERS = 64, 2


def group_of(pool: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The host pools that SGLang makes for a model with states beside these layers."""
    memory = {
        "ratio": 2.0,
        "size": 0,
        "mem_layout": "page_first_direct",
        "write_policy": "write_through",
        "io_backend": "direct",
        "host_memory_mode": None,
    }
    bag = SimpleNamespace(**{f"hicache_{name}": value for name, value in memory.items()})
    monkeypatch.setattr(assembler, "get_memory", lambda: bag)
    monkeypatch.setattr(assembler, "get_parallel", lambda: SimpleNamespace(dcp_enabled=False))
    monkeypatch.setattr(assembler, "_get_allocator_type", lambda: "default")
    monkeypatch.setattr(assembler, "HybridCacheController", lambda *_, **__: None)
    conv, temporal = [torch.zeros(1, 4, 8, 3)], torch.zeros(1, 4, 2, 4, 4)
    states = SimpleNamespace(
        num_mamba_layers=1,
        mamba_cache=SimpleNamespace(conv=conv, temporal=temporal),
        size=3,
        device="cpu",
        _slot_siblings=(),
    )
    nothing = (
        "token_to_kv_pool_allocator",
        *(f"{name}_cache_group" for name in ("tp", "attn_cp", "attn_tp", "pp")),
    )
    params = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_allocator=SimpleNamespace(alloc=None, free=None)),
        mtp_draft_device_pools=(),
        page_size=PAGE,
        **dict.fromkeys(nothing),
    )
    made, _ = assembler.build_hybrid_mamba_stack(
        params=params,
        kv_pool=pool,
        mamba_pool=states,
        full_layer_mapping={0: 0, 1: 1},
        mamba_layer_mapping={2: 0},
        load_cache_event=None,
        storage_backend=None,
        use_mla=True,
    )
    return made


def test_sglang_38031_is_seen_in_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents come back from host memory, and the index that chooses among them does not: no host pool has it."""
    pool = memory_pool.DSATokenToKVPool(
        size=8 * PAGE,
        page_size=PAGE,
        kv_lora_rank=512,
        dtype=torch.bfloat16,
        qk_rope_head_dim=64,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=576,
    )
    group = group_of(pool, monkeypatch)
    for latents, index in zip(pool.kv_buffer, pool.index_k_with_scale_buffer, strict=True):
        latents.normal_()
        index.random_()
    host = group.get_pool(assembler.PoolName.KV)
    places = host.alloc(PAGE)
    host.backup_from_device_all_layer(pool, places, torch.arange(PAGE, 2 * PAGE), "direct")
    for layer in range(LAYERS):
        host.load_to_device_per_layer(pool, places, torch.arange(4 * PAGE, 5 * PAGE), layer, "direct")
    assert {entry.name.value for entry in group.entries} == {"kv", "mamba"}
    for latents, index in zip(pool.kv_buffer, pool.index_k_with_scale_buffer, strict=True):
        assert torch.equal(latents[4 * PAGE : 5 * PAGE], latents[PAGE : 2 * PAGE])
        assert not torch.equal(index[4], index[1])
