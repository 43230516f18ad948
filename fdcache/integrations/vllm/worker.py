"""The connector in vLLM's workers: the copies of one rank."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from fdcache.block_owners import BlockOwners
from fdcache.controller.cache_controller import CacheController
from fdcache.controller.layers import LayerDoneCounter
from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import ConfigurationError, FdcacheError
from fdcache.integrations.vllm.early import LoadClock
from fdcache.integrations.vllm.layers import StepLayers
from fdcache.integrations.vllm.metadata import StepMetadata
from fdcache.integrations.vllm.timing import StepTimer
from fdcache.layout import KVLayout
from fdcache.manager.results import NO_BLOCKS
from fdcache.metadata import (
    CacheSwapMetadata,
    Int32Array,
    SwapPurpose,
    TransferPlan,
    TransferReport,
    TransferResult,
    encode,
)
from fdcache.settings import Settings
from fdcache.settings.cache import CopySettings
from fdcache.tiers.host import HostCache

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    """Requests that wait for a plan, or for a hand-over, and the device blocks that it loads.

    ``layers``: of a load that may be told before it has ended. ``is_told``: it was.
    """

    requests: Sequence[str]
    blocks: Int32Array
    layers: LayerDoneCounter | None = None
    is_told: bool = False

    def failed(self, report: TransferReport) -> list[int]:
        """Return the device blocks that were not loaded."""
        arriving = (SwapPurpose.LOAD, SwapPurpose.FETCH)
        results = [result.failed for result in report.results if result.purpose in arriving]
        if report.refused or not results:
            return list(map(int, self.blocks))
        return [int(block) for failed in results if len(failed) for block in self.blocks[failed]]


class _Arrivals:
    """Requests whose blocks are loaded by one plan or more, and those of which all plans have ended or are sure to."""

    def __init__(self) -> None:
        self._plans: dict[str, int] = {}
        self._planned: set[str] = set()
        self._received: set[str] = set()

    def waits(self, request_id: str) -> None:
        """Make a request wait for one plan more."""
        self._plans[request_id] = self._plans.get(request_id, 0) + 1

    def ended(self, request_id: str) -> None:
        """Count a plan that has ended, well or not, or is sure to."""
        self._plans[request_id] -= 1
        self._receive(request_id)

    def planned(self, request_id: str) -> None:
        """Record that no other plan follows."""
        self._planned.add(request_id)
        self._receive(request_id)

    def take(self) -> set[str]:
        """Return the requests received since the last call."""
        if not self._received:
            return set()
        taken, self._received = self._received, set()
        return taken

    def _receive(self, request_id: str) -> None:
        if request_id in self._planned and not self._plans.get(request_id):
            self._planned.remove(request_id)
            self._plans.pop(request_id, None)
            self._received.add(request_id)


class WorkerSide:
    """Executes plans on vLLM's pages with a ``CacheController``.

    Loads run behind all work that the compute stream has, unless no step in flight uses their blocks, so that they
    cannot overwrite what a step still reads. Stores read what earlier steps computed. No call holds up a step for a
    copy, except on a CPU, which has no streams. ``engine_id``: that of all ranks, and of no other engine of the node.
    ``states``: bytes of the parts of a state that ranks share.
    """

    def __init__(
        self,
        settings: Settings,
        layout: KVLayout,
        rank: int,
        engine_id: str = "",
        states: Sequence[int] = (),
    ) -> None:
        self._settings, self._states = settings, states
        self._engine = hashlib.sha256(engine_id.encode()).hexdigest()[:32]
        self._layout = layout
        self._owners = BlockOwners(layout)
        self.rank = rank
        self._controller: CacheController | None = None
        self._loads: dict[int, _Load] = {}
        self._copies_out: dict[int, TransferPlan] = {}
        self._overwritten: dict[int, tuple[TransferPlan, set[int] | None]] = {}
        self._in_flight = 0  # reports that the controller owes
        self.reports: list[TransferReport] = []
        self._arrivals = _Arrivals()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._sends: dict[int, str] = {}
        self._ahead: dict[int, bool] = {}
        """Hand-overs for whose end vLLM does not wait, or not yet; True once they have ended."""
        self._computed: Sequence[tuple[int, int, Int32Array]] = ()
        self._layers = StepLayers({}, ())
        self._sent: set[str] = set()
        self._on_gpu = False
        self._idle_stream: Any = None
        self._step_before: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._clock: LoadClock | None = None
        """None unless loads are told before they have ended."""
        self._told: dict[str, list[int]] = {}
        """Loads of requests that were told of before all had ended."""
        self._seconds_left = 0.0
        self.timer = StepTimer()
        self._scan: bytes | None = None
        self.address: str | None = None
        """At which this rank answers peers."""

    def register(self, pages: Sequence[torch.Tensor], layers: Mapping[str, int] | None = None) -> None:
        """Use vLLM's pages, a tensor of bytes for each plane; make host memory of the rank's own without a service.

        ``layers``: the plane of each layer whose end vLLM tells within a step.
        """
        device = pages[0].device
        self._on_gpu = device.type == "cuda"
        controller = CacheController.from_settings(
            self._layout, self._settings, rank=self.rank, device=lambda settings: device_of(device, settings)
        )
        self._controller = controller
        controller.register_kv_cache(pages)
        if self._on_gpu:
            self._idle_stream = controller.device.as_stream(torch.cuda.Stream(device))
            if self._settings.cache.server is None and not self._layout.groups:
                # What a service holds for this engine can be lost while it is copied.
                self._clock = LoadClock(self._layout.payload_bytes)
        if self._settings.cache.server is None:
            controller.initialize_host_cache(HostCache.of(self._settings.cache, self._layout, self._engine))
            scan = controller.open_storage()
            self._scan = None if scan is None else encode(scan)
        self.address = controller.open_transfer(
            lookahead_tokens=self._settings.cache.lookahead_tokens, state_parts=self._states
        )
        self._layers = StepLayers(layers or {}, controller.announced_layers)

    def take_scan(self) -> bytes | None:
        """Return which blocks this rank's storage held at the start, encoded; None but for the first call."""
        taken, self._scan = self._scan, None
        return taken

    @property
    def is_loading(self) -> bool:
        """True while requests wait for loads."""
        return bool(self._loads)

    def attach(self, host_cache: HostCache | None) -> None:
        """Map the host memory of a service, which the scheduler names with its first step."""
        controller = self._controller
        if controller is not None and host_cache is not None and controller.host_arena is None:
            controller.initialize_host_cache(host_cache)

    def submit(self, step: StepMetadata) -> None:
        """Enqueue the copies of a step and return at once."""
        controller = self._controller
        if controller is not None:
            self._mark_step_before(step)
            self._seconds_left = step.seconds_left
            if step.received:
                self._wait_for_loads(step.received)
            if step:
                self._submit(controller, step)
        if step.timed:
            self.timer.begin(step.timed, on_gpu=self._on_gpu)

    def _submit(self, controller: CacheController, step: StepMetadata) -> None:
        self.attach(step.host_cache)
        if step.loads or step.unloaded:
            self._learn_loads(step)
        self._learn_sends(controller, step)
        if step.is_late:
            self._overwritten |= {number: (plan, None) for number, plan in self._copies_out.items()}
        elif len(step.overwritten) and self._copies_out:
            self._lose_copies_of(step.overwritten)
        stream = self._current_stream() if self._on_gpu and step.plans else None
        for plan in step.plans:
            self._in_flight += len(plan.plan_ids)
            for number, loaded in _loaded_by(plan):
                if number in step.loads:
                    blocks = self._owners.blocks(loaded)
                    self._loads[number] = _Load(list(step.loads[number]), blocks)
            try:
                if step.is_late:
                    controller.refuse(plan, "the step that it was made for went without it")
                    continue
                if plan.evictions is not None or plan.backups is not None:
                    self._copies_out[plan.plan_id] = plan
                    self._lose_copies(plan, step.overwritten)  # vLLM has filled them before this call
                before = self._idle_stream if plan.plan_id in step.unordered else stream
                counter = controller.submit_swap_tasks(plan, before)
                if not self._on_gpu:  # no stream holds the step back
                    counter.wait_all()
                elif self._clock is not None and (load := self._loads.get(plan.plan_id)) is not None:
                    self._clock.began(plan.plan_id, len(load.blocks))
                    load.layers = counter
            except FdcacheError as error:
                # The controller reports such a plan as failed: what it would have loaded is computed.
                logger.warning("plan %d is not executed: %s", plan.plan_id, error)

    def _learn_sends(self, controller: CacheController, step: StepMetadata) -> None:
        """Record the hand-overs for whose end vLLM waits, and those that steps go on to compute."""
        for number, request_id in step.sends.items():
            if self._ahead.pop(number, False):
                self._sent.add(request_id)
            else:
                self._sends[number] = request_id
        for number in step.sends_over:
            self._ahead.pop(number, None)
        if step.is_late:  # blocks of requests that vLLM has taken back may be overwritten by this step
            controller.end_handovers(self._ahead)
        for plan in step.plans:
            sends = (task.plan_id for task in plan.peers if task.swap.purpose is SwapPurpose.SEND)
            self._ahead |= {number: False for number in sends if number not in self._sends}
        self._computed = step.computed
        self._layers.begin()

    def layer_computed(self, name: str) -> None:
        """Hand over what the step has computed up to a layer, whose work the device has by now."""
        if self._computed and self._controller is not None:
            for layer in self._layers.saved(name):
                self._publish(self._controller, layer)

    def _publish(self, controller: CacheController, layer: int | None = None) -> None:
        """Hand over the blocks that the step computes up to a layer, None for all."""
        stream = self._current_stream() if self._on_gpu else None
        for number, first, blocks in self._computed:
            try:
                controller.blocks_computed(number, first, blocks, stream, layer=layer)
            except FdcacheError as error:
                logger.warning("hand-over %d ends: %s", number, error)
                controller.end_handovers([number])

    def _wait_for_loads(self, received: Iterable[str]) -> None:
        """Make the step wait for the loads that the scheduler takes for ended, and that have not."""
        for request_id in received:
            for number in self._told.pop(request_id, ()):
                load = self._loads.get(number)
                if load is not None and load.layers is not None:
                    load.layers.wait_all(stream=self._current_stream())

    def _lose_copies_of(self, blocks: Sequence[int]) -> None:
        """Take plans for failed that copy out of these device blocks, unless they have ended."""
        if self._controller is not None:
            self._collect(self._controller.poll())
        for plan in self._copies_out.values():
            self._lose_copies(plan, blocks)

    def _lose_copies(self, plan: TransferPlan, blocks: Sequence[int]) -> None:
        """Take a plan's copies out of these device blocks for failed."""
        copied = (self._owners.blocks(swap.src_block_ids) for swap in plan.swaps() if swap.to_host)
        if not len(blocks) or not any(np.isin(each, blocks).any() for each in copied):
            return
        _, before = self._overwritten.get(plan.plan_id, (plan, set()))
        self._overwritten[plan.plan_id] = plan, None if before is None else before | set(map(int, blocks))

    def _mark_step_before(self, step: StepMetadata) -> None:
        """While there are loads, mark the end of the work that the device had before this step."""
        self._step_before = None
        if self._on_gpu and (self._loads or step.loads):
            self._step_before = torch.cuda.Event(blocking=True)
            self._step_before.record()

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the compute stream, by the same object as long as it is the same stream: torch makes one each time."""
        stream = torch.cuda.current_stream()
        if self._stream is None or self._stream.cuda_stream != stream.cuda_stream:
            self._stream = stream
        return self._stream

    def _learn_loads(self, step: StepMetadata) -> None:
        """Record the plans that requests wait for, and the requests that wait for no others."""
        planned = [each for each in step.unloaded if not any(each in loads for loads in step.loads.values())]
        for requests in step.loads.values():
            for request_id, is_last in requests.items():
                self._arrivals.waits(request_id)
                if is_last:
                    planned.append(request_id)
        for request_id in planned:
            self._arrivals.planned(request_id)
        for request_id, blocks in step.unloaded.items():
            self._fail([request_id], blocks)

    def computed(self) -> None:
        """End the time of a step whose work is submitted."""
        self.timer.end(on_gpu=self._on_gpu)

    def poll(self) -> set[str]:
        """Collect what has ended; return the requests whose loads have, well or not, or are sure to in time.

        While there are loads, waits for the end of the step before this one. vLLM waits for it next in any case, and a
        load that ends meanwhile is known one step earlier.
        """
        if self._controller is not None and self._computed:
            self._publish(self._controller)
            self._computed = ()
        if self._controller is None or not self._in_flight:
            return self._arrivals.take()
        self._collect(self._controller.poll())
        if self._step_before is not None and not all(load.is_told for load in self._loads.values()):
            self._step_before.synchronize()
            self._collect(self._controller.poll())
        if self._clock is not None and self._loads and self._seconds_left:
            self._tell_early(self._clock)
        return self._arrivals.take()

    def _tell_early(self, clock: LoadClock) -> None:
        """Tell the loads that end before the step begins that can use them: the device makes it wait for the rest."""
        for number, load in self._loads.items():
            if load.is_told:
                continue
            layers = load.layers
            if layers is None or not layers.is_certain or clock.seconds_left(number) > self._seconds_left:
                break
            load.is_told = True
            for request_id in load.requests:
                self._told.setdefault(request_id, []).append(number)
                self._arrivals.ended(request_id)

    def _collect(self, reports: Sequence[TransferReport]) -> None:
        self._in_flight -= len(reports)
        for report in map(self._without_overwritten, reports):
            self.reports.append(report)
            if (sent := self._sends.pop(report.plan_id, None)) is not None:
                self._sent.add(sent)
            elif report.plan_id in self._ahead:
                self._ahead[report.plan_id] = True
            load = self._loads.pop(report.plan_id, None)
            if load is None:
                continue
            if self._clock is not None:
                self._clock.ended(report)
            for request_id in load.requests if not load.is_told else ():
                self._arrivals.ended(request_id)
            if failed := load.failed(report):
                self._fail(load.requests, failed)

    def _fail(self, requests: Sequence[str], blocks: Sequence[int]) -> None:
        """Make vLLM compute blocks; with groups of layers it computes their requests from the beginning."""
        if self._layout.groups:
            self._failed.update(requests)
        else:
            self._bad_blocks.update(blocks)

    def _without_overwritten(self, report: TransferReport) -> TransferReport:
        """Return a report in which copies of blocks fail that a step may have overwritten meanwhile."""
        self._copies_out.pop(report.plan_id, None)
        found = self._overwritten.pop(report.plan_id, None) if self._overwritten else None
        if found is None or report.refused:
            return report
        plan, blocks = found
        results = tuple(
            self._with_lost(result, swap, blocks) if swap.to_host else result
            for swap, result in zip(plan.swaps(), report.results, strict=True)
        )
        return msgspec.structs.replace(report, results=results)

    def _with_lost(
        self, result: TransferResult, swap: CacheSwapMetadata, blocks: set[int] | None
    ) -> TransferResult:
        """Return the result of a copy to the host that failed for these device blocks, None for all."""
        reason = "a step that does not wait for the copy may have overwritten the blocks"
        if blocks is None:
            return TransferResult.failure(swap, reason)
        lost = np.flatnonzero(np.isin(self._owners.blocks(swap.src_block_ids), list(blocks)))
        if not len(lost):
            return result
        failed = np.union1d(result.failed, lost).astype(np.int32)
        return msgspec.structs.replace(result, failed=failed, error_message=result.error_message or reason)

    def take_bad_blocks(self) -> set[int]:
        """Return the device blocks whose load failed since the last call."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    def take_failed(self) -> set[str]:
        """Return the requests whose load failed since the last call, in a layout with groups of layers."""
        taken, self._failed = self._failed, set()
        return taken

    def take_sent(self) -> set[str]:
        """Return the requests of which this rank hands over no block any more since the last call."""
        taken, self._sent = self._sent, set()
        return taken

    def take_reports(self) -> list[TransferReport]:
        """Return the reports since the last call."""
        taken, self.reports = self.reports, []
        return taken

    def shutdown(self) -> None:
        """End the copies and free what this rank holds. Idempotent."""
        if self._controller is not None:
            self._controller.shutdown()


def _loaded_by(plan: TransferPlan) -> Iterator[tuple[int, Int32Array]]:
    """Yield the numbers of a plan and of its hand-overs, each with the device blocks that it loads."""
    yield plan.plan_id, NO_BLOCKS if plan.loads is None else plan.loads.dst_block_ids
    for task in plan.peers:
        if task.swap.purpose is SwapPurpose.FETCH:
            yield task.plan_id, task.swap.dst_block_ids


def device_of(device: torch.device, settings: CopySettings) -> Device:
    """Return the device of vLLM's tensors. Raises ``ConfigurationError`` for kinds that fdcache does not have."""
    if device.type == "cpu":
        return CpuDevice.of(settings)
    if device.type == "cuda":
        from fdcache.devices.cuda import CudaDevice

        return CudaDevice(device.index or 0, settings=settings)
    raise ConfigurationError(
        f"FdcacheConnector: vLLM's cache is on {device.type}; supported are cpu and cuda"
    )
