"""The plug-in's classes with stand-ins for FastDeploy's objects: plans and reports travel over the link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fdcache.controller import cache_controller
from fdcache.errors import CacheNotReadyError, ConfigurationError
from fdcache.integrations.fastdeploy.engine import LinkedController, LinkedManager, socket_of
from fdcache.settings import Settings
from fdcache.storage.connector import ConnectorContext
from fdcache.tiers import storage_reads
from tests.fastdeploy_help import BLOCK, fd_config, fd_request
from tests.faults import FailingLoadsDevice
from tests.service_help import until
from tests.storage_engine import SlowStore


class Wired:
    """A manager and one worker, with a model whose KV is its token."""

    def __init__(self, **config: Any) -> None:
        self.config = fd_config(dtype="float32", **config)
        self.config.parallel_config.local_engine_worker_queue_port = 7
        self.failing = False
        self.manager = LinkedManager(self.config)
        device = FailingLoadsDevice(lambda pairs: [0] if self.failing else [])
        self.controller = LinkedController(self.config, 0, 0, device=device)
        self.planes = self.controller.initialize_kv_cache(None, self.manager.num_gpu_blocks)

    def begin(self, request: Any) -> list[int]:
        """Schedule a request and compute its prompt."""
        self.manager.match_prefix(request)
        match = request._match_result
        total = (len(request.prompt_token_ids) + len(request.output_token_ids)) // BLOCK + 1
        table = match.device_block_ids
        table = [*table, *self.manager.allocate_gpu_blocks(request, total - len(table))]
        self.controller.submit_swap_tasks(self.manager.issue_pending_backup_to_batch_request())
        if self.controller.swap_layer_done_counter:
            self.controller.swap_layer_done_counter.wait_all()
        for index in range(match.total_matched_blocks, total):
            for plane in self.planes:
                plane[table[index]] = paddle.full(plane.shape[1:], float(request.prompt_token_ids[0]))
        return table

    def end(self, request: Any) -> None:
        request.output_token_ids.append(5)
        self.settle()
        self.manager.request_finish(request)
        self.settle()

    def settle(self) -> None:
        """Run empty steps until every plan is reported."""

        def settled() -> bool:
            self.manager.check_and_add_pending_backup()
            stats = self.manager.core.get_stats()
            return not stats.plans_in_flight and not stats.queued_backups

        until(settled, "every plan is reported")

    def drive_out(self) -> Any:
        """Return a request of four blocks that others have evicted to the host."""
        first = fd_request("a", prompt=[1] * (4 * BLOCK))
        self.begin(first)
        self.end(first)
        other = fd_request("b", prompt=[2] * (7 * BLOCK))
        self.begin(other)
        self.end(other)
        return fd_request("c", prompt=[1] * (4 * BLOCK) + [3])


@pytest.fixture
def wired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wired]:
    monkeypatch.setenv("FDCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    engine = Wired(total_block_num=8, num_cpu_blocks=32)
    yield engine
    engine.controller.shutdown()
    engine.manager.close()


def test_empty_steps_make_backups_and_evicted_blocks_are_loaded(wired: Wired) -> None:
    again = wired.drive_out()
    table = wired.begin(again)
    assert again._match_result.matched_host_nums == 4 - again._match_result.matched_device_nums > 0
    assert all(float(plane[block].min()) == 1.0 for plane in wired.planes for block in table[:4])
    wired.end(again)
    assert wired.manager.core.get_stats().counters.loads_confirmed == 1
    wired.manager.core.check_integrity()


def test_a_plan_survives_the_loss_of_its_batch(wired: Wired) -> None:
    again = wired.drive_out()
    wired.manager.match_prefix(again)
    wired.manager.allocate_gpu_blocks(again, 5 - again._match_result.matched_device_nums)
    wired.manager.issue_pending_backup_to_batch_request()  # with a batch that is lost
    wired.manager.request_finish(again)
    assert wired.manager.core.get_stats().plans_in_flight == 1
    wired.controller.submit_swap_tasks(wired.manager.issue_pending_backup_to_batch_request())
    wired.settle()
    assert wired.manager.num_free_device_blocks + wired.manager.core.get_stats().device.evictable == 8
    wired.manager.core.check_integrity()


def test_a_request_with_a_failed_load_is_returned_once_and_caches_nothing_until_its_next_match(
    wired: Wired,
) -> None:
    again = wired.drive_out()
    wired.failing = True
    wired.begin(again)
    wired.settle()
    wired.failing = False
    assert wired.manager.take_failed() == [again]
    assert wired.manager.take_failed() == []
    again.output_token_ids.extend([6] * (2 * BLOCK))
    wired.settle()
    wired.manager.request_finish(again)
    probe = fd_request("d", prompt=[*again.prompt_token_ids, *[6] * (2 * BLOCK)])
    wired.manager.match_prefix(probe)
    assert probe._match_result.total_matched_blocks <= 4
    wired.manager.request_finish(probe)
    wired.begin(again)  # after its next match it publishes again
    wired.end(again)
    wired.manager.match_prefix(probe)
    assert probe._match_result.total_matched_blocks > 4


def test_a_request_that_was_preempted_after_its_load_failed_is_not_returned_after_its_next_match(
    wired: Wired,
) -> None:
    again = wired.drive_out()
    wired.failing = True
    wired.begin(again)
    wired.settle()
    wired.failing = False
    again.status = SimpleNamespace(name="PREEMPTED")
    wired.manager.request_finish(again)
    wired.begin(again)
    assert wired.manager.take_failed() == []
    again.status = SimpleNamespace(name="FINISHED")
    wired.end(again)
    wired.manager.core.check_integrity()


def test_tokens_of_a_request_preempted_during_its_load_are_unsound_until_its_next_match(
    wired: Wired,
) -> None:
    again = wired.drive_out()
    wired.manager.match_prefix(again)
    wired.manager.allocate_gpu_blocks(again, 5 - again._match_result.matched_device_nums)
    batch = wired.manager.issue_pending_backup_to_batch_request()
    again.status = SimpleNamespace(name="PREEMPTED")
    wired.manager.request_finish(again)
    assert wired.manager.unsound([again.request_id]) == {again.request_id}
    wired.controller.submit_swap_tasks(batch)
    wired.settle()
    assert wired.manager.unsound([again.request_id]) == {again.request_id}
    wired.manager.match_prefix(again)
    assert wired.manager.unsound([again.request_id]) == set()
    again.status = SimpleNamespace(name="FINISHED")
    wired.manager.request_finish(again)
    wired.manager.core.check_integrity()


def test_a_plan_that_cannot_be_executed_is_reported_as_refused(wired: Wired) -> None:
    again = wired.drive_out()
    wired.manager.match_prefix(again)
    wired.manager.allocate_gpu_blocks(again, 5 - again._match_result.matched_device_nums)
    wired.controller.free_gpu_cache()
    wired.controller.submit_swap_tasks(wired.manager.issue_pending_backup_to_batch_request())
    wired.settle()
    assert wired.manager.take_failed() == [again]
    wired.manager.request_finish(again)
    wired.manager.core.check_integrity()


def test_the_death_of_a_worker_empties_the_tiers_and_a_successor_can_connect(wired: Wired) -> None:
    again = wired.drive_out()
    wired.controller.shutdown()
    until(lambda: len(wired.manager.link.pending_events) > 0, "the loss is detected")
    wired.manager.check_and_add_pending_backup()
    assert wired.manager.num_free_device_blocks == wired.manager.num_gpu_blocks
    wired.controller = LinkedController(wired.config, 0, 0)
    wired.planes = wired.controller.initialize_kv_cache(None, 8)
    wired.begin(again)
    assert again._match_result.total_matched_blocks == 0
    wired.end(again)
    wired.manager.core.check_integrity()


def test_a_request_waits_for_storage_like_for_its_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDCACHE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("FDCACHE_STORAGE", "local")
    monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path / "storage"))
    monkeypatch.setenv("FDCACHE_STORAGE_SIZE", "4MiB")
    monkeypatch.setenv("FDCACHE_PREFETCH_POLICY", "wait_complete")
    prompt = [1] * (4 * BLOCK) + [3]
    for found in (0, 4):
        wired = Wired(total_block_num=16, num_cpu_blocks=32)
        until(lambda wired=wired: wired.manager.link.pending_events, "the scan has arrived")  # type: ignore[misc]
        wired.manager.check_and_add_pending_backup()
        request = fd_request("a", prompt=prompt)
        request.async_process_futures, request.multimodal_inputs = [], None
        wired.manager.request_arrived(request)
        ready: Future[None] = request.async_process_futures[0]
        if found:
            with pytest.raises(CacheNotReadyError, match="later"):
                wired.manager.match_prefix(request)
        until(lambda wired=wired, ready=ready: (wired.settle(), ready.done())[1], "its blocks are there")  # type: ignore[misc]
        wired.begin(request)
        assert request._match_result.matched_storage_nums == found
        wired.end(request)
        until(
            lambda wired=wired: (wired.settle(), not wired.manager.core.get_stats().queued_stores)[1],  # type: ignore[misc]
            "everything is stored",
        )
        wired.controller.shutdown()
        wired.manager.close()


def test_a_missing_engine_port_is_reported_with_the_attribute() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace())
    with pytest.raises(ConfigurationError, match="local_engine_worker_queue_port"):
        socket_of(config, Settings())


class TestLoadsAhead:
    """A request for four blocks in storage, of which each read brings two when the disk may, and one that is stopped.

    The latter and another request have all device blocks but those that the stop sets free.
    """

    @pytest.fixture
    def disks(self, monkeypatch: pytest.MonkeyPatch) -> list[SlowStore]:
        disks: list[SlowStore] = []

        def opened(context: ConnectorContext) -> SlowStore:
            monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * context.layout.record_bytes)
            settings = context.settings
            disks.append(SlowStore(settings.directory, context.layout, rank=0, size=settings.size, threads=2))
            return disks[-1]

        monkeypatch.setattr(cache_controller, "open_storage", opened)
        return disks

    @pytest.fixture
    def wired(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disks: list[SlowStore]
    ) -> Iterator[Wired]:
        monkeypatch.setenv("FDCACHE_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("FDCACHE_STORAGE", "local")
        monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path / "storage"))
        monkeypatch.setenv("FDCACHE_STORAGE_SIZE", "4MiB")
        monkeypatch.setenv("FDCACHE_PREFETCH_POLICY", "wait_complete")
        first = Wired(total_block_num=9, num_cpu_blocks=32)
        self.restored(first)
        request = fd_request("stored", prompt=[1] * (4 * BLOCK) + [3])
        first.begin(request)
        first.end(request)

        def stored() -> bool:
            first.settle()
            return first.manager.core.get_stats().counters.blocks_stored == 4

        until(stored, "the blocks are stored")
        self.close(first)
        engine = Wired(total_block_num=9, num_cpu_blocks=32)
        self.restored(engine)
        disks[-1].gate.clear()
        yield engine
        disks[-1].gate.set()
        self.close(engine)

    def restored(self, engine: Wired) -> None:
        until(lambda: engine.manager.link.pending_events, "the scan has arrived")
        engine.manager.check_and_add_pending_backup()

    def close(self, engine: Wired) -> None:
        engine.settle()
        engine.manager.core.check_integrity()
        engine.controller.shutdown()
        engine.manager.close()

    def arrived(self, engine: Wired, disk: SlowStore) -> Any:
        """Return a request whose first two blocks have been read, and that is held back for the others."""
        request = fd_request("waits", prompt=[1] * (4 * BLOCK) + [4])
        request.async_process_futures, request.multimodal_inputs = [], None
        engine.manager.request_arrived(request)
        disk.allow(1)

        def come() -> bool:
            engine.manager.check_and_add_pending_backup()
            return engine.manager.core.get_stats().counters.blocks_prefetched == 2

        until(come, "two blocks are on the host")
        return request

    def loads(self, engine: Wired) -> int:
        """Run empty steps; return how many blocks have been loaded, all of them ahead."""
        for _ in range(50):
            engine.manager.check_and_add_pending_backup()
            time.sleep(0.001)
        counters = engine.manager.core.get_stats().counters
        assert counters.blocks_loaded in (0, counters.blocks_loaded_ahead)
        return int(counters.blocks_loaded)

    def ended(self, engine: Wired, disk: SlowStore, request: Any) -> None:
        """Let the disk answer, run the request, and compare the bytes of what it reuses."""
        disk.gate.set()
        (ready,) = request.async_process_futures

        def is_ready() -> bool:
            engine.settle()
            return bool(ready.done())

        until(is_ready, "its blocks are there")
        table = engine.begin(request)
        assert request._match_result.total_matched_blocks == 4
        assert all(float(plane[block].min()) == 1.0 for plane in engine.planes for block in table[:4])
        engine.end(request)

    def test_a_batch_is_not_needed(self, wired: Wired, disks: list[SlowStore]) -> None:
        wired.manager.follow_stops(set)
        request = self.arrived(wired, disks[-1])
        until(lambda: self.loads(wired) == 2, "two blocks are on the device")
        self.ended(wired, disks[-1], request)
        assert wired.manager.core.get_stats().counters.storage_hit_tokens == 4 * BLOCK

    def test_nothing_is_loaded_to_where_a_worker_may_still_write(
        self, wired: Wired, disks: list[SlowStore]
    ) -> None:
        stopping: set[str] = set()
        wired.manager.follow_stops(lambda: stopping)
        stopped, other = (fd_request(name, prompt=[7] * (4 * BLOCK)) for name in ("stopped", "other"))
        other.prompt_token_ids = [8] * (3 * BLOCK)
        wired.begin(other)
        table = wired.begin(stopped)
        request = self.arrived(wired, disks[-1])
        assert self.loads(wired) == 0, "there is no room"
        stopping.add("stopped")
        wired.manager.request_finish(stopped)
        assert self.loads(wired) == 0
        for plane in wired.planes:  # the workers have not heard of it
            for block in table:
                plane[block] = paddle.full(plane.shape[1:], 9.0)
        stopping.clear()
        until(lambda: self.loads(wired) == 2, "two blocks are on the device")
        wired.manager.request_finish(other)
        self.ended(wired, disks[-1], request)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"role": "prefill"}, "splitwise_role='prefill'.*set FDCACHE_TRANSFER=ipc or rdma"),
        ({"role": "decode"}, "splitwise_role='decode'.*set FDCACHE_TRANSFER=ipc or rdma"),
        (
            {"backend": "mooncake"},
            "kvcache_storage_backend='mooncake'.*set FDCACHE_STORAGE=mooncake.*leave out",
        ),
        ({"backend": "attention_store"}, "set FDCACHE_STORAGE=attnstore"),
        ({"backend": "file"}, "set FDCACHE_STORAGE=local and FDCACHE_STORAGE_DIR"),
    ],
    ids=lambda given: "-".join(given.values()) if isinstance(given, dict) else "",
)
def test_options_that_would_have_no_effect_are_refused_by_name_in_scheduler_and_workers(
    changed: dict[str, str], named: str
) -> None:
    config = fd_config(kvcache_storage_backend=changed.get("backend"))
    config.scheduler_config = SimpleNamespace(splitwise_role=changed.get("role", "mixed"))
    config.parallel_config.local_engine_worker_queue_port = 1
    with pytest.raises(ConfigurationError, match=named):
        LinkedManager(config)
    with pytest.raises(ConfigurationError, match=named):
        LinkedController(config, 0, 0)


def test_a_transfer_without_a_role_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_TRANSFER", "ipc")
    config = fd_config()
    config.parallel_config.local_engine_worker_queue_port = 1
    with pytest.raises(ConfigurationError, match=r"FDCACHE_TRANSFER=ipc.*--splitwise-role prefill or decode"):
        LinkedManager(config)
