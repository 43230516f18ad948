"""CacheController: memory in use by copies, sleep and shutdown."""

from __future__ import annotations

import threading

import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import (
    CacheNotReadyError,
    HostMemoryError,
    TransferTimeoutError,
)
from fdcache.settings.cache import CopySettings
from tests.swaps import PATIENCE, Gate, Worker, plan, uniform_layout


@pytest.fixture
def worker() -> Worker:  # type: ignore[misc]
    with Worker(first_group_layers=1, group_layers=2) as made:
        yield made


class TestLifeCycle:
    @pytest.mark.parametrize("method", ["free_cache", "sleep", "shutdown"])
    def test_memory_of_a_copy_in_flight_is_not_freed(self, method: str) -> None:
        worker = Worker(drain_timeout=0.02)
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        written = worker.block(1)
        with pytest.raises(TransferTimeoutError, match="plan 1 is still in flight"):
            getattr(worker.controller, method)()
        gate.open()
        assert worker.report().results[0].success
        worker.run(plan(2, load=[(1, 3)]))
        assert worker.block(3) == written
        worker.controller.shutdown()

    def test_shutdown_waits_for_copies_in_flight(self) -> None:
        worker = Worker()
        gate = Gate()
        worker.controller.submit_swap_tasks(plan(1, evict=[(1, 1)]), gate.stream)
        opening = threading.Timer(0.05, gate.open)
        opening.start()
        worker.controller.shutdown(PATIENCE)
        opening.join()
        assert worker.controller.poll()[0].results[0].success

    def test_shutdown_is_idempotent_and_final(self) -> None:
        worker = Worker()
        worker.controller.shutdown()
        worker.controller.shutdown()
        for use in (
            lambda: worker.controller.submit_swap_tasks(plan(1)),
            lambda: worker.controller.initialize_kv_cache(1),
            lambda: worker.controller.initialize_host_cache(1),
            worker.controller.free_cache,
            worker.controller.sleep,
            worker.controller.wakeup,
        ):
            with pytest.raises(CacheNotReadyError, match="shut down"):
                use()

    def test_sleep_frees_the_planes_and_keeps_the_host_cache(self, worker: Worker) -> None:
        original = worker.block(3)
        worker.run(plan(1, backup=[(3, 5)]))
        worker.tensors.clear()
        worker.controller.sleep()
        with pytest.raises(CacheNotReadyError, match="wakeup"):
            worker.controller.submit_swap_tasks(plan(2, load=[(5, 6)]))
        (refused,) = worker.controller.poll()
        assert refused.results[0].failed.tolist() == [0]
        worker.tensors = worker.controller.wakeup()
        assert not any(any(data) for data in worker.block(3))
        worker.run(plan(3, load=[(5, 6)]))
        assert worker.block(6) == original

    def test_caches_can_be_made_again_after_free_cache(self, worker: Worker) -> None:
        worker.run(plan(1, backup=[(3, 5)]))
        worker.controller.free_cache()
        with pytest.raises(CacheNotReadyError, match="registered by the engine"):
            worker.controller.wakeup()
        worker.tensors = worker.controller.initialize_kv_cache(4)
        worker.controller.initialize_host_cache(8)
        assert worker.run(plan(2, load=[(5, 3)])).results[0].failed.tolist() == [0]

    def test_a_second_cache_is_refused(self, worker: Worker) -> None:
        with pytest.raises(CacheNotReadyError, match="device planes exist already"):
            worker.controller.initialize_kv_cache(4)
        with pytest.raises(CacheNotReadyError, match="host cache exists already"):
            worker.controller.initialize_host_cache(4)

    def test_a_host_cache_larger_than_the_memory_is_refused(self) -> None:
        with CacheController(CopySettings(), uniform_layout()) as controller:
            with pytest.raises(HostMemoryError, match="ask for at most"):
                controller.initialize_host_cache(1 << 40)
            controller.initialize_host_cache(1)
