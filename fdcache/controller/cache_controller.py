"""CacheController: the worker side. It copies what plans say, reports it, and owns the host arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fdcache._core import PlanLauncher
from fdcache.controller.arena import HostArena, Progress
from fdcache.controller.device_planes import allocate_planes, bind_tensors
from fdcache.controller.execution import PlansInFlight, reason_of, refused_executions
from fdcache.controller.layers import LaunchedLayers, LayerDoneCounter, LayerEvents
from fdcache.controller.transfers import TransferQueue, check_countable
from fdcache.devices.base import Device, DevicePlanes, Event, PlaneBinding, Stream
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import (
    CacheNotReadyError,
    DeviceError,
    PlanError,
    StorageError,
    StreamError,
    TransferTimeoutError,
)
from fdcache.layout import KVLayout
from fdcache.machine.process_guard import ProcessGuard, close_at_exit, forget_at_exit
from fdcache.metadata import CacheLevel, StorageScan, TransferPlan, TransferReport
from fdcache.settings import Settings
from fdcache.settings.cache import TransferSettings, Verify
from fdcache.settings.checks import log_misspelt, require_host_tier
from fdcache.storage.connector import BlockStorage, ConnectorContext, PlacedStorage, StorageStats
from fdcache.storage.factory import open_storage
from fdcache.storage.queue import StorageQueue, StorageTransfer
from fdcache.tasks import AsyncTaskHandler
from fdcache.tiers.host import HostCache

if TYPE_CHECKING:
    from fdcache.service.client.arena import SharedHostArena
    from fdcache.settings.peers import PeerSettings
    from fdcache.transfer.endpoint import TransferEndpoint
    from fdcache.transfer.shared_planes import SharedPlanes
    from fdcache.transfer.statistics import TransferStats

logger = logging.getLogger(__name__)


class CacheController:
    """The copies of one rank.

    ::

        with CacheController.from_settings(layout, rank=0, device=current_device) as controller:
            controller.register_kv_cache(tensors)
            controller.initialize_host_cache(manager.host_cache)
            counter = controller.submit_swap_tasks(plan, compute_stream)
            counter.wait_for_layer(0, stream=compute_stream)
            reports = controller.poll()

    Calls are thread-safe and do not block, except ``wait_reports`` and those that wait for copies in flight: ``sleep``,
    ``free_cache``, ``clear_storage`` and ``shutdown``. A controller that is open when its process ends is shut down.

    Raises ``ForkedProcessError`` in a forked process, ``CacheNotReadyError`` after ``shutdown``.
    """

    def __init__(
        self, settings: TransferSettings, layout: KVLayout, *, rank: int = 0, device: Device | None = None
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.rank = rank
        self.device: Device = device or CpuDevice.of(settings)
        self._guard = ProcessGuard("CacheController")
        self._submission = threading.RLock()
        """Serializes submissions, which may ask the service. Taken before ``_lock``."""
        self._lock = threading.RLock()
        self._in_flight = PlansInFlight(self.device)
        self._queue = TransferQueue(self.device, layout, settings, self._lock, self._in_flight.executions)
        self._launcher: PlanLauncher | None = None
        """Submits most plans in one call; None until planes and arena were used once."""
        self._planes: DevicePlanes | None = None
        self._allocated: tuple[int, str | None] | None = None
        self._arena: HostArena | SharedHostArena | None = None
        self._storage: StorageQueue | None = None
        self._bindings: list[PlaneBinding] = []
        self._shared: SharedPlanes | None = None
        self._transfer: TransferEndpoint | None = None
        self._num_layers = layout.total_layers
        self._is_shut_down = False
        self._loaded: Settings | None = None
        close_at_exit(self, self._guard)

    @classmethod
    def from_settings(
        cls,
        layout: KVLayout,
        settings: Settings | None = None,
        *,
        rank: int = 0,
        device: Device | Callable[[TransferSettings], Device] | None = None,
    ) -> CacheController:
        """Make a controller from settings, by default those of the environment.

        ``initialize_host_cache()`` and ``open_storage()`` then need no arguments. ``settings``: the same as for
        ``CacheManager.from_settings``. ``device``: a device or a function of the settings that makes one, such as
        ``fdcache.integrations.paddle.current_device``; by default the CPU.

        Raises ``SettingsError`` for settings that are wrong or do not fit the layout.
        """
        settings = settings or Settings.load()
        settings.check_layout(layout)
        require_host_tier(settings)
        log_misspelt(settings.misspelt)
        made = device(settings.transfer) if callable(device) else device
        controller = cls(settings.transfer, layout, rank=rank, device=made)
        controller._loaded = settings
        return controller

    def __enter__(self) -> CacheController:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def host_arena(self) -> HostArena | SharedHostArena | None:
        """The host arena, None before ``initialize_host_cache``."""
        return self._arena

    def initialize_kv_cache(
        self, num_blocks: int, framework: str | None = None, *, shared: Path | None = None
    ) -> list[Any]:
        """Allocate zero-filled device planes; return one tensor for each of ``layout.planes``, in that order.

        Shapes are (blocks, *plane.shape); a draft layer has ``layout.draft_blocks(num_blocks)`` blocks.
        ``framework``: numpy, cupy, torch or paddle, by default the device's own. ``shared``: on the CPU, a folder for
        shared memory that peers can map, by default that of the settings if FDCACHE_TRANSFER is ipc. Raises
        ``TensorError`` for a framework that is not installed, ``HostMemoryError`` if the folder has no room.
        """
        with self._lock:
            self._check_usable()
            self._check_no_planes()
            if shared is None and self._loaded is not None and self._loaded.peers.connector == "ipc":
                shared = self._loaded.peers.directory
            if shared is None or self.device.has_compute_streams:
                tensors = allocate_planes(self.device, self.layout, num_blocks, framework)
            else:
                from fdcache.transfer.shared_planes import SharedPlanes

                self._shared = SharedPlanes(self.layout, num_blocks, shared)
                tensors = self._shared.tensors(framework or "numpy")
            self._bind(tensors)
            self._allocated = (num_blocks, framework)
            return tensors

    def register_kv_cache(self, tensors: Sequence[Any]) -> None:
        """Use the engine's own tensors, one for each of ``layout.planes``, in that order.

        A tensor needs DLPack and the shape (blocks, *plane.shape), or (blocks, bytes) with one-byte elements. Each
        block must be contiguous; strides between blocks are free. The controller keeps references until
        ``free_cache``, ``sleep`` or ``shutdown``. Raises ``TensorError`` naming the plane that does not fit.
        """
        with self._lock:
            self._check_usable()
            self._check_no_planes()
            self._bind(tensors)

    def initialize_host_cache(
        self, host: int | HostCache | None = None, progress: Progress | None = None
    ) -> None:
        """Allocate the host arena, or map that of the service.

        ``host``: ``CacheManager.host_cache`` or a number of blocks, by default what the settings of ``from_settings``
        say. ``progress`` is called with the number of bytes that are ready and the number there will be. Raises
        ``HostMemoryError`` if the memory is not available or cannot be pinned; nothing stays allocated then.
        """
        with self._submission, self._lock:
            self._check_usable()
            if self._arena is not None:
                raise CacheNotReadyError("the host cache exists already; call free_cache first")
            if host is None:
                host = HostCache.of(self._settings_in_force().cache, self.layout)
            if isinstance(host, HostCache) and host.server is not None:
                from fdcache.service.client.arena import SharedHostArena  # brings the network library

                self._arena = SharedHostArena(host, self.layout, self.rank, self.device)
            elif blocks := host.num_blocks if isinstance(host, HostCache) else host:
                self._arena = HostArena(self.layout, blocks, self.device, progress)

    def open_storage(self, progress: Progress | None = None) -> StorageScan | None:
        """Open the storage named in the settings of ``from_settings``, and pass it to ``initialize_storage``.

        Return None if storage is off or the service's. ``progress`` is called with the number of slots scanned and
        their total. Raises ``StorageError`` if the storage cannot be opened.
        """
        settings = self._settings_in_force()
        if settings.cache.server is not None:
            return None
        context = ConnectorContext(
            self.layout,
            self.rank,
            settings.storage_tier,
            settings.mooncake,
            verify=settings.transfer.verify is not Verify.OFF,
            on_progress=progress,
        )
        storage = open_storage(context)
        if storage is None:
            return None
        try:
            return self.initialize_storage(storage)
        except BaseException:
            storage.close()
            raise

    def initialize_storage(self, storage: BlockStorage) -> StorageScan | None:
        """Use a storage, which the controller closes at the end. Requires the host cache.

        Return the blocks that a storage with slots holds, for ``CacheManager.restore_storage``; None for others.
        Raises ``StorageError`` if the storage cannot register the host records.
        """
        with self._lock:
            self._check_usable()
            if self._arena is None:
                raise CacheNotReadyError(
                    "storage reads into the host cache: call initialize_host_cache first"
                )
            if self._storage is not None:
                raise CacheNotReadyError("the storage is open already; call free_cache first")
            if not isinstance(self._arena, HostArena):
                raise StorageError(
                    "with a service the storage belongs to it: configure it in `fdcache serve`"
                )
            storage.register(self._arena.table)
            self._storage = StorageQueue(storage, self._arena, self.rank)
            return storage.scan() if isinstance(storage, PlacedStorage) else None

    def storage_stats(self) -> StorageStats | None:
        """Return counts and state of this rank's storage, None without one."""
        with self._lock:
            return self._storage.storage.stats() if self._storage else None

    def clear_storage(self) -> int:
        """Remove this layout's and rank's blocks from the storage, after the copies in flight; return their number.

        Return 0 without a storage. Raises ``StorageError`` if the storage fails to, ``TransferTimeoutError`` if copies
        do not end within ``drain_timeout``.
        """
        with self._drained(self.settings.drain_timeout):
            return self._storage.clear() if self._storage else 0

    def open_transfer(
        self, peers: PeerSettings | None = None, *, lookahead_tokens: int = 0, verifies: bool | None = None
    ) -> str | None:
        """Begin to answer peers; return the address at which they reach this rank, None with FDCACHE_TRANSFER=none.

        Requires the device planes, and ends with them. ``peers``: by default those of the settings of
        ``from_settings``. ``lookahead_tokens``: those of the manager. ``verifies``: compare blocks with what prefill
        computed, by default unless FDCACHE_VERIFY is off. Raises ``TransferError`` if the connector or the address
        cannot be used, or peers cannot open the memory of the planes.
        """
        with self._submission, self._lock:
            self._check_usable()
            peers = peers or self._settings_in_force().peers_in_force
            if not peers.is_on:
                return None
            if self._planes is None:
                raise CacheNotReadyError("no device planes: call initialize_kv_cache or register_kv_cache")
            if self._transfer is not None:
                raise CacheNotReadyError("the transfer is open already; call free_cache first")
            from fdcache.controller.handover import open_endpoint

            if verifies is None:
                verifies = self.settings.verify is not Verify.OFF
            self._transfer = open_endpoint(
                self.device,
                self.layout,
                self._bindings,
                self._planes,
                peers=peers,
                transfer=self.settings,
                rank=self.rank,
                lookahead_tokens=lookahead_tokens,
                verifies=verifies,
            )
            return self._transfer.address

    def layer_computed(self, layer: int, computed: Mapping[str, int], compute_stream: Any = None) -> None:
        """Let peers read a layer of the leading blocks of transfers, after the work that ``compute_stream`` has now.

        ::

            controller.layer_computed(layer, {"request-1": num_full_blocks}, stream)

        Call it for every layer of a step, in order; ``computed`` counts from the first block of the request. Transfers
        that were not planned or have ended are ignored.
        """
        self._guard.check()
        transfer = self._transfer
        if transfer is None:
            return

        if compute_stream is None and self.device.has_compute_streams:
            raise StreamError("compute_stream: None orders nothing on a GPU; pass the stream that computes")

        def record() -> Event | None:
            if compute_stream is None:
                return None
            event = self.device.create_event()
            event.record(self.device.as_stream(compute_stream))
            return event

        transfer.layer_computed(layer, computed, record)

    def connect_peers(self, addresses: Sequence[str], *, eagerly: bool | None = None) -> None:
        """Name a prefill instance that will be fetched from, by the address of each of its ranks.

        ``eagerly``: connect now, by default if FD_ENABLE_PD_RDMA_EAGER_CONNECT is on; else the first fetch does. Does
        nothing without ``open_transfer``.
        """
        if eagerly is None:
            eagerly = self._settings_in_force().disaggregation.eager_rdma
        with self._lock:
            transfer = self._transfer
        if transfer is not None and eagerly:
            transfer.connect(addresses)

    def transfer_stats(self) -> TransferStats | None:
        """Return counts, peers and hand-overs in flight of this rank, None without ``open_transfer``."""
        with self._lock:
            transfer = self._transfer
        return None if transfer is None else transfer.stats()

    def submit_swap_tasks(self, plan: TransferPlan, compute_stream: Any = None) -> LayerDoneCounter:
        """Enqueue the copies of a plan and return at once.

        Copies wait for the work that ``compute_stream`` has now; its later work waits for the plan's evictions. Loads
        beyond ``TransferSettings.loads_ahead`` start later, at the latest when one of their layers is waited for.
        ``compute_stream``: anything that the device's ``as_stream`` takes; required on a GPU for a plan with copies.

        ``poll`` reports every submitted plan once. Failures of device, memory, service or storage are in the report,
        and the counter's layers are done. Mistakes of the caller are raised as well, before any copy: ``PlanError`` for
        a plan that no worker can execute or that is in flight already, ``StreamError`` for a wrong stream,
        ``CacheNotReadyError`` for missing planes or host cache.
        """
        if not isinstance(plan, TransferPlan):
            raise PlanError(
                f"plan must be a TransferPlan of CacheManager.take_plans, got {type(plan).__name__}"
            )
        self._guard.check()
        with self._submission:
            layers = self._launch_natively(plan, compute_stream)
            if layers is None or isinstance(layers, str):
                layers = self._launch_checked(plan, compute_stream, layers)
        if plan.is_ahead:
            layers = LaunchedLayers([None] * self._num_layers)
        return LayerDoneCounter(
            plan.plan_id,
            self._num_layers,
            layers,
            default_timeout=self.settings.layer_timeout,
            as_stream=self.device.as_stream,
            guard=self._guard,
        )

    def refuse(self, plan: TransferPlan, reason: str) -> None:
        """Fail a plan that the engine cannot submit, and its storage tasks; ``poll`` reports them.

        Raises ``PlanError`` for a plan that is in flight already.
        """
        self._guard.check()
        with self._lock:
            self._check_new(plan)
            self._refuse(plan, reason)

    def _check_new(self, plan: TransferPlan) -> None:
        for plan_id in plan.plan_ids:
            if plan_id in self._in_flight:
                raise PlanError(f"plan {plan_id} is in flight already; poll its report first")

    def _launch_natively(self, plan: TransferPlan, compute_stream: Any) -> LayerEvents | str | None:
        """Enqueue a plan in one call; return the reason of a failure, or None if it takes ``_launch_checked``."""
        with self._lock:
            if self._launcher is None or self._queue.has_waiting_loads:
                return None
            launched: LayerEvents | str | None = self._launcher.submit(
                plan, compute_stream, self._in_flight.executions
            )
            return launched

    def _launch_checked(self, plan: TransferPlan, compute_stream: Any, refusal: str | None) -> LayerEvents:
        # Not under the lock: others may poll while the service answers.
        refusal = refusal or self._attach(plan)
        with self._lock:
            self._check_new(plan)
            try:
                layers = self._launch(plan, compute_stream, refusal)
            except Exception as error:
                self._refuse(plan, reason_of(error))
                raise
            if self._launcher is None and self._planes is not None and isinstance(self._arena, HostArena):
                self._launcher = self._queue.launcher(self._planes, self._arena, self.rank)
            return layers

    def _attach(self, plan: TransferPlan) -> str | None:
        if self._arena is None or isinstance(self._arena, HostArena):
            return None
        try:
            check_countable(plan)
            return self._arena.attach(plan)
        except PlanError:
            return None  # it is raised under the lock
        except Exception as error:  # noqa: BLE001 - it goes into the report
            return reason_of(error)

    def _launch(self, plan: TransferPlan, compute_stream: Any, unattached: str | None) -> LayerEvents:
        self._check_usable()
        check_countable(plan)
        has_copies = any(map(len, plan.swaps()))
        if has_copies:
            self._check_memory()
        stream, refusal = self._compute_stream(
            compute_stream, has_copies or any(len(task.swap) for task in plan.peers)
        )
        prepared = self._prepare_storage(plan)
        if plan.peers:
            self._check_peers(plan)
        unordered = refusal
        refusal = refusal or unattached
        if refusal is None and self._arena is not None:
            refusal = self._arena.prepare(plan)
        execution, layers = self._queue.launch(plan, self.rank, self._planes, self._arena, stream, refusal)
        self._in_flight.add(execution)
        self._launch_storage(plan, prepared)
        if self._transfer is not None:
            for plan_id in plan.cancelled:
                self._transfer.cancel(plan_id)
            self._hand_over(self._transfer, plan, stream, unordered)
        return layers

    def _hand_over(
        self, transfer: TransferEndpoint, plan: TransferPlan, stream: Stream | None, refusal: str | None
    ) -> None:
        """Begin the hand-overs of a plan, after what the compute stream has now, its evictions included."""
        after: Event | None = None
        if plan.peers and stream is not None and self.device.has_compute_streams:
            try:
                after = self.device.create_event()
                after.record(stream)
            except DeviceError as error:
                refusal = reason_of(error)
        for task in plan.peers:
            self._in_flight.add(
                transfer.submit(task, after) if refusal is None else transfer.refuse(task, refusal)
            )

    def _check_peers(self, plan: TransferPlan) -> None:
        """Raise ``CacheNotReadyError`` or ``PlanError`` for hand-overs that this rank cannot begin."""
        if self._transfer is None or self._planes is None:
            raise CacheNotReadyError("no transfer: call open_transfer")
        for task in plan.peers:
            slots = (
                task.swap.dst_block_ids
                if task.swap.dst_type is CacheLevel.DEVICE
                else task.swap.src_block_ids
            )
            if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self._planes.num_blocks:
                raise PlanError(
                    f"{task.swap.purpose.value} {task.plan_id}: a slot is not one of the {self._planes.num_blocks} "
                    "device blocks"
                )

    def _compute_stream(self, compute_stream: Any, has_copies: bool) -> tuple[Stream | None, str | None]:
        """Return the stream to order copies with, or the device's reason to refuse it."""
        if compute_stream is None:
            if has_copies and self.device.has_compute_streams:
                raise StreamError(
                    "compute_stream: None orders nothing on a GPU; pass the stream that the model computes on, such as "
                    "torch.cuda.current_stream(), paddle.device.current_stream() or cupy.cuda.get_current_stream(), or "
                    "an idle stream where nothing computes on the plan's blocks"
                )
            return None, None
        try:
            return self.device.as_stream(compute_stream), None
        except TypeError as error:
            raise StreamError(f"compute_stream: {error}") from error
        except DeviceError as error:
            return None, str(error)

    def _refuse(self, plan: TransferPlan, reason: str) -> None:
        for execution in refused_executions(plan, self.rank, reason):
            self._in_flight.add(execution)
        if self._storage is not None:
            # Cancellations and clearing happen all the same.
            self._storage.submit((), cancelled=plan.cancelled, clear=plan.clear_storage)

    def _prepare_storage(self, plan: TransferPlan) -> list[StorageTransfer]:
        if not plan.storage:
            return []
        if self._storage is None:
            raise CacheNotReadyError("no storage: call initialize_storage")
        return [self._storage.prepare(task) for task in plan.storage]

    def _launch_storage(self, plan: TransferPlan, prepared: list[StorageTransfer]) -> None:
        if self._storage is None:
            return
        for transfer in prepared:
            self._in_flight.add(transfer)
        try:
            self._storage.submit(prepared, cancelled=plan.cancelled, clear=plan.clear_storage)
        except Exception as error:  # noqa: BLE001 - copies are in flight; it goes into the reports
            logger.error("plan %d: the storage accepts no tasks: %s", plan.plan_id, reason_of(error))
            for transfer in prepared:
                transfer.cancel()

    def handler(self, plan_id: int) -> AsyncTaskHandler[TransferReport]:
        """Return the handler of a plan in flight. Raises ``PlanError`` for one that was polled or never submitted.

        ``cancel`` cancels the transfers that have not begun; the report then names all their positions as failed.
        """
        self._guard.check()
        with self._lock:
            return self._in_flight.handler(plan_id)

    def poll(self) -> list[TransferReport]:
        """Return the reports of the plans that ended since the last call, in the order of submission."""
        self._guard.check()
        with self._lock:
            reports = self._in_flight.take_ended()
            if reports and self._launcher is not None:
                self._launcher.retire()
            if reports and (self._launcher is None or self._queue.keeps_reads):
                self._queue.retire()
            return reports

    def wait_reports(self, timeout: float | None = None) -> list[TransferReport]:
        """Wait up to ``timeout`` seconds, None without limit, for a plan to end; then return like ``poll``.

        Return an empty list after the timeout, and at once if no plan is in flight.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not (reports := self.poll()):
            with self._lock:
                pending = self._in_flight.pending_events()
            if not pending:
                break
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if None in pending:  # one ended since the poll
                continue
            if not self._in_flight.wait_any([event for event in pending if event is not None], left):
                break
        return reports

    def sleep(self) -> None:
        """Free the device planes, after the copies in flight; the host arena stays.

        Raises ``TransferTimeoutError`` if copies do not end within ``drain_timeout``; nothing is freed then.
        """
        self._close_transfer()
        with self._drained(self.settings.drain_timeout):
            self._planes = self._launcher = None
            self._bindings = []
            self._free_shared()

    def wakeup(self) -> list[Any]:
        """Allocate the device planes that ``sleep`` freed again, zero-filled.

        Raises ``CacheNotReadyError`` for planes that the engine registered: it has to register them again.
        """
        with self._lock:
            self._check_usable()
            if self._allocated is None:
                raise CacheNotReadyError("the planes were registered by the engine; call register_kv_cache")
            return self.initialize_kv_cache(*self._allocated)

    def free_cache(self) -> None:
        """Free device planes, host arena and storage, after the copies in flight. All may be initialized again.

        Raises ``TransferTimeoutError`` if copies do not end within ``drain_timeout``; nothing is freed then.
        """
        self._close_transfer()
        with self._drained(self.settings.drain_timeout):
            self._free()

    def shutdown(self, timeout: float | None = None) -> None:
        """Wait for the copies in flight, then free everything. Idempotent; reports may still be polled.

        Raises ``TransferTimeoutError`` if copies do not end within ``timeout`` seconds, by default ``drain_timeout``;
        nothing is freed then, and the call may be repeated.
        """
        self._guard.check()
        if self._is_shut_down:
            return
        self._close_transfer()
        with self._drained(self.settings.drain_timeout if timeout is None else timeout):
            self._is_shut_down = True
            self._queue.close()
            self._free()
            forget_at_exit(self)

    @contextmanager
    def _drained(self, timeout: float) -> Iterator[None]:
        """Hold the lock while no copy is in flight, with the memory of finished copies released."""
        self._check_usable()
        deadline = time.monotonic() + timeout
        while True:
            with self._submission, self._lock:
                running = self._in_flight.running()
                if not running:
                    self._in_flight.release_ended()
                    self._queue.retire()
                    yield
                    return
            # Not under the lock: others may poll and cancel meanwhile.
            if not running[0].wait(max(deadline - time.monotonic(), 0.0)):
                raise TransferTimeoutError(
                    f"plan {running[0].plan_id} is still in flight after {timeout} s, so nothing was freed; "
                    "try again, or give a longer timeout"
                )

    def _free(self) -> None:
        if self._storage is not None:
            self._storage.close()
            self._storage = None
        self._planes = self._launcher = None
        self._bindings = []
        self._allocated = None
        self._free_shared()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _close_transfer(self) -> None:
        """End all hand-overs and tell the peers. Plans in flight report what was handed over."""
        with self._submission, self._lock:
            transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _free_shared(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def _bind(self, tensors: Sequence[Any]) -> None:
        bindings = self._bindings = bind_tensors(self.device, self.layout, tensors)
        self._planes = self.device.bind_planes(bindings, self.layout.record_bytes)
        self._allocated = None

    def _settings_in_force(self) -> Settings:
        if self._loaded is None:
            raise CacheNotReadyError(
                "the controller has no settings for host memory and storage: make it with from_settings, or pass "
                "the host cache and the storage"
            )
        return self._loaded

    def _check_usable(self) -> None:
        self._guard.check()
        if self._is_shut_down:
            raise CacheNotReadyError("the controller is shut down; make a new one")

    def _check_no_planes(self) -> None:
        if self._planes is not None:
            raise CacheNotReadyError("the device planes exist already; call free_cache or sleep first")

    def _check_memory(self) -> None:
        if self._planes is None:
            raise CacheNotReadyError(
                "no device planes: call initialize_kv_cache or register_kv_cache, or wakeup after sleep"
            )
        if self._arena is None:
            raise CacheNotReadyError("no host cache: call initialize_host_cache")
