"""The two classes that the plug-in installs in FastDeploy: plans and reports travel between them over a link."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import CacheNotReadyError, ConfigurationError, FdcacheError
from fdcache.integrations.fastdeploy.config import (
    layout_from_config,
    load_settings,
    quantisation,
)
from fdcache.integrations.fastdeploy.controller import FastDeployController
from fdcache.integrations.fastdeploy.link import PeerAddress, SchedulerLink, WorkerLink, WorkerLost
from fdcache.integrations.fastdeploy.manager import FastDeployManager
from fdcache.integrations.fastdeploy.prefills import PrefillTimes
from fdcache.integrations.fastdeploy.request_fields import is_preempted
from fdcache.integrations.fastdeploy.splitwise import Splitwise, has_role
from fdcache.manager.results import LoadOutcome, LoadStatus
from fdcache.metadata import StorageScan, TransferPlan, TransferReport
from fdcache.service.wire.address import default_runtime_dir, make_runtime_dir
from fdcache.settings import Settings

logger = logging.getLogger(__name__)

_MARK = "fdcache:"

_CONNECT_SECONDS = 60.0
_REPORT_SECONDS = 0.01
_LATE_REPORT_SECONDS, _POLL_SECONDS = 5.0, 0.0005


def socket_of(config: Any, settings: Settings) -> Path:
    """Return the path of the socket between an engine's scheduler and workers, named by the engine's queue port.

    Raises ``ConfigurationError`` if the configuration has no port, or the directory cannot be used.
    """
    port = getattr(config.parallel_config, "local_engine_worker_queue_port", None)
    if port is None:
        raise ConfigurationError(
            "parallel_config.local_engine_worker_queue_port is not set; set it, so that scheduler and "
            "workers find each other"
        )
    folder = default_runtime_dir(settings.server.runtime_dir)
    make_runtime_dir(folder)
    return folder / f"fastdeploy-{port}.sock"


@dataclass
class PlanMark:
    """Number of the last plan that a batch's step needs, and the batch's own, in the shape of FastDeploy's swap record.

    FastDeploy concatenates the lists of batches that it merges.
    """

    hash_values: list[str]
    src_block_ids: list[int] = field(default_factory=list)
    dst_block_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, number: int, batch: int) -> PlanMark:
        """Return the record for a batch that needs the plan with this number."""
        return cls([f"{_MARK}{number}:{batch}"])


def marked_plan(metadata: Any) -> tuple[int, int]:
    """Return the highest plan number in a batch's record, and the highest number of a batch; 0 for none."""
    values = getattr(metadata, "hash_values", None) or ()
    marks = [value[len(_MARK) :].split(":") for value in values if value.startswith(_MARK)]
    return max((int(plan) for plan, _ in marks), default=0), max(
        (int(batch) for _, batch in marks), default=0
    )


class LinkedManager(FastDeployManager):
    """FastDeploy's cache manager, connected to its workers.

    A request whose load failed is preempted: it publishes nothing more, ``take_failed`` returns it once, and
    ``unsound`` returns it until its next match, so that tokens in flight are dropped. A request that waits for storage
    is held back by FastDeploy's own means: a future of its preprocessing. Meanwhile its blocks are loaded, outside of
    batches, into device blocks that no worker writes any more; see ``follow_stops``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, loads_ahead=self._has_quiet_workers)
        self._stopping: Callable[[], Sized] | None = None
        self.splitwise = Splitwise.of(self, config, self._settings, self._lock)
        """The hand-overs of an instance whose role is prefill or decode."""
        self.link = SchedulerLink(socket_of(config, self._settings), self.core.layout, quantisation(config))
        self._batch = self._stopping_batch = self._released = 0
        self._scans: dict[int, StorageScan] = {}
        self._failed: dict[str, Any] = {}
        self._unsound: set[str] = set()
        self._reading: dict[str, tuple[Any, Future[None]]] = {}
        self._matched: Any = None  # the request that can_match has matched
        self._prefills = PrefillTimes()

    def close(self) -> None:
        """Disconnect the workers and the service. Idempotent."""
        self.link.close()
        self.core.close()

    def reset_cache(self) -> bool:
        """Drop everything that is cached; no request counts as unsound afterwards."""
        with self._lock:
            self._unsound.clear()
        return super().reset_cache()

    # --- requests -----------------------------------------------------------------------------------------

    def follow_stops(self, stopping: Callable[[], Sized]) -> None:
        """Take the way to ask for the requests whose blocks are free, and which the workers have not stopped yet.

        FastDeploy frees the blocks of a request when it decides to preempt or abort it. Workers go on writing them
        until the batch of that step has come, and answer it with a token of its own. A request that ends by itself is
        freed after its last token.
        """
        self._stopping = stopping

    def _has_quiet_workers(self) -> bool:
        return self._stopping is not None and not self._stopping()

    def request_arrived(self, request: Any) -> None:
        """Start reading a new request's blocks from storage, and hold it back meanwhile.

        The items of a multimodal request may be incomplete still, so its reads start with its match.
        """
        if self.core.reads_storage and not request.multimodal_inputs:
            self.prefetch_storage(request)
            self._hold_back(request)

    def match_prefix(self, request: Any, skip_storage: bool = True) -> None:
        """Pin the longest cached prefix and store the result in ``request._match_result``.

        Raises ``CacheNotReadyError`` while storage is being read; FastDeploy then tries again later.
        """
        with self._lock:
            was_matched, self._matched = self._matched is request, None
            if was_matched:
                return
            super().match_prefix(request, skip_storage)
            if not request._match_result.deferred:
                self._unsound.discard(request.request_id)
                self._resume(request.request_id)
                return
            self._hold_back(request)
        raise CacheNotReadyError(f"request {request.request_id!r} waits for blocks; match it again later")

    def can_match(self, request: Any) -> bool:
        """Match a request just before FastDeploy's scheduler does; return False, and hold it back, while it waits.

        FastDeploy takes an exception of its own call for an error, and logs it with a traceback.
        """
        with self._lock:
            self._matched = None
            try:
                self.match_prefix(request)
            except CacheNotReadyError:
                return False
            self._matched = request
            return True

    def request_finish(self, request: Any) -> None:
        """End, abort or preempt a request. Idempotent. A request that waits for storage keeps waiting.

        FastDeploy may preempt a request while its load is in flight. The load's outcome is then unknown to the
        request, so its tokens count as unsound until its next match.
        """
        with self._lock:
            self._matched = None
            if request.request_id in self._reading:
                return
            self._failed.pop(request.request_id, None)
            if self.splitwise is not None:
                self.splitwise.forget(request.request_id)
            tracked = self._tracked.get(request.request_id)
            self._prefills.ended(request.request_id)
            if not is_preempted(request):
                self._unsound.discard(request.request_id)
            elif tracked is not None and tracked.request.is_loading:
                self._unsound.add(request.request_id)
            super().request_finish(request)

    def scheduled(self, requests: Iterable[Any]) -> None:
        """Record the prefills that the scheduler has put into a step."""
        with self._lock:
            self._prefills.scheduled(
                (tracked.request, request.prefill_start_index, stop)
                for request in requests
                if (tracked := self._tracked.get(request.request_id)) is not None
                and (stop := min(request.prefill_end_index, tracked.request.num_tokens))
                > request.prefill_start_index
            )

    def sampled(self, names: Iterable[str]) -> None:
        """Record whose tokens have come, and with them how fast the engine computes."""
        with self._lock:
            found = self._prefills.sampled(names)
            if found is not None:
                self.core.observe_prefill(found.chunks, found.seconds, waited=found.waited, steps=found.steps)

    def take_failed(self, running: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """Return once the requests whose load failed and that are ``running``; the caller preempts them.

        A prefill instance plans the loads of a request before it runs it.
        """
        with self._lock:
            failed = [request for request in self._failed.values() if running(request)]
            for request in failed:
                del self._failed[request.request_id]
            return failed

    def unsound(self, names: Iterable[str]) -> set[str]:
        """Return the requests among ``names`` whose tokens were sampled after a failed load.

        Waits for reports of loads in flight: workers finish a step's loads before they sample its tokens.
        """
        names = list(names)
        deadline = time.monotonic() + _LATE_REPORT_SECONDS
        while loading := self._loading(names):
            if time.monotonic() > deadline:
                late = "its tokens arrived but not its report"
                self._handle_outcomes([LoadOutcome(name, LoadStatus.OVERDUE, 0, late) for name in loading])
                break
            time.sleep(_POLL_SECONDS)
        return self._unsound.intersection(names)

    def _loading(self, names: Iterable[str]) -> list[str]:
        with self._lock:
            loading = [
                name for name in names if (tracked := self._tracked.get(name)) and tracked.request.is_loading
            ]
            if loading:
                self.collect()
            return [name for name in loading if self._tracked[name].request.is_loading]

    def apply(self, reports: Iterable[TransferReport]) -> list[LoadOutcome]:
        """Apply the workers' reports; ``take_failed`` returns the requests whose loads failed."""
        outcomes = super().apply(reports)
        self._handle_outcomes(outcomes)
        return outcomes

    def _handle_outcomes(self, outcomes: Sequence[LoadOutcome]) -> None:
        with self._lock:
            for outcome in outcomes:
                tracked = self._tracked.get(outcome.request_id)
                if self.splitwise is not None and self.splitwise.take_outcome(outcome):
                    continue
                if outcome.status is LoadStatus.CONFIRMED or tracked is None:
                    continue
                logger.warning(
                    "a load of request %s is %s: %s",
                    outcome.request_id,
                    outcome.status,
                    outcome.error_message,
                )
                tracked.load_failed = True
                self._unsound.add(outcome.request_id)
                self._failed[outcome.request_id] = tracked.engine_request

    def _hold_back(self, request: Any) -> None:
        if request.request_id not in self._reading:
            ready: Future[None] = Future()
            request.async_process_futures.append(ready)
            self._reading[request.request_id] = (request, ready)

    def _resume(self, name: str) -> None:
        _, ready = self._reading.pop(name, (None, None))
        if ready is not None:
            ready.set_result(None)

    def _resume_readers(self) -> None:
        """Resume the requests whose blocks have been read; their match finds them in the host tier."""
        with self._lock:
            for name, (request, _) in list(self._reading.items()):
                super().match_prefix(request)
                if request._match_result.deferred:
                    continue
                tracked = self._tracked[name]
                self.core.unmatch([tracked.request])
                tracked.matched = False
                self._resume(name)

    # --- a step -------------------------------------------------------------------------------------------

    def issue_pending_backup_to_batch_request(self) -> Any:
        """Close the step, send its plans, and return the mark for its batch.

        Every batch names the last plan, even if it needs none: the previous batch may have been lost.
        """
        self._send_plans()
        self._batch += 1
        return PlanMark.of(self.link.announced, self._batch)

    def check_and_add_pending_backup(self) -> None:
        """Commit computed blocks, process the workers' messages, and send plans that do not depend on a step."""
        super().check_and_add_pending_backup()
        self.collect()
        self._resume_readers()
        self._send_plans()

    def collect(self) -> None:
        """Process the workers' messages and overdue plans."""
        with self._lock:
            reports: list[TransferReport] = []
            for event in self.link.collect():
                if isinstance(event, TransferReport):
                    reports.append(event)
                elif isinstance(event, PeerAddress):
                    if self.splitwise is not None:
                        self.splitwise.addresses[event.rank] = event.address
                elif isinstance(event, WorkerLost):
                    self.apply(reports)
                    reports = []
                    logger.warning("the worker of rank %d has ended; the cache is reset", event.rank)
                    self._handle_outcomes(self.core.worker_lost(event.rank))
                    self.link.forget(event.rank)
                else:
                    self._restore(event)
            self.apply(reports)

    def _send_plans(self) -> None:
        for plan in self.core.take_plans():
            if plan.is_ahead or (plan.loads is None and plan.evictions is None):
                self.link.send(plan)
            else:
                self.link.announce(plan)

    def release_plans(self, *, has_batch: bool, stops: bool) -> None:
        """Have workers submit the announced plans if the scheduler has made no batch that names them.

        Only roles do: a prefill ends, and a decode begins, beside what is scheduled. ``stops``: the batch stops
        requests, whose blocks are free already; nothing later is written to them before workers have taken that batch.
        """
        if self.splitwise is None:
            return
        if stops:
            self._stopping_batch = self._batch
        if not has_batch and self.link.announced > self._released:
            self._released = self.link.announced
            self.link.go(self._stopping_batch)

    def _restore(self, scan: StorageScan) -> None:
        self._scans[scan.rank] = scan
        if len(self._scans) == self.core.layout.tp_size:
            restored = self.core.restore_storage(list(self._scans.values()))
            logger.info("restored %d blocks of the storage", restored)
            self._scans.clear()


class LinkedController(FastDeployController):
    """FastDeploy's cache controller, connected to its scheduler, whose layout it adopts."""

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
        self._in_order = threading.Lock()
        self._early: list[tuple[int, LayerDoneCounter]] = []
        self._is_closed = False
        self._link.start(self._submit_now, self._submit_early)
        self._reporter = threading.Thread(target=self._report, name="fdcache-reports", daemon=True)
        self._reporter.start()

    def initialize_kv_cache(self, attn_backend: Any, num_gpu_blocks: int) -> list[Any]:
        """Make the tensors of the main layers and the host cache; without draft layers, also open the storage."""
        tensors = super().initialize_kv_cache(attn_backend, num_gpu_blocks)
        self._open_storage()
        self._open_transfer()
        return tensors

    def initialize_mtp_kv_cache(
        self, attn_backend: Any, num_gpu_blocks: int, num_mtp_layers: int, layer_offset: int
    ) -> list[Any]:
        """Make the tensors of the draft layers and open the storage."""
        tensors = super().initialize_mtp_kv_cache(attn_backend, num_gpu_blocks, num_mtp_layers, layer_offset)
        self._open_storage()
        self._open_transfer()
        return tensors

    def submit_swap_tasks(self, evict_metadata: Any, swap_in_metadata: Any = None) -> LayerDoneCounter | None:
        """Submit the plans that the batch's step needs; return the layer counter of the last one."""
        number, batch = marked_plan(evict_metadata)
        self._link.wait_for(number, self._timeout)
        with self._in_order:
            self._submit_up_to(number, batch)
            counters = [counter for plan, counter in self._early if plan <= number]
            self._early = [each for each in self._early if each[0] > number]
        for earlier in counters[:-1]:
            earlier.wait_all()
        self.swap_layer_done_counter = counters[-1] if counters else None
        return self.swap_layer_done_counter

    def free_cache(self, clear_storage: bool = False) -> bool:
        """Release device tensors and host cache; the next initialisation opens the storage again."""
        self._has_storage = False
        return super().free_cache(clear_storage)

    def shutdown(self) -> None:
        """Wait for copies in flight, report them, release everything, and disconnect. Idempotent."""
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

    def _open_transfer(self) -> None:
        """Begin to answer peers, if the instance has a role in hand-overs, and tell the scheduler the address."""
        if self.is_initialized() and has_role(self.config):
            address = self.core.open_transfer(lookahead_tokens=self._settings.cache.lookahead_tokens)
            if address is not None:
                self._link.send_address(address)

    def _submit_early(self) -> None:
        """Submit the plans that wait for no batch."""
        with self._in_order:
            self._submit_up_to(0, 0)

    def _submit_up_to(self, number: int, batch: int) -> None:
        plans = self._link.take(number, batch)
        stream = self._stream() if plans else None
        for taken, plan in plans:
            if (counter := self._submit(plan, stream)) is not None:
                self._early.append((taken, counter))

    def _submit_now(self, plan: TransferPlan) -> None:
        """Submit a plan that belongs to no step."""
        self._submit(plan, self._stream())

    def _submit(self, plan: TransferPlan, stream: Any) -> LayerDoneCounter | None:
        try:
            return self.core.submit_swap_tasks(plan, stream)
        except FdcacheError as error:
            logger.error("plan %d cannot be executed: %s", plan.plan_id, error)
            return None
        finally:  # executed or refused, the plan is reported
            with self._submitted:
                self._to_report.update(plan.plan_ids)
                self._submitted.notify_all()

    def _report(self) -> None:
        """Send each report as soon as its plan has ended."""
        while True:
            with self._submitted:
                self._submitted.wait_for(lambda: self._to_report or self._is_closed)
                if self._is_closed and not self._to_report:
                    return
            reports = self.core.wait_reports(_REPORT_SECONDS)
            self._link.report(reports)
            with self._submitted:
                self._to_report.difference_update(report.plan_id for report in reports)
