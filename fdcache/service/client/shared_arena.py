"""SharedHostArena: the host arena of a service, as one worker maps it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from fdcache import _core
from fdcache.devices.base import Device, PinnedMemory
from fdcache.errors import HostMemoryError, ProtocolError, ServiceError, ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, TransferPlan
from fdcache.service.client.ahead import ExtentsAhead
from fdcache.service.client.connection import Connection
from fdcache.service.wire.address import socket_path
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Attach, Attached
from fdcache.service.wire.shared_memory import Extent, Geometry, record_table
from fdcache.tiers.host import HostCache

ATTACH_TIMEOUT = 2.0

_SETTLED_NS = 100_000_000
"""Age of a folder's last change from which another one shows in its time, whatever the clock of the kernel's files."""


class SharedHostArena:
    """Extents of the service's arena, mapped when a plan needs them, and pinned ahead of that on a thread.

    A worker may copy only while the service knows its process: it attaches with its first plan, and again whenever a
    plan names another session. ``attach`` may block for as long as the service does and changes nothing that copies
    use; ``prepare`` follows it and maps. ``extents`` are the mapped ones, ``pinned`` the same for the device.
    """

    def __init__(self, host: HostCache, layout: KVLayout, rank: int, device: Device) -> None:
        assert host.server is not None
        self.fingerprint = layout.fingerprint
        self._rank = rank
        self._record_rank = rank // layout.replicas
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
        self._ahead: ExtentsAhead | None = None
        self._folder = Path()
        self._changed_at = 0
        self._looked_at: set[int] = set()
        self.epoch = 0
        self.table = _core.RecordTable([], 1, layout.record_bytes, [], 0, ())

    @property
    def num_blocks(self) -> int:
        """Mapped slots."""
        return self.table.num_slots

    @property
    def state(self) -> tuple[str, int]:
        """The session that is attached to, and a number that changes with the extents."""
        return self._arena, self.epoch

    def is_ready_for(self, plan: TransferPlan) -> bool:
        """Return True if ``attach`` and ``prepare`` have nothing to do for a plan."""
        if plan.arena != self._arena or self._attached is not None or self._geometry is None:
            return False
        known = self._known()
        return all(known.issuperset(self._needed(slots)) for slots in _host_slots(plan))

    def attach(self, plan: TransferPlan) -> str | None:
        """Announce this process to the service of the plan's slots; return the reason if that fails, else None."""
        if not any(len(swap) for swap in plan.swaps()):
            return None
        return self._attach(plan.arena or "none")

    def open_records(self, arena: str | None, slots: Int32Array) -> str | None:
        """Attach to a session and map its slots, so that records can be read; return the reason if that fails."""
        return self._attach(arena or "none") or self._prepare(slots)

    def _attach(self, arena: str) -> str | None:
        if arena == self._arena:
            return None
        try:
            self._attached = arena, self._ask(arena)
        except (ServiceError, OSError) as error:
            return f"the service's arena cannot be used: {error}"
        return None

    def prepare(self, plan: TransferPlan) -> str | None:
        """Map the extents that the plan needs; return the reason if that fails, else None."""
        slots = _host_slots(plan)
        return self._prepare(np.concatenate(slots)) if slots else None

    def _prepare(self, slots: Int32Array) -> str | None:
        try:
            self._apply_attachment()
            self._map(slots)
        except (HostMemoryError, OSError) as error:
            return f"the service's arena cannot be used: {error}"
        return None

    def _ask(self, arena: str) -> Attached:
        if arena == "none":
            raise ServiceUnavailableError("the engine had no session when it made the plan")
        incarnation, session, engine = arena.split("/", 2)
        live = self._live_file(engine)
        connection = Connection(self._address)
        try:
            connection.session = int(session, 16)
            answer, _ = connection.call(Attach(self._rank, live.live), ATTACH_TIMEOUT)
        finally:
            connection.close()
        if not isinstance(answer, Attached):
            raise ProtocolError(f"expected the answer to an attachment, got {type(answer).__name__}")
        if f"{answer.geometry.incarnation:x}" != incarnation:
            raise ServiceUnavailableError("the plan is from before the service was restarted")
        return answer

    def _apply_attachment(self) -> None:
        """Use the answer to the last ``attach``."""
        if self._attached is None:
            return
        (self._arena, answer), self._attached = self._attached, None
        if self._geometry != answer.geometry:
            self._unmap()
            self._geometry = answer.geometry
            self._folder = Path(answer.geometry.directory)
            self._ahead = ExtentsAhead(answer.geometry, self._device)
        self.fingerprint = answer.fingerprint

    def _live_file(self, engine: str) -> LiveFile:
        """Return this process's live file as a worker of an engine; it stays locked until the arena is closed."""
        if engine not in self._live:
            self._live[engine] = LiveFile(self._directory, engine)
        return self._live[engine]

    def _map(self, slots: Int32Array) -> None:
        """Map the extents of these slots; map again those whose file is other memory by now.

        Slots that a plan names are not given to another layout before the plan has ended, so the check holds for it.
        """
        geometry = self._geometry
        assert geometry is not None
        needed = self._needed(slots)
        epoch, known = self.epoch, self._known()
        if needed[-1] < len(self.extents) and known.issuperset(needed):
            return
        try:
            for index in [*range(len(self.extents), needed[-1] + 1), *needed]:
                path = geometry.path(self._record_rank, index)
                if index < len(self.extents) and self.extents[index].is_still(path):
                    continue
                extent, pinned = self._pinned(path, geometry.extent_bytes)
                # A load that timed out may still read there: keep it pinned.
                self._former += self.pinned[index : index + 1]
                self.extents[index : index + 1] = [extent]
                self.pinned[index : index + 1] = [pinned]
                self.epoch += 1
            known.update(needed)
        finally:
            if self.epoch != epoch:
                self.table = record_table(geometry, self.extents)
                if self._ahead is not None:
                    self._ahead.look_again()

    def _needed(self, slots: Int32Array) -> list[int]:
        """Return the extents of slots, in their order."""
        assert self._geometry is not None
        return _core.extents_of(
            np.ascontiguousarray(slots, np.int32).reshape(-1), self._geometry.records_per_extent
        )

    def _known(self) -> set[int]:
        """Return the extents that are still the same memory: no file of their folder has got a name since a look."""
        changed_at = self._folder.stat().st_mtime_ns
        if changed_at != self._changed_at:
            self._changed_at, self._looked_at = changed_at, set()
        return self._looked_at if time.time_ns() - changed_at > _SETTLED_NS else set()

    def _pinned(self, path: str, nbytes: int) -> tuple[Extent, PinnedMemory]:
        ready = self._ahead.take(path) if self._ahead is not None else None
        if ready is not None:
            return ready
        extent = Extent(path, nbytes)
        return extent, self._device.pin_memory(extent.address, nbytes, extent)

    def _unmap(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self.extents, self.pinned, self._former = [], [], []
        self._looked_at = set()
        self.epoch += 1
        self.table = _core.RecordTable([], 1, self._record_bytes, [], 0, ())

    def close(self) -> None:
        """Unmap, and remove the live files: this process copies nothing any more."""
        self._unmap()
        for live in self._live.values():
            live.close()
        self._live.clear()


def _host_slots(plan: TransferPlan) -> list[Int32Array]:
    """Return the host slots of the plan's transfers."""
    return [
        swap.src_block_ids if swap is plan.loads else swap.dst_block_ids for swap in plan.swaps() if len(swap)
    ]
