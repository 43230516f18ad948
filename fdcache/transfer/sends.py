"""The sends of one rank: the parts of each that are computed, from the plan to its report."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fdcache.devices.base import Event
from fdcache.errors import DeviceError
from fdcache.layout import KVLayout
from fdcache.metadata import HandoverEnd, Int32Array, PeerTask
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.tiers.handovers import HandoverTally
from fdcache.transfer import prefill
from fdcache.transfer.connector import LocalPlanes
from fdcache.transfer.execution import TransferExecution
from fdcache.transfer.links import Incoming
from fdcache.transfer.prefill import ComputeSums, Offer, Part
from fdcache.transfer.publishing import ComputedPart
from fdcache.transfer.readers import Readers
from fdcache.transfer.sharing import Sharing
from fdcache.transfer.statistics import TransferView


@dataclass(slots=True)
class _Sending:
    """A send: what was marked as computed, by group."""

    execution: TransferExecution
    task: PeerTask
    marked: list[int]


class Sends:
    """The sends that have not ended. ``incoming`` has the decode peers, ``groups`` the layers announced together."""

    def __init__(
        self,
        planes: LocalPlanes,
        settings: PeerSettings,
        sharing: Sharing,
        groups: Sequence[tuple[int, int]],
        tally: HandoverTally,
        incoming: Mapping[bytes, Incoming],
    ) -> None:
        self._planes, self._settings, self._sharing = planes, settings, sharing
        self._tally, self._incoming = tally, incoming
        self.side = Readers(len(sharing.readers))
        self._first_plane = _first_planes(planes.layout)
        self._groups = groups
        self._group_ending_at = {last - 1: index for index, (_, last) in enumerate(groups)}
        self._sends: dict[int, _Sending] = {}
        self._send_of: dict[str, int] = {}
        self._parts: deque[ComputedPart] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sends)

    def __contains__(self, plan_id: int) -> bool:
        return plan_id in self._sends

    @property
    def is_idle(self) -> bool:
        """True if nothing is handed over."""
        return not (self._sends or self._parts)

    @property
    def awaits_events(self) -> bool:
        """True while a GPU computes what is to be announced."""
        with self._lock:
            return any(each.event is not None for each in self._parts)

    def add(self, task: PeerTask, execution: TransferExecution) -> None:
        """Take a send, which is offered by ``offer``. Any thread may call it."""
        with self._lock:
            self._sends[task.plan_id] = _Sending(execution, task, [0] * len(self._groups))
            self._send_of[task.transfer] = task.plan_id

    def layer_computed(
        self, layer: int, computed: Mapping[str, int], record: Callable[[], Event | None] | None = None
    ) -> bool:
        """Mark a layer of the leading blocks of some transfers as computed, once the event of ``record`` is reached.

        Return True if it ends a group of a send. Any thread may call it.
        """
        group = self._group_ending_at.get(layer)
        if group is None:
            return False
        event: Event | None = None
        first_layer, last_layer = self._groups[group]
        planes = (self._first_plane[first_layer], self._first_plane[last_layer])
        parts = []
        with self._lock:
            for transfer, blocks in computed.items():
                plan_id = self._send_of.get(transfer)
                if plan_id is None:
                    continue
                send = self._sends[plan_id]
                start, stop = send.marked[group], min(blocks, len(send.task.swap))
                if start < stop:
                    send.marked[group] = stop
                    parts.append((plan_id, Part(start, stop, *planes)))
        if parts and record is not None:
            event = record()
        with self._lock:
            self._parts.extend(ComputedPart(plan_id, part, event) for plan_id, part in parts)
        return bool(parts)

    def views(self) -> Iterator[TransferView]:
        """Yield the state of what has not ended."""
        for plan_id, each in self._sends.items():
            blocks, complete = len(each.task.swap), self.side.is_complete(plan_id)
            yield TransferView(plan_id, "send", each.task.transfer, "", blocks, each.execution.age, complete)

    def cancel_all(self, reason: str) -> None:
        """End every send, and tell the peers."""
        for plan_id in list(self._sends):
            self.side.cancel(plan_id, reason)

    def drop_all(self, reason: str) -> None:
        """Report what has not ended."""
        for plan_id in list(self._sends):
            self.end(plan_id, prefill.SendEnd.CANCELLED, reason)

    def offer(self, task: PeerTask, now: float) -> None:
        """Hand over the blocks of a send that was added."""
        swap = task.swap
        if TransferRole(self._settings.role) is TransferRole.DECODE:
            self.end(task.plan_id, prefill.SendEnd.FAILED, "FDCACHE_TRANSFER_ROLE=decode hands nothing over")
            return
        offer = Offer(
            task.plan_id,
            task.transfer,
            swap.hash_values,
            swap.src_block_ids,
            self._planes.layout.num_planes,
            task.timeout,
        )
        self.side.offer(offer, now)

    def take_computed(self) -> None:
        """Announce the parts that are computed, in order."""
        with self._lock:
            parts = list(self._parts)
            self._parts.clear()
        waiting = []
        for ready in parts:
            if ready.plan_id not in self._sends:
                continue
            if not self.side.is_live(ready.plan_id) or (
                ready.event is not None and not ready.event.query()
            ):  # its offer is among the commands
                waiting.append(ready)
            else:
                self.side.computed(ready.plan_id, ready.part)
        with self._lock:
            self._parts.extendleft(reversed(waiting))

    def end(
        self,
        plan_id: int,
        end: prefill.SendEnd,
        error: str | None,
        to: bytes | None = None,
        blocks: int = 0,
    ) -> None:
        """Report a send, of which decode asked for ``blocks`` blocks."""
        with self._lock:
            send = self._sends.pop(plan_id)
            if self._send_of.get(send.task.transfer) == plan_id:
                del self._send_of[send.task.transfer]
        is_done = end is prefill.SendEnd.DONE
        peer = self._incoming.get(to) if to is not None else None
        address = "" if peer is None else peer.identity.address
        ended = HandoverEnd(address, end.value, blocks * is_done)
        whole, moved = len(send.task.swap) * is_done, ended.blocks * self._planes.layout.payload_bytes
        send.execution.finish(ended, whole, (), moved, error)
        self._tally.record(send.execution.result())

    def granted(self, transfer: str) -> None:
        """Record that a peer has asked."""
        send = self._sends.get(self._send_of.get(transfer, 0))
        if send is not None:
            send.execution.begin()

    def slots_of(self, plan_id: int) -> Int32Array:
        """Return the slots of a send."""
        return self._sends[plan_id].task.swap.src_block_ids

    def sum_sources(self, reader: int, effect: ComputeSums) -> None:
        """Compute the sums of a part of what a reader reads. Does nothing once the send has ended."""
        if effect.plan_id not in self._sends:
            return
        part = effect.part
        planes = slice(part.first_plane, part.last_plane)
        try:
            sums = self._planes.sums(effect.slots, self._sharing.readers[reader], planes)
        except DeviceError as error:
            self.side.cancel(effect.plan_id, str(error))
        else:
            self.side.sums(reader, effect.plan_id, part, sums)


def _first_planes(layout: KVLayout) -> Sequence[int]:
    """Return the number of the first plane of each layer, then the number of planes."""
    counts = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
    return [sum(counts[:layer]) for layer in range(layout.total_layers + 1)]
