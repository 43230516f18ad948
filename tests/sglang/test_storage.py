"""FdcacheStorage over SGLang's own host pools, with no engine above it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from fdcache.errors import ConfigurationError, UnsupportedCallError, UnsupportedLayoutError
from fdcache.integrations.sglang import config as sglang_config
from fdcache.integrations.sglang import storage as module
from fdcache.integrations.sglang.storage import FdcacheStorage
from tests.service_help import local_service, until

PAGE, PAGES, LAYERS = 16, 24, 3
PATIENT = {"FDCACHE_RPC_TIMEOUT": "60", "FDCACHE_PLAN_TIMEOUT": "60"}


def mha(layout: str) -> HostKVCache:
    """A host pool of keys and values."""
    device = MHATokenToKVPool(
        8 * PAGE, PAGE, torch.bfloat16, 2, 8, LAYERS, "cpu", False, enable_alt_stream=False
    )
    return _host(MHATokenToKVPoolHost, device, layout)


def mla(layout: str) -> HostKVCache:
    """A host pool of latent attention."""
    device = MLATokenToKVPool(8 * PAGE, PAGE, torch.bfloat16, 32, 16, LAYERS, "cpu", False)
    return _host(MLATokenToKVPoolHost, device, layout, target_layer_num=LAYERS)


def _host(kind: Any, device: Any, layout: str, **others: Any) -> HostKVCache:
    (info,) = device.get_device_pool_infos()
    pool = kind(
        info.buffer_info,
        3.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=8 * PAGE,
        start_layer=0,
        end_layer=LAYERS,
        **others,
    )
    assert pool.page_num > PAGES
    return pool


def keys(count: int, salt: str = "") -> list[str]:
    return [hashlib.sha256(f"{salt}{page}".encode()).hexdigest() for page in range(count)]


def indices(first: int, count: int) -> Any:
    return torch.arange(first * PAGE, (first + count) * PAGE)


def config(extra: dict[str, Any] | None = None, **others: Any) -> HiCacheStorageConfig:
    given = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "model",
        **others,
    }
    return HiCacheStorageConfig(
        extra_config={
            "backend_name": "fdcache",
            "interface_v1": 1,
            "FDCACHE_HOST_MEMORY": "4MiB",
            **(extra or {}),
        },
        **given,
    )


def arguments(**others: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"model_path": "hub/model", "served_model_name": "model", "dtype": "bfloat16", **others}
    )


@pytest.fixture(autouse=True)
def server_args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The arguments of SGLang's start."""
    given = arguments()
    monkeypatch.setattr(module, "get_server_args", lambda: given)
    return given


@contextmanager
def attached(
    pool: HostKVCache, settings: HiCacheStorageConfig | None = None, **sidecars: HostKVCache
) -> Iterator[FdcacheStorage]:
    """A storage that SGLang has told of its pools, in SGLang's order."""
    storage = FdcacheStorage(settings or config(), {})
    try:
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
        for name, each in sidecars.items():
            storage.register_mem_host_pool_v2(each, PoolName(name))
        storage.on_host_pools_registered()
        until(lambda: all(client.room for client in storage._clients.values()), "there is room")
        yield storage
    finally:
        storage.close()


def above(*before: str) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=list(before))


def fill(pool: Any) -> Any:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, dtype=torch.float32).to(pool.dtype))
    return pool.kv_buffer.clone()


def content(pool: Any, first: int, count: int) -> list[Any]:
    """Return what SGLang itself reads of pages."""
    return [pool.get_data_page(int(index), flat=True).clone() for index in indices(first, count)[::PAGE]]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        *((mha, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
        *((mla, layout) for layout in ("layer_first", "page_first", "page_first_direct")),
    ],
)
def test_pages_of_every_layout_come_back_in_other_places(make: Any, layout: str) -> None:
    pool = make(layout)
    with attached(pool) as storage:
        fill(pool)
        names, before = keys(10), content(pool, 2, 10)
        assert storage.batch_exists(names) == 0
        assert storage.batch_set_v1(names[:4], indices(2, 4), above()) == [True] * 4
        assert storage.batch_set_v1(names[4:], indices(6, 6), above(*names[:4])) == [True] * 6
        assert storage.batch_exists(names) == 10
        pool.kv_buffer.zero_()
        assert storage.batch_get_v1(names[3:9], indices(14, 6), above("wrong")) == [True] * 6
        assert equal(content(pool, 14, 6), before[3:9])
        assert not any(page.any() for page in content(pool, 0, 14)), "nothing else is written"
        moved = storage.get_stats()
        assert moved.backup_pgs == [4, 6] and moved.prefetch_pgs == [6]
        assert all(speed > 0 for speed in moved.backup_bandwidth + moved.prefetch_bandwidth)
        assert storage.get_stats().prefetch_pgs == []
        storage.clear()
        assert storage.batch_exists(names) == 0


def test_a_load_ends_at_the_first_page_that_is_not_there() -> None:
    pool = mha("page_first")
    with attached(pool) as storage:
        fill(pool)
        names = keys(8)
        storage.batch_set_v1(names[:5], indices(0, 5), above())
        assert storage.batch_get_v1(names, indices(8, 8)) == [True] * 5 + [False] * 3
        assert storage.batch_set_v1(names[6:], indices(0, 2), above(*names[:6])) == [True] * 2
        assert storage.batch_exists(names) == 5, "page 5 is not there"
        assert storage.batch_exists(names[6:]) == 2
        assert (
            storage.batch_set_v1([], indices(0, 0), above()) == storage.batch_get_v1([], indices(0, 0)) == []
        )
        assert storage.exists(names[0]) and not storage.exists(names[5])


def test_without_the_keys_before_them_pages_are_not_stored_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = mha("page_first")
    with attached(pool) as storage:
        for extra in (None, HiCacheStorageExtraInfo()):
            assert storage.batch_set_v1(keys(2), indices(0, 2), extra) == [False, False]
        assert storage.batch_exists(keys(2)) == 0
    assert [
        each.message for each in caplog.records if "hicache_storage_pass_prefix_keys" in each.message
    ] == [
        "FdcacheStorage stores nothing: hicache_storage_pass_prefix_keys is off, so that a page's place in its prompt "
        'is not known; set "hicache_storage_pass_prefix_keys": true in hicache_storage_backend_extra_config'
    ]


def test_pools_with_a_page_for_each_page_are_stored_beside_the_keys_and_values() -> None:
    pool, draft = mha("page_first"), mha("page_first")
    with attached(pool, draft=draft) as storage:
        fill(pool)
        fill(draft)
        names, before = keys(6), content(draft, 3, 6)
        storage.batch_set_v1(names, indices(3, 6), above())
        both = [PoolTransfer(PoolName.DRAFT, keys=names, hit_policy=PoolHitPolicy.ALL_PAGES)]
        assert storage.batch_exists_v2(names, both).kv_hit_pages == 0
        assert storage.batch_exists_v2(names).kv_hit_pages == 6
        part = PoolTransfer(PoolName.DRAFT, host_indices=indices(3, 4), keys=names[:4])
        assert storage.batch_set_v2([part], above()) == {PoolName.DRAFT: [True] * 4}
        found = storage.batch_exists_v2(names, both)
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (4, {"kv": 6, "draft": 4})
        assert found.restorable_prefix_pages == [1, 2, 3, 4]
        draft.kv_buffer.zero_()
        part = PoolTransfer(PoolName.DRAFT, host_indices=indices(12, 5), keys=names[:5])
        assert storage.batch_get_v2([part]) == {PoolName.DRAFT: [True] * 4 + [False]}
        assert equal(content(draft, 12, 4), before[:4])


def test_latent_attention_is_stored_once_for_all_ranks_and_other_ranks_apart(tmp_path: Path) -> None:
    names = keys(6)
    with local_service(tmp_path / "service") as service:
        at = {"FDCACHE_SERVER": service.address, "FDCACHE_HOST_MEMORY": "0", **PATIENT}
        for make, is_latent in ((mla, True), (mha, False)):
            pools = [make("page_first") for _ in range(2)]
            ranks = [config(at, tp_rank=rank, tp_size=2, is_mla_model=is_latent) for rank in range(2)]
            assert [rank.is_storage_writer for rank in ranks] == [True, not is_latent]
            with attached(pools[0], ranks[0]) as first, attached(pools[1], ranks[1]) as second:
                fill(pools[0])
                before = content(pools[0], 0, 6)
                assert first.batch_set_v1(names, indices(0, 6), above()) == [True] * 6
                if is_latent:
                    until(lambda: second.batch_exists(names) == 6, "the other rank finds them")
                    assert second.batch_get_v1(names, indices(9, 6)) == [True] * 6
                    assert equal(content(pools[1], 9, 6), before)
                else:
                    assert second.batch_exists(names) == 0
                    assert first.batch_exists(names) == 6
        until(lambda: service.ask("integrity") == [], "nothing is left behind")


@pytest.mark.parametrize(
    "difference",
    [
        {"arguments": {"model_path": "hub/other"}},
        {"arguments": {"revision": "2"}},
        {"arguments": {"quantization": "fp8"}},
        {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
        {"arguments": {"speculative_algorithm": "EAGLE"}},
        {"layout": "page_first_direct"},
        {"config": {"pp_rank": 1, "pp_size": 2}},
        {"config": {"tp_rank": 0, "tp_size": 2}},
        {"extra": {"FDCACHE_WEIGHTS": "mine@2"}},
    ],
)
def test_pages_of_other_models_ranks_and_layouts_are_not_found(
    tmp_path: Path, server_args: SimpleNamespace, difference: dict[str, Any]
) -> None:
    with local_service(tmp_path / "service") as service:
        at = {"FDCACHE_SERVER": service.address, "FDCACHE_HOST_MEMORY": "0", **PATIENT}
        with attached(mha("page_first"), config(at)) as storage:
            assert storage.batch_set_v1(keys(4), indices(0, 4), above()) == [True] * 4
        with attached(mha("page_first"), config(at)) as same:
            until(lambda: same.batch_exists(keys(4)) == 4, "the same are found")
        for name, value in difference.get("arguments", {}).items():
            setattr(server_args, name, value)
        other = config(at | difference.get("extra", {}), **difference.get("config", {}))
        with attached(mha(difference.get("layout", "page_first")), other) as storage:
            assert storage.batch_exists(keys(4)) == 0


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_config, "version", lambda name: "0.5.24")
    with pytest.raises(ConfigurationError, match=r"SGLang 0\.5\.24; served are 0\.5\.23"):
        FdcacheStorage(config(), {})


def test_a_changed_interface_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORAGE_METHODS", (*sglang_config.STORAGE_METHODS, "batch_exists_v3"))
    with pytest.raises(ConfigurationError, match="has no batch_exists_v3"):
        FdcacheStorage(config(), {})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (config({"interface_v1": 0}), "interface_v1 is off"),
        (
            config({"FDCACHE_HOST_MEMROY": "1GiB"}),
            "FDCACHE_HOST_MEMROY is no setting; did you mean FDCACHE_HOST_MEMORY",
        ),
        (config({"FDCACHE_HOST_MEMORY": "0"}), "there is nothing to store pages in"),
        (config({"FDCACHE_HOST_MEMORY": "much"}), "FDCACHE_HOST_MEMORY"),
        (config(is_mla_model=True, tp_size=2), "rank 0 alone, for all 2 ranks"),
        (
            config({"FDCACHE_SERVER": "ipc:///nowhere/x.sock", "FDCACHE_STORAGE": "local"}),
            "belongs to the service",
        ),
    ],
)
def test_what_would_not_be_right_is_refused_by_name(given: HiCacheStorageConfig, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named), attached(mha("page_first"), given):
        pass


def test_prefix_keys_are_demanded_at_the_start(server_args: SimpleNamespace) -> None:
    server_args.hicache_storage_backend_extra_config = '{"backend_name": "fdcache"}'
    with pytest.raises(ConfigurationError, match='set "hicache_storage_pass_prefix_keys": true'):
        FdcacheStorage(config(), {})


@pytest.mark.parametrize("name", ["swa", "mamba", "deepseek_v4_c4"])
def test_pools_that_are_kept_in_part_are_refused_by_name(name: str) -> None:
    refused = pytest.raises(ConfigurationError, match=f"the pool {name} of this model is not stored")
    with refused, attached(mha("page_first"), **{name: mha("page_first")}):
        pass


def test_draft_pools_of_which_one_rank_is_stored_are_refused() -> None:
    given = config(is_mla_model=True, tp_size=2)
    refused = pytest.raises(ConfigurationError, match="stores the pool draft of rank 0 alone")
    with refused, attached(mla("page_first"), given, draft=mha("page_first")):
        pass


def test_a_pool_that_comes_later_and_an_unknown_layout_are_refused() -> None:
    later = pytest.raises(ConfigurationError, match="registered after the others")
    with attached(mha("page_first")) as storage, later:
        storage.register_mem_host_pool_v2(mha("page_first"), PoolName.DRAFT)
    pool = mha("page_first")
    pool.layout = "page_unified"
    with pytest.raises(UnsupportedLayoutError, match="pages in the layout page_unified"), attached(pool):
        pass


def test_calls_that_copy_through_tensors_are_refused() -> None:
    storage = FdcacheStorage(config(), {})
    calls: list[Any] = [storage.get, storage.batch_get, storage.set, storage.batch_set]
    for call in calls:
        with pytest.raises(UnsupportedCallError, match="pages are moved in place"):
            call("key")
