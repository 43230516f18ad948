"""CacheController: the worker side. It copies what plans say, reports it, and owns the host arena."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fdcache.controller.arena import HostArena, Progress, intact_records
from fdcache.controller.device_planes import DeviceMemory
from fdcache.controller.layers import LaunchedLayers, LayerDoneCounter, LayerEvents
from fdcache.controller.submission import PlanSubmission, RankParts
from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import CacheNotReadyError, PlanError, StorageError
from fdcache.layout import KVLayout
from fdcache.machine.process_guard import ProcessGuard, close_at_exit, forget_at_exit
from fdcache.metadata import Int32Array, StorageScan, TransferPlan, TransferReport
from fdcache.plans.ledger import Blocks
from fdcache.settings import Settings, logs, read_settings
from fdcache.settings.cache import CopySettings, Verify
from fdcache.settings.checks import log_misspelt, require_host_tier
from fdcache.storage.connector import BlockStorage, ConnectorContext, PlacedStorage, StorageStats
from fdcache.storage.factory import open_storage
from fdcache.storage.queue import StorageQueue
from fdcache.tasks import AsyncTaskHandler
from fdcache.tiers.host import HostCache

if TYPE_CHECKING:
    from fdcache.service.client.shared_arena import SharedHostArena
    from fdcache.settings.peers import PeerSettings
    from fdcache.transfer.connector import TransferStats

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
        self, settings: CopySettings, layout: KVLayout, *, rank: int = 0, device: Device | None = None
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.rank = rank
        self.device: Device = device or CpuDevice.of(settings)
        self._guard = ProcessGuard("CacheController")
        self._lock = threading.RLock()
        self._parts = RankParts(DeviceMemory(self.device, layout))
        self._plans = PlanSubmission(self.device, layout, settings, rank, self._parts, self._lock)
        self._num_layers = layout.total_layers
        self._loaded: Settings | None = None
        close_at_exit(self, self._guard)

    @classmethod
    def from_settings(
        cls,
        layout: KVLayout,
        settings: Settings | None = None,
        *,
        rank: int = 0,
        device: Device | Callable[[CopySettings], Device] | None = None,
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
        logs.follow(settings)
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
        return self._parts.arena

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
            if shared is None and self._loaded is not None and self._loaded.peers.connector == "ipc":
                shared = self._loaded.peers.directory
            return self._parts.memory.allocate(num_blocks, framework, shared)

    def register_kv_cache(self, tensors: Sequence[Any]) -> None:
        """Use the engine's own tensors, one for each of ``layout.planes``, in that order.

        A tensor needs DLPack and the shape (blocks, *plane.shape), or (blocks, bytes) with one-byte elements. Each
        block must be contiguous; strides between blocks are free. The controller keeps references until
        ``free_cache``, ``sleep`` or ``shutdown``. Raises ``TensorError`` naming the plane that does not fit.
        """
        with self._lock:
            self._check_usable()
            self._parts.memory.register(tensors)

    def initialize_host_cache(
        self, host: int | HostCache | None = None, progress: Progress | None = None
    ) -> None:
        """Allocate the host arena, or map that of the service.

        ``host``: ``CacheManager.host_cache`` or a number of blocks, by default what the settings of ``from_settings``
        say. It has to be the former where ranks hold the same blocks, for they share memory under its name, in the
        folder FDCACHE_ARENA_DIR. ``progress`` is called with the number of bytes that are ready and the number there
        will be. Raises ``HostMemoryError`` if the memory is not available or cannot be pinned; nothing stays allocated
        then.
        """
        with self._plans.serial, self._lock:
            self._check_usable()
            if self._parts.arena is not None:
                raise CacheNotReadyError("the host cache exists already; call free_cache first")
            if host is None:
                host = HostCache.of(self._settings_in_force().cache, self.layout)
            if isinstance(host, HostCache) and host.server is not None:
                from fdcache.service.client.shared_arena import SharedHostArena  # brings the network library

                self._parts.arena = SharedHostArena(host, self.layout, self.rank, self.device)
            elif blocks := host.num_blocks if isinstance(host, HostCache) else host:
                shared = self._shared_file(host) if self.layout.replicas > 1 else None
                self._parts.arena = HostArena(self.layout, blocks, self.device, progress, shared)

    def _shared_file(self, host: int | HostCache) -> Path:
        """Return the file of the memory that ranks share which hold the same bytes."""
        if not isinstance(host, HostCache) or host.name is None:
            raise CacheNotReadyError(
                f"host: {self.layout.replicas} ranks hold the same blocks and share memory for them; pass the "
                "manager's host_cache to each, which names it"
            )
        settings = self._loaded or read_settings().settings
        return settings.server.arena_dir / f"{host.name}-{self.rank // self.layout.replicas}"

    def open_storage(self, progress: Progress | None = None) -> StorageScan | None:
        """Open the storage named in the settings of ``from_settings``, and pass it to ``initialize_storage``.

        Return None if storage is off or the service's, or another rank's that holds the same blocks.
        ``progress`` is called with the number of slots scanned and their total. Raises ``StorageError`` if the storage
        cannot be opened.
        """
        settings = self._settings_in_force()
        if settings.cache.server is not None or not self._plans.shares.has_storage:
            return None
        context = ConnectorContext(
            self.layout,
            self.rank // self.layout.replicas,
            settings.storage_tier,
            settings.connector_options,
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
            if self._parts.arena is None:
                raise CacheNotReadyError(
                    "storage reads into the host cache: call initialize_host_cache first"
                )
            if self._parts.storage is not None:
                raise CacheNotReadyError("the storage is open already; call free_cache first")
            if not isinstance(self._parts.arena, HostArena):
                raise StorageError(
                    "with a service the storage belongs to it: configure it in `fdcache serve`"
                )
            storage.register(self._parts.arena.table)
            self._parts.storage = StorageQueue(storage, self._parts.arena)
            return storage.scan() if isinstance(storage, PlacedStorage) else None

    def storage_stats(self) -> StorageStats | None:
        """Return counts and state of this rank's storage, None without one."""
        with self._lock:
            return self._parts.storage.storage.stats() if self._parts.storage else None

    def clear_storage(self) -> int:
        """Remove this layout's and rank's blocks from the storage, after the copies in flight; return their number.

        Return 0 without a storage. Raises ``StorageError`` if the storage fails to, ``TransferTimeoutError`` if copies
        do not end within ``drain_timeout``.
        """
        with self._drained(self.settings.drain_timeout):
            return self._parts.storage.clear() if self._parts.storage else 0

    def open_transfer(
        self,
        peers: PeerSettings | None = None,
        *,
        lookahead_tokens: int = 0,
        verifies: bool | None = None,
        state_parts: Sequence[int] = (),
    ) -> str | None:
        """Begin to answer peers; return the address at which they reach this rank, None with FDCACHE_TRANSFER=none.

        Requires the device planes, and ends with them. ``peers``: by default those of the settings of
        ``from_settings``. ``lookahead_tokens``: those of the manager. ``verifies``: compare blocks with what prefill
        computed, by default unless FDCACHE_VERIFY is off. ``state_parts``: bytes of the parts of a state in a plane,
        each of which ranks share evenly. Raises ``TransferError`` if the connector or the address cannot be used, or
        peers cannot open the memory of the planes.
        """
        with self._plans.serial, self._lock:
            self._check_usable()
            peers = peers or self._settings_in_force().peers_in_force
            if not peers.is_on:
                return None
            if self._parts.memory.planes is None:
                raise CacheNotReadyError("no device planes: call initialize_kv_cache or register_kv_cache")
            if self._parts.transfer is not None:
                raise CacheNotReadyError("the transfer is open already; call free_cache first")
            from fdcache.controller.planned_handovers import open_handovers

            self._parts.transfer = open_handovers(
                self.device,
                self.layout,
                self._parts.memory,
                peers=peers,
                transfer=self.settings,
                rank=self.rank,
                lookahead_tokens=lookahead_tokens,
                verifies=verifies,
                state_parts=state_parts,
            )
            return self._parts.transfer.endpoint.address

    def layer_computed(self, layer: int, computed: Mapping[str, int], compute_stream: Any = None) -> None:
        """Publish a layer of the leading blocks of transfers to peers, after the work that ``compute_stream`` has now.

        ::

            controller.layer_computed(layer, {"request-1": num_full_blocks}, stream)

        Call it for every layer of a step, in order; ``computed`` counts from the first block of the request. Transfers
        that were not planned or have ended are ignored.
        """
        if not self._guard.is_own:
            self._guard.refuse()
        if (transfer := self._parts.transfer) is not None:
            transfer.layer_computed(layer, computed, compute_stream)

    def blocks_computed(
        self,
        plan_id: int,
        first: int,
        slots: Int32Array,
        compute_stream: Any = None,
        *,
        layer: int | None = None,
    ) -> None:
        """Publish all layers of blocks of a send to peers, after the work that ``compute_stream`` has now.

        For sends whose slots were not known when they were planned: ``slots`` has those from block ``first`` on, and
        all before it were published. ``layer``: only this one, as with ``layer_computed``; a call without it publishes
        the rest. A send that has ended is ignored. Raises ``PlanError`` for an unknown slot.
        """
        if (transfer := self._parts.transfer) is not None:
            transfer.blocks_computed(plan_id, first, slots, compute_stream, layer)

    @property
    def announced_layers(self) -> tuple[int, ...]:
        """The last layers of the groups in which sends are announced; none without ``open_transfer``."""
        transfer = self._parts.transfer
        return () if transfer is None else tuple(last - 1 for _, last in transfer.endpoint.groups)

    def end_handovers(self, plan_ids: Iterable[int]) -> None:
        """End hand-overs, and tell the peers, for what no plan can say in time: their slots may be overwritten now."""
        if (transfer := self._parts.transfer) is not None:
            for plan_id in plan_ids:
                transfer.endpoint.cancel(plan_id)

    def connect_peers(self, addresses: Sequence[str]) -> None:
        """Name a prefill instance that will be fetched from, by the address of each of its ranks.

        Connects now if FD_ENABLE_PD_RDMA_EAGER_CONNECT is on; else the first fetch does. Does nothing without
        ``open_transfer``.
        """
        eagerly = self._settings_in_force().value("FD_ENABLE_PD_RDMA_EAGER_CONNECT")
        if eagerly and (transfer := self._parts.transfer) is not None:
            transfer.endpoint.connect(addresses)

    def transfer_stats(self) -> TransferStats | None:
        """Return counts, peers and hand-overs in flight of this rank, None without ``open_transfer``."""
        transfer = self._parts.transfer
        return None if transfer is None else transfer.endpoint.stats()

    def submit_swap_tasks(self, plan: TransferPlan, compute_stream: Any = None) -> LayerDoneCounter:
        """Enqueue the copies of a plan and return at once.

        Copies wait for the work that ``compute_stream`` has now; its later work waits for the plan's evictions. Loads
        beyond ``CopySettings.queued_bytes`` start later, at the latest when one of their layers is waited for.
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
        if not self._guard.is_own:
            self._guard.refuse()
        layers: LayerEvents = self._plans.submit(plan, compute_stream)
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

        Nothing waits for the plans in ``plan.after`` then: their copies have to end before a step computes.
        Raises ``PlanError`` for a plan that is in flight already.
        """
        if not self._guard.is_own:
            self._guard.refuse()
        self._plans.refuse(plan, reason)

    def handler(self, plan_id: int) -> AsyncTaskHandler[TransferReport]:
        """Return the handler of a plan in flight. Raises ``PlanError`` for one that was polled or never submitted.

        ``cancel`` cancels the transfers that have not begun; the report then names all their positions as failed.
        """
        if not self._guard.is_own:
            self._guard.refuse()
        with self._lock:
            return self._plans.in_flight.handler(plan_id)

    def poll(self) -> list[TransferReport]:
        """Return the reports of the plans that ended since the last call, in the order of submission."""
        if not self._guard.is_own:
            self._guard.refuse()
        return self._plans.take_reports()

    def wait_reports(self, timeout: float | None = None) -> list[TransferReport]:
        """Wait up to ``timeout`` seconds, None without limit, for a plan to end; then return like ``poll``.

        Return an empty list after the timeout, and at once if no plan is in flight.
        """
        if not self._guard.is_own:
            self._guard.refuse()
        return self._plans.wait_reports(timeout)

    def intact(self, blocks: Blocks, arena: str | None = None) -> NDArray[np.bool_]:
        """Return a mask of the host blocks of which this rank has the record with the bytes of its checksum.

        ``arena``: as in a plan, that of a service's slots. The calling thread reads all of the bytes.
        """
        if not self._guard.is_own:
            self._guard.refuse()
        with self._plans.serial, self._lock:
            shared, mine = self._parts.shared, self._parts.arena
            reason = None if shared is None else shared.open_records(arena, blocks.slots)
            if reason is not None or mine is None:
                return np.zeros(len(blocks), np.bool_)
            return intact_records(mine.table, self.layout, blocks)

    def sleep(self) -> None:
        """Free the device planes, after the copies in flight; the host arena stays.

        Raises ``TransferTimeoutError`` if copies do not end within ``drain_timeout``; nothing is freed then.
        """
        self._close_transfer()
        with self._drained(self.settings.drain_timeout):
            self._plans.launcher = None
            self._parts.memory.free()

    def wakeup(self) -> list[Any]:
        """Allocate the device planes that ``sleep`` freed again, zero-filled.

        Raises ``CacheNotReadyError`` for planes that the engine registered: it has to register them again.
        """
        with self._lock:
            self._check_usable()
            return self._parts.memory.allocate_again()

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
        if not self._guard.is_own:
            self._guard.refuse()
        if self._parts.is_shut_down:
            return
        self._close_transfer()
        with self._drained(self.settings.drain_timeout if timeout is None else timeout):
            self._parts.is_shut_down = True
            self._plans.queue.close()
            self._free()
            forget_at_exit(self)

    @contextmanager
    def _drained(self, timeout: float) -> Iterator[None]:
        self._check_usable()
        with self._plans.drained(timeout):
            yield

    def _free(self) -> None:
        if self._parts.storage is not None:
            self._parts.storage.close()
            self._parts.storage = None
        self._plans.launcher = None
        self._parts.memory.forget()
        arena, self._parts.arena = self._parts.arena, None
        if arena is not None:
            arena.close()

    def _close_transfer(self) -> None:
        """End all hand-overs and tell the peers. Plans in flight report what was handed over."""
        with self._plans.serial, self._lock:
            transfer, self._parts.transfer = self._parts.transfer, None
        if transfer is not None:
            transfer.endpoint.close()

    def _settings_in_force(self) -> Settings:
        if self._loaded is None:
            raise CacheNotReadyError(
                "the controller has no settings for host memory and storage: make it with from_settings, or pass "
                "the host cache and the storage"
            )
        return self._loaded

    def _check_usable(self) -> None:
        if not self._guard.is_own:
            self._guard.refuse()
        self._parts.check_usable()
