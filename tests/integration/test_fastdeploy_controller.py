"""FastDeploy's cache controller: its interface, and manager and controller together on Paddle tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fdcache.errors import CacheNotReadyError, LayoutError, StorageGoneError, StreamError
from fdcache.integrations.fastdeploy import (
    CacheController,
    CacheManager,
    LayerSwapTimeoutError,
    layout_from_config,
    settings_from_config,
)
from fdcache.metadata import StorageScan, SwapPurpose, TransferPlan
from fdcache.settings.cache import CopySettings, StorageTierSettings
from fdcache.storage.connector import ConnectorContext
from fdcache.storage.factory import open_storage
from fdcache.storage.slab import SlabStore
from tests.fastdeploy_help import BLOCK, fd_config, fd_request
from tests.faults import PausingDevice
from tests.service_help import TIMEOUT, local_service, until
from tests.swaps import Gate, swap

paddle = pytest.importorskip("paddle")


def backend(heads: int = 4, *, value: bool = True) -> Any:
    """An attention backend that names the shapes of its cache."""

    def get_kv_cache_shape(
        max_num_blocks: int, kv_cache_quant_type: str | None = None
    ) -> tuple[list[int], list[int]]:
        shape = [max_num_blocks, heads, BLOCK, 4 if kv_cache_quant_type == "int4_zp" else 8]
        return (shape, shape) if value else ([max_num_blocks, 1, BLOCK, 24], [])

    return SimpleNamespace(get_kv_cache_shape=get_kv_cache_shape)


class TestMemory:
    def test_tensors_come_layer_by_layer_zero_filled_in_the_models_dtype(self) -> None:
        controller = CacheController(fd_config(), local_rank=0, device_id=0)
        assert not controller.is_initialized()
        tensors = controller.initialize_kv_cache(backend(), 8)
        assert controller.is_initialized()
        assert [(tensor.shape, tensor.dtype) for tensor in tensors] == [
            ([8, 4, BLOCK, 8], paddle.bfloat16)
        ] * 6
        assert not any(tensor.astype("float32").any() for tensor in tensors)
        assert list(controller.get_kv_caches())[:2] == [
            "key_caches_0_rank0.device0",
            "value_caches_0_rank0.device0",
        ]
        controller.shutdown()

    def test_block_wise_fp8_adds_scales(self) -> None:
        controller = CacheController(fd_config(quantised="block_wise_fp8"), 0, 0)
        tensors = controller.initialize_kv_cache(backend(), 8)
        assert [tensor.dtype for tensor in tensors[:4]] == [paddle.uint8] * 2 + [paddle.bfloat16] * 2
        assert tensors[2].shape == [8, 4, BLOCK]
        assert list(controller.get_kv_caches())[2:4] == [
            "key_cache_scales_0_rank0.device0",
            "value_cache_scales_0_rank0.device0",
        ]
        controller.shutdown()

    def test_int4_puts_two_elements_into_a_byte(self) -> None:
        controller = CacheController(fd_config(quantised="int4_zp"), 0, 0)
        tensors = controller.initialize_kv_cache(backend(), 8)
        assert (tensors[0].dtype, tensors[0].shape) == (paddle.uint8, [8, 4, BLOCK, 4])
        controller.shutdown()

    def test_a_backend_without_values_makes_keys_only(self) -> None:
        controller = CacheController(fd_config(latent=16), 0, 0)
        assert len(controller.initialize_kv_cache(backend(value=False), 8)) == 3
        controller.shutdown()

    def test_latents_and_the_keys_of_an_indexer_come_layer_by_layer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FD_ATTENTION_BACKEND", "DSA_ATTN")
        config = fd_config(latent=512)
        config.model_config.index_head_dim = 128

        def shapes(max_num_blocks: int) -> tuple[list[int], list[int], list[int]]:
            return [max_num_blocks, 1, BLOCK, 544], [], [max_num_blocks, BLOCK, 132]

        controller = CacheController(config, 0, 0)
        tensors = controller.initialize_kv_cache(SimpleNamespace(get_kv_cache_shape=shapes), 8)
        assert [tensor.shape for tensor in tensors] == [[8, 1, BLOCK, 544], [8, BLOCK, 132]] * 3
        assert {tensor.dtype for tensor in tensors} == {paddle.uint8}
        assert list(controller.get_kv_caches())[:2] == [
            "key_caches_0_rank0.device0",
            "indexer_caches_0_rank0.device0",
        ]
        controller.shutdown()

    def test_tensors_made_by_the_backend_are_used(self) -> None:
        made = []

        def create_kv_cache(
            max_num_blocks: int, cache_dtype: str, kv_cache_quant_type: str | None
        ) -> dict[str, Any]:
            shape = [max_num_blocks, 4, BLOCK, 8]
            made.append({kind: paddle.zeros(shape, dtype=cache_dtype) for kind in ("value", "key")})
            return made[-1]

        controller = CacheController(fd_config(), 0, 0)
        tensors = controller.initialize_kv_cache(SimpleNamespace(create_kv_cache=create_kv_cache), 8)
        assert [id(tensor) for tensor in tensors] == [
            id(each[kind]) for each in made for kind in ("key", "value")
        ]
        controller.shutdown()

    def test_draft_layers_complete_the_cache(self) -> None:
        controller = CacheController(fd_config(method="mtp", ratio=1.5), 0, 0)
        assert len(controller.initialize_kv_cache(backend(), 8)) == 6
        assert not controller.is_initialized()
        with pytest.raises(LayoutError, match="from layer 3 on"):
            controller.initialize_mtp_kv_cache(backend(), 12, num_mtp_layers=2, layer_offset=3)
        drafts = controller.initialize_mtp_kv_cache(backend(), 12, num_mtp_layers=1, layer_offset=3)
        assert [tensor.shape[0] for tensor in drafts] == [12, 12]
        assert controller.is_initialized()
        controller.shutdown()

    def test_an_interrupted_start_before_the_draft_layers_can_be_repeated(self) -> None:
        controller = CacheController(fd_config(method="mtp"), 0, 0)
        controller.initialize_kv_cache(backend(), 8)
        assert controller.free_cache()
        assert len(controller.initialize_kv_cache(backend(), 6)) == 6
        drafts = controller.initialize_mtp_kv_cache(backend(), 6, num_mtp_layers=1, layer_offset=3)
        assert [tensor.shape[0] for tensor in drafts] == [6, 6]
        controller.shutdown()

    def test_shapes_that_are_not_the_layouts_are_refused(self) -> None:
        with pytest.raises(LayoutError, match="shapes"):
            CacheController(fd_config(), 0, 0).initialize_kv_cache(backend(heads=2), 8)

    def test_free_cache_releases_everything_and_a_new_start_works(self) -> None:
        controller = CacheController(fd_config(), 0, 0)
        controller.initialize_kv_cache(backend(), 8)
        with pytest.raises(CacheNotReadyError):
            controller.initialize_kv_cache(backend(), 8)
        controller.free_gpu_cache()
        assert controller.core.host_arena is not None
        controller.initialize_kv_cache(backend(), 8)
        controller.free_cache()
        controller.initialize_kv_cache(backend(), 8)
        controller.free_cache(clear_storage=True)  # there is none
        assert controller.get_kv_caches() == {}
        assert controller.reset_cache()
        controller.shutdown()


class TestCopies:
    @staticmethod
    def filled(tensors: Sequence[Any], value: float) -> None:
        for tensor in tensors:
            tensor[0] = paddle.full(tensor.shape[1:], value, dtype=tensor.dtype)

    def test_transfer_settings_apply_to_the_device(self) -> None:
        controller = CacheController(fd_config(), 0, 0, settings=CopySettings(verify="all"))
        tensors = controller.initialize_kv_cache(backend(), 4)
        self.filled(tensors, 3.0)
        controller.evict_device_to_host(swap(SwapPurpose.EVICT, [(0, 1)])).wait_all()
        assert controller.core.host_arena is not None
        controller.core.host_arena.table.record(1)[5] ^= 1
        controller.core.poll()
        controller.load_host_to_device(swap(SwapPurpose.LOAD, [(1, 2)])).wait_all()
        (report,) = controller.core.poll()
        assert "checksum" in str(report.results[0].error_message)
        controller.shutdown()

    @pytest.mark.parametrize("call", ["batch", "one transfer"])
    def test_copies_wait_for_the_compute_stream(self, call: str) -> None:
        gate = Gate()
        controller = CacheController(fd_config(), 0, 0, compute_stream=lambda: gate.stream)
        tensors = controller.initialize_kv_cache(backend(), 4)
        self.filled(tensors, 3.0)
        evictions = swap(SwapPurpose.EVICT, [(0, 1)])
        if call == "batch":
            counter = controller.submit_swap_tasks([TransferPlan(plan_id=1, evictions=evictions)])
        else:
            counter = controller.evict_device_to_host(evictions)
        assert counter is not None and not counter.is_layer_done(0)
        self.filled(tensors, 5.0)  # earlier work of the stream
        gate.open()
        counter.wait_all()
        controller.load_host_to_device(swap(SwapPurpose.LOAD, [(1, 2)])).wait_all()
        assert all((tensor[2].astype("float32") == 5.0).all() for tensor in tensors)
        controller.shutdown()

    def test_a_refused_submission_leaves_no_counter_and_reports_every_plan(self) -> None:
        stream: Any = None
        controller = CacheController(fd_config(), 0, 0, compute_stream=lambda: stream)
        controller.initialize_kv_cache(backend(), 4)
        first = controller.submit_swap_tasks(
            [TransferPlan(plan_id=1, evictions=swap(SwapPurpose.EVICT, [(0, 1)]))]
        )
        assert first is not None and first is controller.swap_layer_done_counter
        first.wait_all()
        assert [report.plan_id for report in controller.poll()] == [1]
        stream = "not a stream"
        plans = [TransferPlan(plan_id=2 + n, loads=swap(SwapPurpose.LOAD, [(1, 2 + n)])) for n in range(2)]
        with pytest.raises(StreamError, match="compute_stream"):
            controller.submit_swap_tasks(plans)
        assert not controller.swap_layer_done_counter
        reports = {report.plan_id: report.results[0].failed.tolist() for report in controller.poll()}
        assert reports == {2: [0], 3: [0]}
        controller.shutdown()


class Engine:
    """A scheduler and a worker with FastDeploy's calls. A block's content is its tokens, in every plane."""

    def __init__(
        self, device: Any = None, storage: Path | None = None, server: str | None = None, **config: Any
    ) -> None:
        self.storage = StorageTierSettings()
        if storage:
            self.storage = StorageTierSettings(
                connector="local", directory=storage, size="1MiB", prefetch_policy="wait_complete"
            )
        settings = settings_from_config(fd_config(**config), layout_from_config(fd_config(**config)))
        settings = settings.model_copy(update={"server": server, "rpc_timeout": TIMEOUT})
        self.manager = CacheManager(fd_config(**config), settings=settings, storage=self.storage)
        host = self.manager.host_cache if server else None
        self.controller = CacheController(fd_config(**config), 0, 0, device=device, host_cache=host)
        scan = self.start()
        self.restored = self.manager.core.restore_storage([scan]) if scan else 0

    def start(self) -> StorageScan | None:
        """Allocate the memory, and open the storage if there is one."""
        self.planes = self.controller.initialize_kv_cache(backend(), self.manager.num_gpu_blocks)
        store = open_storage(ConnectorContext(self.controller.layout, 0, self.storage))
        return self.controller.initialize_storage(store) if store else None

    def serve(self, request: Any) -> int:
        """Serve a request, check all reused blocks, and return their number."""
        self.manager.match_prefix(request, skip_storage=False)
        while request._match_result.deferred:
            self.collect()
            self.manager.match_prefix(request)
        match = request._match_result
        tokens = np.array(request.prompt_token_ids, np.float32)
        total = len(tokens) // BLOCK + 1
        table = match.device_block_ids
        table = table + self.manager.allocate_gpu_blocks(request, total - len(table))
        assert len(table) == total
        plans = self.manager.issue_pending_backup_to_batch_request()
        counter = self.controller.submit_swap_tasks(plans, plans)
        for layer in range(3):
            if counter:
                counter.wait_for_layer(layer)
            for plane in self.planes[2 * layer : 2 * layer + 2]:
                for index in range(match.total_matched_blocks):
                    expected = tokens[index * BLOCK : (index + 1) * BLOCK]
                    assert (
                        plane[table[index], 1, :, 3].astype("float32").numpy().tolist() == expected.tolist()
                    )
                for index in range(match.total_matched_blocks, len(tokens) // BLOCK):
                    content = paddle.to_tensor(tokens[index * BLOCK : (index + 1) * BLOCK]).reshape(
                        [1, BLOCK, 1]
                    )
                    plane[table[index]] = content.expand([4, BLOCK, 8]).astype("bfloat16")
        self.collect()
        request.output_token_ids.append(1)
        self.manager.check_and_add_pending_backup()
        self.manager.request_finish(request)
        self.controller.submit_swap_tasks(self.manager.issue_pending_backup_to_batch_request())
        self.collect()
        return int(match.total_matched_blocks)

    def collect(self) -> None:
        while True:
            self.controller.submit_swap_tasks(self.manager.issue_pending_backup_to_batch_request())
            stats = self.manager.core.get_stats()
            if not stats.plans_in_flight and not stats.queued_stores:
                return
            self.manager.apply(self.controller.poll())


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_evicted_blocks_are_loaded_byte_for_byte(policy: str) -> None:
    engine = Engine(write_policy=policy, total_block_num=8, num_cpu_blocks=32)
    for _ in range(2):
        engine.serve(fd_request("a", prompt=[*range(4 * BLOCK), 99]))
    engine.serve(fd_request("b", prompt=[*range(100, 100 + 6 * BLOCK), 99]))
    assert engine.serve(fd_request("a again", prompt=[*range(4 * BLOCK), 99])) == 4
    assert engine.manager.core.get_stats().counters.loads_confirmed == 1
    engine.manager.core.check_integrity()
    engine.controller.shutdown()


def test_two_engines_share_the_host_tier_of_a_service(tmp_path: Path) -> None:
    prompt = [*range(4 * BLOCK), 99]
    with local_service(tmp_path) as service:
        for found in (0, 4):
            engine = Engine(server=service.address)
            host = engine.manager.core._host
            until(lambda host=host: host.index.room >= 4, "slots are granted")  # type: ignore[misc]
            assert engine.serve(fd_request("a", prompt=prompt)) == found
            assert engine.manager.core.get_stats().counters.loads_confirmed == found // 4
            engine.controller.shutdown()
            engine.manager.core.close()
        until(lambda: not service.ask("clients"), "both engines have disconnected")


class EnvironmentEngine(Engine):
    """An engine whose manager and controller get the configuration alone."""

    def __init__(self, **config: Any) -> None:
        self.manager = CacheManager(fd_config(**config))
        self.controller = CacheController(fd_config(**config), 0, 0)
        self.planes = self.controller.initialize_kv_cache(
            backend(), fd_config(**config).cache_config.total_block_num
        )
        scan = self.controller.initialize_storage()
        self.restored = self.manager.core.restore_storage([scan]) if scan else 0

    def close(self) -> None:
        self.controller.shutdown()
        self.manager.core.close()


def test_the_environment_alone_connects_two_engines_to_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [*range(4 * BLOCK), 99]
    monkeypatch.setenv("FDCACHE_RPC_TIMEOUT", f"{TIMEOUT}s")
    with local_service(tmp_path) as service:
        monkeypatch.setenv("FDCACHE_SERVER", service.address)
        for found in (0, 4):
            engine = EnvironmentEngine()
            host = engine.manager.core._host
            until(lambda host=host: host.index.room >= 4, "slots are granted")  # type: ignore[misc]
            assert engine.serve(fd_request("a", prompt=prompt)) == found
            assert engine.manager.core.get_stats().counters.host_hit_tokens == found * BLOCK
            engine.close()
        until(lambda: not service.ask("clients"), "both engines have disconnected")


def test_the_environment_alone_configures_memory_and_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "FDCACHE_DEVICE_BLOCKS": "8",
        "FDCACHE_HOST_MEMORY": "1MiB",
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path),
        "FDCACHE_STORAGE_SIZE": "1MiB",
        "FDCACHE_PREFETCH_POLICY": "wait_complete",
        "FDCACHE_SWAP_DRAIN_TIMEOUT": "7s",
        "FDCACHE_VERIFY": "all",
    }
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    prompt = [*range(4 * BLOCK), 99]
    for restored in (0, 4):
        engine = EnvironmentEngine(total_block_num=32, num_cpu_blocks=0)
        assert [plane.shape[0] for plane in engine.planes] == [8] * 6
        assert engine.manager.num_gpu_blocks == 8
        arena = engine.controller.core.host_arena
        assert arena is not None and arena.num_blocks == engine.manager.num_cpu_blocks > 0
        assert engine.restored == restored
        assert engine.serve(fd_request("a", prompt=prompt)) == restored
        assert engine.controller.core.settings.drain_timeout == 7.0
        assert engine.controller.core.settings.verify == "all"
        engine.close()


def test_settings_of_the_controller_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_VERIFY", "all")
    own = CopySettings(verify="off")
    with CacheController(fd_config(), 0, 0, settings=own).core as core:
        assert core.settings == own


def test_clearing_the_storage_leaves_nothing_to_read(tmp_path: Path) -> None:
    prompt = [*range(4 * BLOCK), 99]
    before = Engine(storage=tmp_path)
    before.serve(fd_request("a", prompt=prompt))
    before.controller.shutdown()
    engine = Engine(storage=tmp_path)
    assert engine.restored == 4
    engine.controller.free_cache(clear_storage=True)
    scan = engine.start()
    assert scan is not None
    assert not len(scan.slots)
    assert (
        engine.serve(fd_request("a", prompt=prompt)) == 0
    )  # the manager still plans reads, which find nothing
    assert engine.manager.core.get_stats().counters.blocks_requested_from_storage == 4
    engine.manager.core.check_integrity()
    engine.controller.shutdown()
    after = Engine(storage=tmp_path)
    assert after.restored == 4
    assert after.serve(fd_request("a", prompt=prompt)) == 4
    after.controller.shutdown()


def test_nothing_is_released_if_the_storage_cannot_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(storage=tmp_path)
    engine.serve(fd_request("a", prompt=[*range(4 * BLOCK), 99]))

    def fail(*_: object, **__: object) -> int:
        raise StorageGoneError("the disk is gone")

    monkeypatch.setattr(SlabStore, "clear", fail)
    with pytest.raises(StorageGoneError):
        engine.controller.free_cache(clear_storage=True)
    assert engine.controller.is_initialized()
    assert engine.serve(fd_request("again", prompt=[*range(4 * BLOCK), 99])) == 4
    engine.controller.shutdown()


def test_the_layer_counter_waits_layer_by_layer_and_times_out() -> None:
    device = PausingDevice(pause_at=1)
    engine = Engine(device, total_block_num=8, num_cpu_blocks=32)
    device.resume.set()
    engine.serve(fd_request("a", prompt=[*range(4 * BLOCK), 99]))
    engine.serve(fd_request("b", prompt=[*range(100, 100 + 6 * BLOCK), 99]))
    device.resume = type(device.resume)()
    again = fd_request("a again", prompt=[*range(4 * BLOCK), 99])
    engine.manager.match_prefix(again)
    engine.manager.allocate_gpu_blocks(again, 5 - again._match_result.matched_device_nums)
    counter = engine.controller.submit_swap_tasks(engine.manager.issue_pending_backup_to_batch_request())
    assert counter is not None
    assert counter is engine.controller.swap_layer_done_counter
    counter.wait_for_layer(0)
    with pytest.raises(LayerSwapTimeoutError):
        counter.wait_for_layer(2, timeout=0.01)
    assert not counter.is_all_done()
    device.resume.set()
    counter.wait_all()
    engine.collect()
    engine.controller.shutdown()


def test_copies_outside_any_plan_are_not_reported() -> None:
    engine = Engine(total_block_num=8, num_cpu_blocks=32)
    engine.serve(fd_request("a", prompt=[*range(4 * BLOCK), 99]))
    engine.serve(fd_request("b", prompt=[*range(100, 100 + 6 * BLOCK), 99]))
    again = fd_request("a again", prompt=[*range(4 * BLOCK), 99])
    engine.manager.match_prefix(again)
    engine.manager.allocate_gpu_blocks(again, 5 - again._match_result.matched_device_nums)
    (plan, *_) = engine.manager.issue_pending_backup_to_batch_request()
    assert plan.loads is not None
    engine.controller.load_host_to_device(plan.loads).wait_all()
    assert engine.controller.poll() == []
    with pytest.raises(LayoutError, match="load, not a evict"):
        engine.controller.evict_device_to_host(plan.loads)
    engine.controller.shutdown()
    assert engine.controller.submit_swap_tasks(None, None) is None
