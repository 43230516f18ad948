"""The two classes as the plug-in puts them into FastDeploy: plans and reports travel by themselves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import CacheNotReadyError, ConfigurationError, FdcacheError
from fdcache.integrations.fastdeploy_config import layout_from_config, load_settings, quantisation
from fdcache.integrations.fastdeploy_controller import CacheController as Controller
from fdcache.integrations.fastdeploy_link import Lost, News, SchedulerLink, WorkerLink
from fdcache.integrations.fastdeploy_manager import CacheManager as Manager
from fdcache.integrations.fastdeploy_variables import is_preempted
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.metadata import StorageScan, TransferPlan, TransferReport
from fdcache.service.wire.address import default_runtime_dir, make_runtime_dir
from fdcache.settings import Settings

logger = logging.getLogger(__name__)

_MARK = "fdcache:"
_CONNECT_SECONDS = 60.0
_REPORT_SECONDS = 0.01
_DUE_SECONDS, _TURN_SECONDS = 5.0, 0.0005


def socket_of(config: Any, settings: Settings) -> Path:
    """The socket between the scheduler and the workers of one engine, told apart by the engine's queue port.

    Raises ``ConfigurationError`` where the configuration has none, or its folder cannot be used.
    """
    port = getattr(config.parallel_config, "local_engine_worker_queue_port", None)
    if port is None:
        raise ConfigurationError(
            "parallel_config.local_engine_worker_queue_port is not set; scheduler and workers find each other by it"
        )
    folder = default_runtime_dir(settings.server.runtime_dir)
    make_runtime_dir(folder)
    return folder / f"fastdeploy-{port}.sock"


@dataclass
class PlanMark:
    """What a batch carries: up to which plan its step needs. FastDeploy joins the lists of batches that it merges."""

    hash_values: list[str]
    src_block_ids: list[int] = field(default_factory=list)
    dst_block_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, number: int) -> PlanMark:
        """The mark of one plan."""
        return cls([f"{_MARK}{number}"])


def marked_plan(metadata: Any) -> int:
    """The highest plan that a batch's record names; 0 for none."""
    values = getattr(metadata, "hash_values", None) or ()
    return max((int(value[len(_MARK) :]) for value in values if value.startswith(_MARK)), default=0)


class CacheManager(Manager):
    """FastDeploy's cache manager, with a line to its workers.

    A request whose load failed is not computed again in place: it publishes nothing more, ``take_failed`` names it to
    be preempted, and ``unsound`` until it is matched again, for tokens that are still on their way. One that waits
    for storage stands back by FastDeploy's own means, a future of its preprocessing.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._link = SchedulerLink(socket_of(config, self._settings), self.core.layout, quantisation(config))
        self._scans: dict[int, StorageScan] = {}
        self._failed: dict[str, Any] = {}
        self._unsound: set[str] = set()
        self._reading: dict[str, tuple[Any, Future[None]]] = {}

    def close(self) -> None:
        """Let the workers go, and say goodbye to the service. Harmless when done before."""
        self._link.close()
        self.core.close()

    def reset_cache(self) -> bool:
        """As before."""
        with self._requests:
            self._unsound.clear()
        return super().reset_cache()

    # --- requests -----------------------------------------------------------------------------------------

    def expect(self, request: Any) -> None:
        """A request has arrived: read from storage what it will need, and keep it out of the way meanwhile.

        The items of a multimodal one may still be on their way, so it reads when it is matched.
        """
        if self.core.reads_storage and not request.multimodal_inputs:
            self.prefetch_storage(request)
            self._let_wait(request)

    def match_prefix(self, request: Any, skip_storage: bool = True) -> None:
        """As before. Raises ``CacheNotReadyError``, which FastDeploy takes for "later", while storage is being read."""
        with self._requests:
            super().match_prefix(request, skip_storage)
            if not request._match_result.deferred:
                self._unsound.discard(request.request_id)
                self._let_go_on(request.request_id)
                return
            self._let_wait(request)
        raise CacheNotReadyError(f"request {request.request_id!r} waits for blocks; match it again later")

    def request_finish(self, request: Any) -> None:
        """As before; a request that waits for storage goes on waiting.

        FastDeploy may preempt a request for want of blocks while its load is in flight. The load's outcome then belongs
        to no request, so tokens that were sampled above it count as unsound until the request is matched again.
        """
        with self._requests:
            if request.request_id in self._reading:
                return
            served = self._served.get(request.request_id)
            if not is_preempted(request):
                self._unsound.discard(request.request_id)
            elif served is not None and served.request.is_loading:
                self._unsound.add(request.request_id)
            super().request_finish(request)

    def take_failed(self) -> list[Any]:
        """The requests whose load failed since the last call; they have to be preempted."""
        with self._requests:
            failed, self._failed = list(self._failed.values()), {}
            return failed

    def unsound(self, names: Iterable[str]) -> set[str]:
        """Those of the requests whose tokens were sampled above a load that failed.

        Workers have waited for the loads of a step by the time that they sample its tokens, so their reports are due.
        """
        names = list(names)
        deadline = time.monotonic() + _DUE_SECONDS
        while loading := self._loading(names):
            if time.monotonic() > deadline:
                late = "its tokens came and its report did not"
                self._heed([LoadOutcome(name, LoadStatus.OVERDUE, 0, late) for name in loading])
                break
            time.sleep(_TURN_SECONDS)
        return self._unsound.intersection(names)

    def _loading(self, names: Iterable[str]) -> list[str]:
        with self._requests:
            loading = [
                name for name in names if (served := self._served.get(name)) and served.request.is_loading
            ]
            if loading:
                self.collect()
            return [name for name in loading if self._served[name].request.is_loading]

    def apply(self, reports: Iterable[TransferReport]) -> list[LoadOutcome]:
        """Take the workers' reports; what failed is kept for ``take_failed``."""
        outcomes = super().apply(reports)
        self._heed(outcomes)
        return outcomes

    def _heed(self, outcomes: Sequence[LoadOutcome]) -> None:
        with self._requests:
            for outcome in outcomes:
                served = self._served.get(outcome.request_id)
                if outcome.status is LoadStatus.CONFIRMED or served is None:
                    continue
                logger.warning(
                    "a load of request %s is %s: %s",
                    outcome.request_id,
                    outcome.status,
                    outcome.error_message,
                )
                served.load_failed = True
                self._unsound.add(outcome.request_id)
                self._failed[outcome.request_id] = served.engine_request

    def _let_wait(self, request: Any) -> None:
        if request.request_id not in self._reading:
            ready: Future[None] = Future()
            request.async_process_futures.append(ready)
            self._reading[request.request_id] = (request, ready)

    def _let_go_on(self, name: str) -> None:
        _, ready = self._reading.pop(name, (None, None))
        if ready is not None:
            ready.set_result(None)

    def _look_after_readers(self) -> None:
        """Let those go on whose blocks have come; their match finds them in the host tier."""
        with self._requests:
            for name, (request, _) in list(self._reading.items()):
                super().match_prefix(request)
                if request._match_result.deferred:
                    continue
                served = self._served[name]
                self.core.unmatch([served.request])
                served.matched = False
                self._let_go_on(name)

    # --- a step -------------------------------------------------------------------------------------------

    def issue_pending_backup_to_batch_request(self) -> Any:
        """Close the step and send its plans; returns the mark that its batch carries, None before the first plan.

        A batch names the last plan even when it needs none, for the batch before might have been lost.
        """
        self._send_plans()
        return PlanMark.of(self._link.announced) if self._link.announced else None

    def check_and_add_pending_backup(self) -> None:
        """Publish what was computed, take the workers' news, and send what does not depend on a step."""
        super().check_and_add_pending_backup()
        self.collect()
        self._look_after_readers()
        self._send_plans()

    def collect(self) -> None:
        """Take what has come from the workers, and what is overdue."""
        with self._requests:
            self._take(self._link.collect())

    def _take(self, all_news: Iterable[News]) -> None:
        reports: list[TransferReport] = []
        for news in all_news:
            if isinstance(news, TransferReport):
                reports.append(news)
            elif isinstance(news, Lost):
                self.apply(reports)
                reports = []
                logger.warning(
                    "the worker of rank %d is gone, and what it held: the cache begins anew", news.rank
                )
                self._heed(self.core.worker_lost(news.rank))
                self._link.forget(news.rank)
            else:
                self._restore(news)
        self.apply(reports)

    def _send_plans(self) -> None:
        for plan in self.core.take_plans():
            if plan.loads is None and plan.evictions is None:
                self._link.send(plan)
            else:
                self._link.announce(plan)

    def _restore(self, scan: StorageScan) -> None:
        self._scans[scan.rank] = scan
        if len(self._scans) == self.core.layout.tp_size:
            restored = self.core.restore_storage(list(self._scans.values()))
            logger.info("%d blocks are in the storage", restored)
            self._scans.clear()


class CacheController(Controller):
    """FastDeploy's cache controller, with a line to its scheduler, whose layout it takes over."""

    def __init__(self, config: Any, local_rank: int, device_id: int, **parts: Any) -> None:
        own = layout_from_config(config)
        settings = load_settings(config, own)
        rank = local_rank % own.tp_size
        self._link = WorkerLink(
            socket_of(config, settings), rank, own, quantisation(config), _CONNECT_SECONDS
        )
        super().__init__(config, local_rank, device_id, layout=self._link.layout, **parts)
        self._timeout = self.core.settings.layer_timeout
        self._has_storage = False
        self._to_report: set[int] = set()
        self._submitted = threading.Condition()
        self._is_closed = False
        self._link.start(self._submit_now)
        self._reporter = threading.Thread(target=self._report, name="fdcache-reports", daemon=True)
        self._reporter.start()

    def initialize_kv_cache(self, attn_backend: Any, num_gpu_blocks: int) -> list[Any]:
        """As before; opens the storage too, once everything is there."""
        tensors = super().initialize_kv_cache(attn_backend, num_gpu_blocks)
        self._open_storage()
        return tensors

    def initialize_mtp_kv_cache(
        self, attn_backend: Any, num_gpu_blocks: int, num_mtp_layers: int, layer_offset: int
    ) -> list[Any]:
        """As before; opens the storage too, once everything is there."""
        tensors = super().initialize_mtp_kv_cache(attn_backend, num_gpu_blocks, num_mtp_layers, layer_offset)
        self._open_storage()
        return tensors

    def submit_swap_tasks(self, evict_metadata: Any, swap_in_metadata: Any = None) -> LayerDoneCounter | None:
        """Put on the streams what the batch's step needs; the counter is that of its last plan."""
        plans = self._link.take(marked_plan(evict_metadata), self._timeout)
        stream = self._stream() if plans else None
        counters = [counter for plan in plans if (counter := self._submit(plan, stream))]
        for earlier in counters[:-1]:
            earlier.wait_all()
        self.swap_layer_done_counter = counters[-1] if counters else None
        return self.swap_layer_done_counter

    def free_cache(self, clear_storage: bool = False) -> bool:
        """As before."""
        self._has_storage = False
        return super().free_cache(clear_storage)

    def shutdown(self) -> None:
        """Wait for copies, report them, free everything, and say goodbye."""
        if self._is_closed:
            return
        super().shutdown()
        with self._submitted:
            self._is_closed = True
            self._submitted.notify_all()
        self._reporter.join()
        self._link.close()

    def _open_storage(self) -> None:
        if self.is_initialized() and not self._has_storage and self.core.host_arena is not None:
            scan = self.initialize_storage()
            self._has_storage = True
            if scan is not None:
                self._link.send_scan(scan)

    def _submit_now(self, plan: TransferPlan) -> None:
        """A plan that belongs to no step; it reads what is computed already."""
        self._submit(plan, self._stream())

    def _submit(self, plan: TransferPlan, stream: Any) -> LayerDoneCounter | None:
        try:
            return self.core.submit_swap_tasks(plan, stream)
        except FdcacheError as error:
            logger.error("plan %d cannot be carried out: %s", plan.plan_id, error)
            return None
        finally:  # carried out or refused, it is reported
            with self._submitted:
                self._to_report.update(plan.plan_ids)
                self._submitted.notify_all()

    def _report(self) -> None:
        """Send each report when its plan has ended."""
        while True:
            with self._submitted:
                self._submitted.wait_for(lambda: self._to_report or self._is_closed)
                if self._is_closed and not self._to_report:
                    return
            reports = self.core.wait_reports(_REPORT_SECONDS)
            self._link.report(reports)
            with self._submitted:
                self._to_report.difference_update(report.plan_id for report in reports)
