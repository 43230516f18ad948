"""FastDeploy's cache controller of a worker, with its method names, built on fdcache's ``CacheController``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from fdcache.controller.cache_controller import CacheController
from fdcache.controller.layers import LayerDoneCounter
from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import CacheNotReadyError, LayoutError
from fdcache.integrations.fastdeploy.config import (
    device_blocks,
    layout_from_config,
    load_settings,
    quantisation,
)
from fdcache.integrations.fastdeploy.serving_variables import EngineCacheSettings
from fdcache.layout import KVLayout
from fdcache.layout_planes import Plane, PlaneKind
from fdcache.metadata import CacheSwapMetadata, StorageScan, SwapPurpose, TransferPlan, TransferReport
from fdcache.settings.cache import CopySettings
from fdcache.storage.connector import BlockStorage
from fdcache.tiers.host import HostCache

_NAMES = {PlaneKind.KEY_SCALE: "key_cache_scales", PlaneKind.VALUE_SCALE: "value_cache_scales"}

Allocate = Callable[[KVLayout, int], Sequence[Any]]


class FastDeployController:
    """Cache controller with the interface of FastDeploy's; ``core`` is fdcache's own controller.

        tensors = controller.initialize_kv_cache(attn_backend, num_gpu_blocks)
        counter = controller.submit_swap_tasks(plans)  # with each batch
        reports = controller.poll()                    # to FastDeployManager.apply

    Parameters that are not given come from the environment, and what that does not set from FastDeploy's
    configuration.

    Args:
        device: device of the planes; Paddle's current device by default.
        allocate: allocates the tensors of all planes. By default the attention backend's ``create_kv_cache`` does, or
            Paddle if the backend has none.
        host_cache: the manager's ``host_cache``, if the environment does not describe it.
        compute_stream: returns the stream that the model computes on, called at each submission. By default Paddle's
            current stream, and none on a CPU.
    """

    def __init__(
        self,
        config: Any,
        local_rank: int,
        device_id: int,
        *,
        layout: KVLayout | None = None,
        settings: CopySettings | None = None,
        device: Device | None = None,
        allocate: Allocate | None = None,
        host_cache: HostCache | None = None,
        compute_stream: Callable[[], Any] | None = None,
    ) -> None:
        self.config, self.cache_config = config, config.cache_config
        self.device_id = device_id
        self.layout = layout or layout_from_config(config)
        self._settings = load_settings(config, self.layout, transfer=settings)
        rank = local_rank % self.layout.tp_size
        device = device or _paddle_device(self._settings.transfer)
        self.core = CacheController.from_settings(self.layout, self._settings, rank=rank, device=device)
        self.swap_layer_done_counter: LayerDoneCounter | None = None
        self._host_cache = host_cache
        self._allocate = allocate or self._allocate_in_paddle
        self._stream = compute_stream or (_no_stream if isinstance(device, CpuDevice) else _paddle_stream)
        self._tensors: list[Any] = []
        self._unclaimed: list[Any] = []
        self._ready = False
        self._is_registered = False
        self._own_plans = count(-1, -1)

    def is_initialized(self) -> bool:
        """Return True once the device planes are registered."""
        return self._ready

    # --- memory -------------------------------------------------------------------------------------------

    def initialize_kv_cache(self, attn_backend: Any, num_gpu_blocks: int) -> list[Any]:
        """Make the tensors of the main layers (K, V and scales, layer by layer) and the host cache.

        The tensors have ``num_gpu_blocks`` blocks, unless the environment sets another number. With draft layers,
        planes are registered after ``initialize_mtp_kv_cache``. Raises ``LayoutError`` if the backend's shapes differ
        from the layout's.
        """
        main = [plane for plane in self.layout.planes if not self.layout.is_draft(plane.layer)]
        return self._make(attn_backend, main, device_blocks(self._settings, self.layout, num_gpu_blocks))

    def initialize_mtp_kv_cache(
        self, attn_backend: Any, num_gpu_blocks: int, num_mtp_layers: int, layer_offset: int
    ) -> list[Any]:
        """Make the tensors of the draft layers. Raises ``LayoutError`` if they differ from the layout's."""
        expected = (self.layout.num_draft_layers, self.layout.num_layers)
        if (num_mtp_layers, layer_offset) != expected:
            raise LayoutError(
                f"{num_mtp_layers} draft layers from layer {layer_offset} on, but the layout has "
                f"{expected[0]} from layer {expected[1]} on; pass a matching layout to the adapter"
            )
        planes = self.layout.planes[len(self._tensors) :]
        if blocks := device_blocks(self._settings, self.layout, 0):
            num_gpu_blocks = self.layout.draft_blocks(blocks)
        return self._make(attn_backend, planes, num_gpu_blocks)

    def initialize_host_cache(self, attn_backend: Any = None) -> None:
        """Allocate the host cache, or map a service's. Idempotent."""
        if self.core.host_arena is None:
            self.core.initialize_host_cache(self._host_cache)

    def initialize_storage(self, storage: BlockStorage | None = None) -> StorageScan | None:
        """Open this rank's storage, by default the environment's, and return its scan; None without storage.

        Pass the scans of all ranks to ``FastDeployManager.core.restore_storage``.
        """
        return self.core.open_storage() if storage is None else self.core.initialize_storage(storage)

    def get_kv_caches(self) -> dict[str, Any]:
        """Return the tensors by name: kind, layer, rank and device."""
        where = f"rank{self.core.rank}.device{self.device_id}"
        named = zip(self.layout.planes, self._tensors, strict=False)
        return {f"{_name(plane.kind)}_{plane.layer}_{where}": tensor for plane, tensor in named}

    def _make(self, attn_backend: Any, planes: Sequence[Plane], num_blocks: int) -> list[Any]:
        if self._ready:
            raise CacheNotReadyError("the device planes are registered already; call free_cache first")
        made = self._from_backend(attn_backend, planes, num_blocks)
        if made is None:
            _check_shapes(attn_backend, planes, num_blocks, quantisation(self.config))
            self._unclaimed = self._unclaimed or list(self._allocate(self.layout, num_blocks))
            made = self._unclaimed[: len(planes)]
            if int(made[0].shape[0]) != num_blocks:
                raise LayoutError(
                    f"{num_blocks} blocks, but by the layout's ratio there are {made[0].shape[0]}"
                )
            del self._unclaimed[: len(planes)]
        self._tensors += made
        if len(self._tensors) == len(self.layout.planes):
            if not self._is_registered:
                self.core.register_kv_cache(self._tensors)
            self.initialize_host_cache()
            self._ready = True
        return made

    def _from_backend(self, attn_backend: Any, planes: Sequence[Plane], num_blocks: int) -> list[Any] | None:
        """Return the tensors of a backend that makes them itself; None for other backends."""
        create = getattr(attn_backend, "create_kv_cache", None)
        if create is None:
            return None
        quantised = quantisation(self.config)
        tensors: list[Any] = []
        for layer in sorted({plane.layer for plane in planes}):
            made = create(
                max_num_blocks=num_blocks,
                cache_dtype=self.config.model_config.dtype,
                kv_cache_quant_type=quantised,
            )
            kinds = [plane.kind.value for plane in self.layout.layer_planes(layer)]
            if sorted(made) != sorted(kinds):
                raise LayoutError(
                    f"layer {layer}: the backend makes {sorted(made)}, the layout has {sorted(kinds)}"
                )
            tensors += [made[kind] for kind in kinds]
        return tensors

    def _allocate_in_paddle(self, layout: KVLayout, num_blocks: int) -> Sequence[Any]:
        if self._settings.peers.is_on:  # peers read the planes in memory that they can map
            self._is_registered = True
            return self.core.initialize_kv_cache(num_blocks, "paddle")
        from fdcache.integrations.paddle import allocate_planes

        return allocate_planes(layout, num_blocks)

    # --- copies -------------------------------------------------------------------------------------------

    def submit_swap_tasks(
        self,
        evict_metadata: Sequence[TransferPlan] | None,
        swap_in_metadata: Sequence[TransferPlan] | None = None,
    ) -> LayerDoneCounter | None:
        """Submit a batch's plans without waiting; return the layer counter of the first plan, the step's own.

        Copies wait for the work that the compute stream holds now; its later work waits for the evictions. A plan in
        both lists is submitted once. If a submission raises, the plans after it are refused. ``poll`` reports every
        plan, submitted or refused.
        """
        self.swap_layer_done_counter = None
        plans = {plan.plan_id: plan for plan in (*(evict_metadata or ()), *(swap_in_metadata or ()))}
        left = list(plans.values())
        counters = []
        try:
            stream = self._stream() if left else None
            while left:
                counters.append(self.core.submit_swap_tasks(left.pop(0), stream))
        except Exception as error:
            for plan in left:
                self.core.refuse(plan, f"not submitted: {error}")
            raise
        self.swap_layer_done_counter = counters[0] if counters else None
        return self.swap_layer_done_counter

    def load_host_to_device(self, metadata: CacheSwapMetadata) -> LayerDoneCounter:
        """Copy a batch of blocks to the device, outside any plan; ``poll`` does not report it."""
        return self._copy(metadata, SwapPurpose.LOAD)

    def evict_device_to_host(self, metadata: CacheSwapMetadata) -> LayerDoneCounter:
        """Copy a batch of blocks to the host, outside any plan; ``poll`` does not report it."""
        return self._copy(metadata, SwapPurpose.EVICT)

    def poll(self) -> list[TransferReport]:
        """Return the reports of plans that ended since the last call; pass them to ``FastDeployManager.apply``."""
        return [report for report in self.core.poll() if report.plan_id > 0]

    def _copy(self, metadata: CacheSwapMetadata, purpose: SwapPurpose) -> LayerDoneCounter:
        if metadata.purpose is not purpose:
            raise LayoutError(f"the record is a {metadata.purpose.value}, not a {purpose.value}")
        number = next(self._own_plans)
        is_load = purpose is SwapPurpose.LOAD
        plan = TransferPlan(
            plan_id=number, loads=metadata if is_load else None, evictions=None if is_load else metadata
        )
        return self.core.submit_swap_tasks(plan, self._stream())

    # --- the end ------------------------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Do nothing and return True: only the manager knows what is cached, and copies in flight end by themselves."""
        return True

    def free_gpu_cache(self) -> None:
        """Release the device tensors, after the copies in flight; the host cache stays.

        With ``FD_ENABLE_SWAP_SPACE_CLEARING`` the host cache is released too; call ``reset_cache`` of the manager then.
        """
        if self._settings.group(EngineCacheSettings).clear_swap_space:
            self.core.free_cache()
        else:
            self.core.sleep()
        self._forget_tensors()

    def free_cache(self, clear_storage: bool = False) -> bool:
        """Release device tensors and host cache, after the copies in flight; ``clear_storage`` empties storage first.

        Call ``FastDeployManager.reset_cache`` afterwards; until then the manager plans reads that find nothing. Raises
        ``StorageError`` if the storage could not be emptied; nothing is released then.
        """
        if clear_storage:
            self.core.clear_storage()
        self.core.free_cache()
        self._forget_tensors()
        return True

    def _forget_tensors(self) -> None:
        self._tensors.clear()
        self._unclaimed.clear()
        self._ready = self._is_registered = False

    def shutdown(self) -> None:
        """Wait for copies in flight and release everything."""
        self.core.shutdown()


def _name(kind: PlaneKind) -> str:
    return _NAMES.get(kind, f"{kind.value}_caches")


def _check_shapes(attn_backend: Any, planes: Sequence[Plane], num_blocks: int, quantised: str | None) -> None:
    """Raise ``LayoutError`` if the backend names other shapes [blocks, heads, block_size, dim] for key and value."""
    shapes_of = getattr(attn_backend, "get_kv_cache_shape", None)
    if shapes_of is None:
        return
    kind = {} if quantised is None else {"kv_cache_quant_type": quantised}
    shapes = [tuple(shape) for shape in shapes_of(max_num_blocks=num_blocks, **kind) if shape]
    expected = [(num_blocks, *plane.shape) for plane in planes if plane.layer == planes[0].layer]
    if shapes != expected[: len(shapes)]:
        raise LayoutError(f"the attention backend's cache has shapes {shapes}, the layout's {expected}")


def _paddle_device(settings: CopySettings) -> Device:
    from fdcache.integrations.paddle import current_device

    return current_device(settings)


def _paddle_stream() -> Any | None:
    from fdcache.integrations.paddle import current_stream

    return current_stream()


def _no_stream() -> None:
    """Return None: a CPU computes synchronously."""
