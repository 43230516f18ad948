"""The hand-overs of a controller: its endpoint, and the tasks of plans that go through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fdcache.controller.copies import reason_of
from fdcache.controller.device_planes import DeviceMemory
from fdcache.controller.layers import layer_groups
from fdcache.devices.base import Device, Stream
from fdcache.devices.cuda import CudaDevice
from fdcache.errors import DeviceError, PlanError, StreamError, TransferError
from fdcache.layout import KVLayout
from fdcache.metadata import NO_BLOCK, CacheLevel, Int32Array, SwapPurpose, TransferPlan
from fdcache.settings.cache import CopySettings, Verify
from fdcache.settings.peers import PeerSettings
from fdcache.tasks import Event, Execution
from fdcache.transfer.connector import LocalPlanes
from fdcache.transfer.endpoint import EndpointOptions, TransferEndpoint


def open_handovers(
    device: Device,
    layout: KVLayout,
    memory: DeviceMemory,
    *,
    peers: PeerSettings,
    transfer: CopySettings,
    rank: int,
    lookahead_tokens: int,
    verifies: bool | None,
    state_parts: Sequence[int],
) -> PlannedHandovers:
    """Open the endpoint of one rank with planes. Raises ``TransferError``, also for a connector that reads no GPU."""
    planes, bindings = memory.planes, memory.bindings
    assert planes is not None
    if verifies is None:
        verifies = transfer.verify is not Verify.OFF
    access = device.peer_access(planes) if isinstance(device, CudaDevice) else None
    if device.has_compute_streams and (access is None or peers.connector not in ("ipc", "rdma")):
        raise TransferError(
            f"FDCACHE_TRANSFER={peers.connector}: the blocks are on a GPU, and this connector reads CPU memory; "
            "use ipc or rdma"
        )
    local = LocalPlanes(
        layout,
        planes.table,
        planes.num_blocks,
        tuple(each.address for each in bindings),
        tuple(each.stride for each in bindings),
        access,
    )
    groups = layer_groups(layout.total_layers, transfer.first_group_layers, transfer.group_layers)
    options = EndpointOptions(
        peers,
        rank,
        lookahead_tokens=lookahead_tokens,
        verifies=verifies,
        groups=tuple(groups),
        state_parts=tuple(state_parts),
    )
    return PlannedHandovers(TransferEndpoint(local, options), device, planes.num_blocks)


class PlannedHandovers:
    """The hand-overs of one rank's plans, ordered after the work of the engine's stream.

    ``endpoint`` answers the peers; ``num_blocks``: device blocks.
    """

    def __init__(self, endpoint: TransferEndpoint, device: Device, num_blocks: int) -> None:
        self.endpoint = endpoint
        self._device = device
        self._num_blocks = num_blocks

    def check(self, plan: TransferPlan) -> None:
        """Raise ``PlanError`` for hand-overs of slots that the device does not have."""
        for task in plan.peers:
            swap = task.swap
            slots = swap.dst_block_ids if swap.dst_type is CacheLevel.DEVICE else swap.src_block_ids
            if swap.purpose is SwapPurpose.SEND:  # those of later steps are not known yet
                slots = slots[slots != NO_BLOCK]
            if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self._num_blocks:
                raise PlanError(
                    f"{swap.purpose.value} {task.plan_id}: a slot is not one of the {self._num_blocks} device blocks"
                )

    def submit(self, plan: TransferPlan, stream: Stream | None, refusal: str | None) -> Iterator[Execution]:
        """Begin the hand-overs of a plan, after what the compute stream has now, its evictions included."""
        for plan_id in plan.cancelled:
            self.endpoint.cancel(plan_id)
        after: Event | None = None
        if plan.peers and stream is not None and self._device.has_compute_streams:
            try:
                after = self._device.create_event()
                after.record(stream)
            except DeviceError as error:
                refusal = reason_of(error)
        for task in plan.peers:
            if refusal is None:
                yield self.endpoint.submit(task, after)
            else:
                yield self.endpoint.refuse(task, refusal)

    def layer_computed(self, layer: int, computed: Mapping[str, int], compute_stream: Any) -> None:
        """Publish a layer of transfers to peers, after the work that ``compute_stream`` has now."""
        self.endpoint.layer_computed(layer, computed, self._recorder(compute_stream))

    def blocks_computed(
        self, plan_id: int, first: int, slots: Int32Array, compute_stream: Any, layer: int | None
    ) -> None:
        """Publish blocks of a send, in slots that are known by now, after the work that ``compute_stream`` has now."""
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self._num_blocks:
            raise PlanError(f"send {plan_id}: a slot is not one of the {self._num_blocks} device blocks")
        self.endpoint.blocks_computed(plan_id, first, slots, self._recorder(compute_stream), layer)

    def _recorder(self, compute_stream: Any) -> Callable[[], Event | None]:
        """Return what records the event of the work that a stream has now. Raises ``StreamError``."""
        if compute_stream is None and self._device.has_compute_streams:
            raise StreamError("compute_stream: None orders nothing on a GPU; pass the stream that computes")

        def record() -> Event | None:
            if compute_stream is None:
                return None
            event = self._device.create_event()
            event.record(self._device.as_stream(compute_stream))
            return event

        return record
