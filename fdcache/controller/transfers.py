"""Plans on their way: checked, and put on the streams.

Three streams: loads on one; evictions and backups, both device to host, on two of their own, of which the
backups' is a background stream. So an eviction or a load never queues behind a backup; at most it shares the
machine with the one that is running.
"""

from __future__ import annotations

from itertools import accumulate

from fdcache.controller.execution import PlanExecution, Transfer
from fdcache.controller.layer_groups import layer_groups, widen_groups
from fdcache.controller.plan_check import DIRECTIONS, check_plan
from fdcache.devices.base import (
    BlockCopy,
    BlockPairs,
    Device,
    DevicePlanes,
    Direction,
    Event,
    HostArena,
    Stream,
)
from fdcache.errors import PlanError
from fdcache.layout import KVLayout
from fdcache.metadata import CacheSwapMetadata, SwapPurpose, TransferPlan


class TransferQueue:
    """The streams of one worker."""

    def __init__(
        self, device: Device, layout: KVLayout, *, first_group_layers: int, group_layers: int
    ) -> None:
        self._device = device
        self._num_layers = layout.total_layers
        starts = [layout.layer_planes(layer)[0].offset for layer in range(layout.total_layers)]
        self._offsets = [*starts, layout.record_bytes]
        self._groups = layer_groups(layout.total_layers, first_group_layers, group_layers)
        self._widened: dict[int, list[tuple[int, int]]] = {}
        planes = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
        self._first_plane = [0, *accumulate(planes)]
        self._loads = device.create_stream()
        self._evictions = device.create_stream()
        self._backups = device.create_stream(background=True)

    def launch(
        self,
        plan: TransferPlan,
        rank: int,
        planes: DevicePlanes | None,
        arena: HostArena | None,
        compute_stream: Stream | None,
        refusal: str | None = None,
    ) -> tuple[PlanExecution, list[Event | None]]:
        """Check the whole plan, then put it on the streams; also the event of each layer.

        ``planes`` and ``arena`` may be None for a plan without blocks. A ``refusal`` is why nothing of the plan
        can be copied. Raises ``PlanError`` before anything is launched.
        """
        check_plan(plan)
        if refusal is not None:
            refused = [Transfer(swap.purpose, None, len(swap), refusal) for swap in plan.swaps()]
            return PlanExecution(plan.plan_id, rank, refused), [None] * self._num_layers
        made = {swap.purpose: self._copy(swap, planes, arena) for swap in plan.swaps()}
        transfers = [Transfer(purpose, copy) for purpose, copy in made.items()]
        copies = {purpose: copy for purpose, copy in made.items() if copy is not None}
        if copies and compute_stream is not None:
            self._order_after(compute_stream, copies)
        layer_events: list[Event | None] = [None] * self._num_layers
        if (evictions := copies.get(SwapPurpose.EVICT)) is not None:
            evictions.enqueue(self._evictions, 0, self._first_plane[-1])
            layer_events = [evictions.done] * self._num_layers
            if compute_stream is not None:
                compute_stream.wait_event(evictions.done)
        if (loads := copies.get(SwapPurpose.LOAD)) is not None:
            if evictions is not None:
                self._loads.wait_event(evictions.done)
            layer_events = self._enqueue_groups(loads, len(plan.loads or ()))
        if (backups := copies.get(SwapPurpose.BACKUP)) is not None:
            backups.enqueue(self._backups, 0, self._first_plane[-1])
        return PlanExecution(plan.plan_id, rank, transfers), layer_events

    def retire(self) -> None:
        """Let go of the memory that finished copies kept alive."""
        for stream in (self._evictions, self._loads, self._backups):
            stream.retire()

    def close(self) -> None:
        """End the streams."""
        for stream in (self._evictions, self._loads, self._backups):
            stream.close()

    def _copy(
        self, swap: CacheSwapMetadata, planes: DevicePlanes | None, arena: HostArena | None
    ) -> BlockCopy | None:
        pairs, direction = _pairs(swap), DIRECTIONS[swap.purpose]
        if len(pairs) == 0 or planes is None or arena is None:
            return None
        try:
            return self._device.copy_blocks(planes, arena, pairs, direction)
        except PlanError as error:
            raise PlanError(f"{swap.purpose.value}: {error}") from None

    def _order_after(self, compute_stream: Stream, copies: dict[SwapPurpose, BlockCopy]) -> None:
        computed = self._device.create_event()
        computed.record(compute_stream)
        streams = {
            SwapPurpose.EVICT: self._evictions,
            SwapPurpose.LOAD: self._loads,
            SwapPurpose.BACKUP: self._backups,
        }
        for purpose in copies:
            streams[purpose].wait_event(computed)

    def _enqueue_groups(self, loads: BlockCopy, num_blocks: int) -> list[Event | None]:
        min_bytes = self._device.min_group_bytes(num_blocks, self._offsets[-1])
        if min_bytes not in self._widened:
            self._widened[min_bytes] = widen_groups(self._groups, self._offsets, min_bytes)
        groups = self._widened[min_bytes]
        ranges = [(self._first_plane[first], self._first_plane[last]) for first, last in groups]
        events: list[Event | None] = []
        for (first, last), event in zip(groups, loads.enqueue_groups(self._loads, ranges), strict=True):
            events += [event] * (last - first)
        return events


def _pairs(swap: CacheSwapMetadata) -> BlockPairs:
    to_host = DIRECTIONS[swap.purpose] is Direction.TO_HOST
    source, target = swap.src_block_ids, swap.dst_block_ids
    return BlockPairs(
        device_slots=source if to_host else target,
        host_slots=target if to_host else source,
        generations=swap.dst_generations if to_host else swap.src_generations,
        hashes=swap.hash_values,
        parents=swap.parent_hashes,
        verify=swap.unverified,
    )
