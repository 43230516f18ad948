"""The host arena of a service, as one worker sees it."""

from __future__ import annotations

from fdcache import _core
from fdcache.devices.base import Device, PinnedMemory
from fdcache.errors import HostMemoryError, ProtocolError, ServiceError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.metadata import TransferPlan
from fdcache.node.address import socket_path
from fdcache.node.connection import Connection
from fdcache.node.extents import Extent, record_table
from fdcache.node.liveness import LiveFile
from fdcache.node.protocol import Attach, Attached, Geometry
from fdcache.tiers.host_cache import HostCache

_ATTACH_TIMEOUT = 2.0


class SharedHostArena:
    """Extents of the service's arena, mapped as plans come to need them.

    A worker copies only while the service knows its process: so it attaches at its start, and again whenever a
    plan names another session. ``extents`` are those mapped now.
    """

    def __init__(self, host: HostCache, layout: KVLayout, rank: int, device: Device) -> None:
        assert host.server is not None
        self.fingerprint = layout.fingerprint
        self._rank = rank
        self._record_bytes = layout.record_bytes
        self._live = LiveFile(socket_path(host.server).parent, host.engine)
        self._address = host.server
        self._geometry: Geometry | None = None
        self._arena = ""
        self._device = device
        self.extents: list[Extent] = []
        self.pinned: list[PinnedMemory] = []
        self.epoch = 0
        self.table = _core.RecordTable([], 1, layout.record_bytes, [], 0, ())

    @property
    def num_blocks(self) -> int:
        """Slots that are mapped."""
        return self.table.num_slots

    def prepare(self, plan: TransferPlan) -> str | None:
        """Attach and map what the plan needs; the reason when that cannot be, and the plan fails."""
        slots = [
            swap.src_block_ids if swap is plan.loads else swap.dst_block_ids
            for swap in plan.swaps()
            if len(swap)
        ]
        if not slots:
            return None
        try:
            if plan.arena != self._arena:
                self._attach(plan.arena or "")
            self._map(max(int(each.max()) for each in slots))
        except (ServiceError, HostMemoryError, OSError) as error:
            return f"the service's arena cannot be used: {error}"
        return None

    def _attach(self, arena: str) -> None:
        incarnation, _, session = arena.partition("/")
        line = Connection(self._address)
        try:
            line.session = int(session, 16) if session else 0
            answer, _ = line.call(Attach(self._rank, self._live.live), _ATTACH_TIMEOUT)
        finally:
            line.close()
        if not isinstance(answer, Attached):
            raise ProtocolError(f"an attachment was answered by {type(answer).__name__}")
        if f"{answer.geometry.incarnation:x}" != incarnation:
            raise ServiceUnavailableError("the plan is from before the service was restarted")
        if self._geometry != answer.geometry:
            self._unmap()
            self._geometry = answer.geometry
        self.fingerprint = answer.fingerprint
        self._arena = arena

    def _map(self, slot: int) -> None:
        geometry = self._geometry
        assert geometry is not None
        if slot < self.num_blocks:
            return
        while len(self.extents) * geometry.records_per_extent <= slot:
            path = geometry.path(self._rank, len(self.extents))
            extent = Extent(path, geometry.extent_bytes)
            self.pinned.append(self._device.pin_memory(extent.address, extent.nbytes, extent))
            self.extents.append(extent)
            self.epoch += 1
        self.table = record_table(geometry, self.extents)

    def _unmap(self) -> None:
        self.extents, self.pinned = [], []
        self.epoch += 1
        self.table = _core.RecordTable([], 1, self._record_bytes, [], 0, ())

    def close(self) -> None:
        """Unmap, and tell the service that this process copies nothing any more."""
        self._unmap()
        self._live.close()
