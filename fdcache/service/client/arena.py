"""The host arena of a service, as one worker sees it."""

from __future__ import annotations

import numpy as np

from fdcache import _core
from fdcache.devices.base import Device, PinnedMemory
from fdcache.errors import HostMemoryError, ProtocolError, ServiceError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, TransferPlan
from fdcache.service.client.connection import Connection
from fdcache.service.wire.address import socket_path
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Attach, Attached
from fdcache.service.wire.shared_memory import Extent, Geometry, record_table
from fdcache.tiers.host import HostCache

_ATTACH_TIMEOUT = 2.0


class SharedHostArena:
    """Extents of the service's arena, mapped as plans come to need them.

    A worker copies only while the service knows its process: so it attaches with its first plan, and again
    whenever a plan names another session. ``extents`` are those mapped now. ``attach`` may take as long as the service
    does and changes nothing that copies use; ``prepare`` follows it.
    """

    def __init__(self, host: HostCache, layout: KVLayout, rank: int, device: Device) -> None:
        assert host.server is not None
        self.fingerprint = layout.fingerprint
        self._rank = rank
        self._record_bytes = layout.record_bytes
        self._directory = socket_path(host.server).parent
        self._live: dict[str, LiveFile] = {}
        self._address = host.server
        self._geometry: Geometry | None = None
        self._arena = ""
        self._attached: tuple[str, Attached] | None = None
        self._device = device
        self.extents: list[Extent] = []
        self.pinned: list[PinnedMemory] = []
        self._former: list[PinnedMemory] = []
        self.epoch = 0
        self.table = _core.RecordTable([], 1, layout.record_bytes, [], 0, ())

    @property
    def num_blocks(self) -> int:
        """Slots that are mapped."""
        return self.table.num_slots

    def attach(self, plan: TransferPlan) -> str | None:
        """Make this process known where the plan's slots are; the reason when that cannot be, and the plan fails."""
        arena = plan.arena or "none"
        if arena == self._arena or not any(len(swap) for swap in plan.swaps()):
            return None
        try:
            self._attached = arena, self._ask(arena)
        except (ServiceError, OSError) as error:
            return f"the service's arena cannot be used: {error}"
        return None

    def prepare(self, plan: TransferPlan) -> str | None:
        """Map what the plan needs; the reason when that cannot be, and the plan fails."""
        slots = [
            swap.src_block_ids if swap is plan.loads else swap.dst_block_ids
            for swap in plan.swaps()
            if len(swap)
        ]
        if not slots:
            return None
        try:
            self._take_up()
            self._map(np.concatenate(slots))
        except (HostMemoryError, OSError) as error:
            return f"the service's arena cannot be used: {error}"
        return None

    def _ask(self, arena: str) -> Attached:
        if arena == "none":
            raise ServiceUnavailableError("the engine had no session when it made the plan")
        incarnation, session, engine = arena.split("/", 2)
        live = self._live_file(engine)
        line = Connection(self._address)
        try:
            line.session = int(session, 16)
            answer, _ = line.call(Attach(self._rank, live.live), _ATTACH_TIMEOUT)
        finally:
            line.close()
        if not isinstance(answer, Attached):
            raise ProtocolError(f"an attachment was answered by {type(answer).__name__}")
        if f"{answer.geometry.incarnation:x}" != incarnation:
            raise ServiceUnavailableError("the plan is from before the service was restarted")
        return answer

    def _take_up(self) -> None:
        """Use what the service has answered since the last plan."""
        if self._attached is None:
            return
        (self._arena, answer), self._attached = self._attached, None
        if self._geometry != answer.geometry:
            self._unmap()
            self._geometry = answer.geometry
        self.fingerprint = answer.fingerprint

    def _live_file(self, engine: str) -> LiveFile:
        """This process's live file as a worker of that engine; it stays locked until the arena is closed."""
        if engine not in self._live:
            self._live[engine] = LiveFile(self._directory, engine)
        return self._live[engine]

    def _map(self, slots: Int32Array) -> None:
        """Map the extents of these slots, and anew those that are other memory than they were.

        What a plan names is not given to another layout before the plan has ended, so what is seen here holds for it.
        """
        geometry = self._geometry
        assert geometry is not None
        epoch = self.epoch
        needed = np.unique(slots // geometry.records_per_extent).tolist()
        for index in [*range(len(self.extents), needed[-1] + 1), *needed]:
            path = geometry.path(self._rank, index)
            if index < len(self.extents) and self.extents[index].is_still(path):
                continue
            extent = Extent(path, geometry.extent_bytes)
            pinned = self._device.pin_memory(extent.address, extent.nbytes, extent)
            # A load that its engine was too slow for may still read there: what was pinned stays so.
            self._former += self.pinned[index : index + 1]
            self.extents[index : index + 1] = [extent]
            self.pinned[index : index + 1] = [pinned]
            self.epoch += 1
        if self.epoch != epoch:
            self.table = record_table(geometry, self.extents)

    def _unmap(self) -> None:
        self.extents, self.pinned, self._former = [], [], []
        self.epoch += 1
        self.table = _core.RecordTable([], 1, self._record_bytes, [], 0, ())

    def close(self) -> None:
        """Unmap, and tell the service that this process copies nothing any more."""
        self._unmap()
        for live in self._live.values():
            live.close()
        self._live.clear()
