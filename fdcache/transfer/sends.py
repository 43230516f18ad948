"""The sends of one rank: the parts of each that are computed, from the plan to its report, in the room for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fdcache.errors import DeviceError
from fdcache.layout import KVLayout
from fdcache.metadata import HandoverEnd, Int32Array, PeerTask, UInt64Array
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.tasks import Event, HandoverTask
from fdcache.tiers.statistics import HandoverTally
from fdcache.transfer import prefill
from fdcache.transfer.connector import (
    HandoverView,
    LocalPlanes,
    Packer,
    Pieces,
    Sharing,
    TransferConnector,
    pieces_of,
    whole_planes,
)
from fdcache.transfer.links import Incoming
from fdcache.transfer.messages import FromDecode
from fdcache.transfer.prefill import (
    ComputeSums,
    Effect,
    Offer,
    OfferEnded,
    Part,
    Peer,
    PlacesRead,
    PrefillSide,
    PublishPart,
    SendEnd,
)


class Readers:
    """As a ``PrefillSide``, for several readers of the same blocks. An offer ends once it has ended for all of them."""

    def __init__(self, count: int) -> None:
        self.sides = tuple(PrefillSide() for _ in range(count))
        self._of: dict[Peer, int] = {}
        self._ended: dict[int, list[OfferEnded]] = {}

    @property
    def blocks_held(self) -> int:
        """Blocks of all offers."""
        return max(side.blocks_held for side in self.sides)

    def greet(self, peer: Peer, index: int) -> None:
        """Take a peer for the reader of this number."""
        self._of[peer] = index

    def offer(self, offer: Offer, now: float) -> None:
        """Hand over the blocks of a plan to every reader."""
        for side in self.sides:
            side.offer(offer, now)

    def is_live(self, plan_id: int) -> bool:
        """Return True until the offer of a plan has ended for every reader."""
        return any(side.is_live(plan_id) for side in self.sides)

    def is_complete(self, plan_id: int) -> bool:
        """Return True once the sums of a live offer are known."""
        live = [side for side in self.sides if side.is_live(plan_id)]
        return bool(live) and all(side.is_complete(plan_id) for side in live)

    def computed(self, plan_id: int, part: Part) -> None:
        """Record that a part of an offer is computed."""
        for side in self.sides:
            side.computed(plan_id, part)

    def sums(self, index: int, plan_id: int, part: Part, sums: UInt64Array) -> None:
        """Take the sums of what a reader reads of a part."""
        self.sides[index].sums(plan_id, part, sums)

    def cancel(self, plan_id: int, reason: str) -> None:
        """End an offer whose blocks will not be complete, and tell decode. Idempotent."""
        for side in self.sides:
            side.cancel(plan_id, reason)

    def receive(self, peer: Peer, message: FromDecode, now: float) -> None:
        """Take a message of a peer that was greeted."""
        self.sides[self._of[peer]].receive(peer, message, now)

    def peer_gone(self, peer: Peer) -> None:
        """End what a peer, whose process is proved gone, has asked for."""
        if (index := self._of.pop(peer, None)) is not None:
            self.sides[index].peer_gone(peer)

    def tick(self, now: float) -> None:
        """End what has lasted too long."""
        for side in self.sides:
            side.tick(now)

    def take_effects(self) -> list[tuple[int, Effect]]:
        """Remove and return what is to be done, with the number of the reader."""
        return [
            (index, done)
            for index, side in enumerate(self.sides)
            for effect in side.take_effects()
            for done in (self._ends(effect) if isinstance(effect, OfferEnded) else (effect,))
        ]

    def _ends(self, ended: OfferEnded) -> list[Effect]:
        """Return the end of an offer once it is that of the last reader; before that, the places that are free."""
        ends = self._ended.setdefault(ended.plan_id, [])
        ends.append(ended)
        freed: list[Effect] = [PlacesRead(ended.plan_id, places) for places in ended.places]
        if ended.end is SendEnd.PEER_GONE:  # no block can be whole on all ranks of that instance any more
            self.cancel(ended.plan_id, "the decode process of another rank is gone")
        if len(ends) < len(self.sides):
            return freed
        del self._ended[ended.plan_id]
        worst = next((each for each in ends if each.end is not SendEnd.DONE), ended)
        return [*freed, worst._replace(places=(), blocks=max(each.blocks for each in ends))]


@dataclass(slots=True)
class ComputedPart:
    """A part that is computed once ``event`` is reached."""

    plan_id: int
    part: Part
    event: Event | None


class Publisher:
    """Publishes the parts for which a peer asks, in order, as far as the connector has room."""

    def __init__(
        self,
        connector: TransferConnector,
        shares: PlaceShares,
        side: PrefillSide,
        slots_of: Callable[[int], Int32Array],
        pieces: Pieces | None,
        *,
        joins: bool,
    ) -> None:
        """``joins``: groups of layers that are computed by now go as one part, where nothing is gained by several."""
        self._joins = joins
        self._connector, self._shares = connector, shares
        self._side, self._slots_of, self._pieces = side, slots_of, pieces
        self._wanted: deque[PublishPart] = deque()
        self._packing: deque[tuple[PublishPart, Part, tuple[int, ...]]] = deque()

    def publish(self, wanted: PublishPart) -> None:
        """Publish a part as soon as there is room."""
        if self._joins and self._wanted and (joined := self._joined(self._wanted[-1], wanted)) is not None:
            self._wanted[-1] = joined
        else:
            self._wanted.append(wanted)

    def _joined(self, before: PublishPart, wanted: PublishPart) -> PublishPart | None:
        """Return two parts as one if the second has the planes after the first, of the same blocks."""
        first, second = before.part, wanted.part
        joined = before._replace(part=first._replace(last_plane=second.last_plane))
        follows = second == second._replace(first=first.first, last=first.last, first_plane=first.last_plane)
        if not follows or before != wanted._replace(part=first):
            return None
        fits = self._connector.most_blocks(first.first_plane, second.last_plane) >= first.last - first.first
        return joined if fits else None

    def publish_next(self) -> bool:
        """Announce what is packed, or publish the leading blocks of the next part for which there is room.

        Returns False if nothing was done. A peer that waits for room does not hold up others.
        """
        if self._announce_next():
            return True
        waiting: set[bytes] = set()
        passed: list[PublishPart] = []
        published = False
        while self._wanted and not published:
            wanted = self._wanted.popleft()
            if not self._side.is_asked(wanted.plan_id, wanted.peer, wanted.attempt):
                continue
            published = wanted.peer not in waiting and self._publish(wanted)
            if not published:
                waiting.add(wanted.peer)
                passed.append(wanted)
        self._wanted.extendleft(reversed(passed))
        return published

    def _publish(self, wanted: PublishPart) -> bool:
        """Publish the leading blocks of a part if there is room, and keep the rest of it."""
        part = wanted.part
        most = self._connector.most_blocks(part.first_plane, part.last_plane)
        slots = self._slots_of(wanted.plan_id)
        pieces = pieces_of(self._pieces, is_state=part.first >= len(slots) - self._shares.num_states)
        if pieces is not None and pieces.per_plane > 1:  # which are packed, however long they are
            most = 1
        head = part._replace(last=min(part.last, part.first + most))
        try:
            planes = part.first_plane, part.last_plane
            places = self._shares.publish(wanted.peer, slots[head.first : head.last], *planes, pieces)
        except DeviceError as error:
            self._side.cancel(wanted.plan_id, str(error))
            return True
        if places is None:
            return False
        if head.last < part.last:
            self._wanted.appendleft(wanted._replace(part=part._replace(first=head.last)))
        self._packing.append((wanted, head, places))
        self._announce_next()
        return True

    def _announce_next(self) -> bool:
        """Announce the first part that is being packed, if peers may read it."""
        if not self._packing:
            return False
        wanted, head, places = self._packing[0]
        try:
            if isinstance(self._connector, Packer) and not self._connector.is_packed(places):
                return False
        except DeviceError as error:
            self._side.cancel(wanted.plan_id, str(error))
        self._packing.popleft()
        self._side.published(wanted.plan_id, wanted.peer, wanted.attempt, head, places)
        return True


@dataclass(slots=True)
class _Sending:
    """A send: its slots, those of later steps once they are known, and what was marked as computed, by group.

    ``is_given_up``: by this instance, which may overwrite the slots from then on.
    """

    handover: HandoverTask
    task: PeerTask
    slots: Int32Array
    marked: list[int]
    is_given_up: bool = False


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

    def add(self, task: PeerTask, handover: HandoverTask) -> None:
        """Take a send, which is offered by ``offer``. Any thread may call it."""
        with self._lock:
            slots = task.swap.src_block_ids.copy()
            self._sends[task.plan_id] = _Sending(handover, task, slots, [0] * len(self._groups))
            self._send_of[task.transfer] = task.plan_id

    def blocks_computed(
        self,
        plan_id: int,
        first: int,
        slots: Int32Array,
        record: Callable[[], Event | None] | None = None,
        layer: int | None = None,
    ) -> bool:
        """Do as ``layer_computed`` for blocks from ``first`` on, whose slots are known by now; None for all layers."""
        with self._lock:
            send = self._sends.get(plan_id)
            if send is None or self._send_of.get(send.task.transfer) != plan_id:
                return False
            send.slots[first : first + len(slots)] = slots
        computed, once = {send.task.transfer: first + len(slots)}, None if record is None else cache(record)
        layers = [last - 1 for _, last in self._groups] if layer is None else [layer]
        marked = [self.layer_computed(each, computed, once) for each in layers]
        return any(marked)

    def give_up(self, plan_id: int) -> None:
        """Take no sum any more: slots of a send may be overwritten now. Any thread may call it."""
        with self._lock:
            if (send := self._sends.get(plan_id)) is not None:
                send.is_given_up = True

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
                    # Blocks with tokens and those with states are no part together: their pieces may be others.
                    cut = min(max(len(send.task.swap) - self._planes.layout.num_states, start), stop)
                    ranges = [(start, cut), (cut, stop)]
                    parts += [(plan_id, Part(*each, *planes)) for each in ranges if each[0] < each[1]]
        if parts and record is not None:
            event = record()
        with self._lock:
            self._parts.extend(ComputedPart(plan_id, part, event) for plan_id, part in parts)
        return bool(parts)

    def views(self) -> Iterator[HandoverView]:
        """Yield the state of what has not ended."""
        for plan_id, each in self._sends.items():
            blocks, complete = len(each.task.swap), self.side.is_complete(plan_id)
            yield HandoverView(plan_id, "send", each.task.transfer, "", blocks, each.handover.age, complete)

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
            self.slots_of(task.plan_id),
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
        send.handover.finish(ended, whole, (), moved, error)
        self._tally.record(send.handover.execution.result())

    def granted(self, transfer: str) -> None:
        """Record that a peer has asked."""
        send = self._sends.get(self._send_of.get(transfer, 0))
        if send is not None:
            send.handover.begin()

    def slots_of(self, plan_id: int) -> Int32Array:
        """Return the device slots that a send offers, in path order."""
        return self._sends[plan_id].slots

    def sum_sources(self, reader: int, effect: ComputeSums) -> None:
        """Compute the sums of a part of what a reader reads. Does nothing once the send has ended.

        Sums are not those of the blocks if the send was given up meanwhile: its end is among the commands.
        """
        if (send := self._sends.get(effect.plan_id)) is None:
            return
        part = effect.part
        planes = slice(part.first_plane, part.last_plane)
        is_state = part.first >= len(send.task.swap) - self._planes.layout.num_states
        try:
            pieces = pieces_of(self._sharing.readers[reader], is_state=is_state)
            sums = self._planes.sums(effect.slots, pieces, planes)
        except DeviceError as error:
            self.side.cancel(effect.plan_id, str(error))
        else:
            if not send.is_given_up:
                self.side.sums(reader, effect.plan_id, part, sums)


def _first_planes(layout: KVLayout) -> Sequence[int]:
    """Return the number of the first plane of each layer, then the number of planes."""
    counts = [len(layout.layer_planes(layer)) for layer in range(layout.total_layers)]
    return [sum(counts[:layer]) for layer in range(layout.total_layers + 1)]


class PlaceShares:
    """Publishes parts for peers. One may take half of the room that others leave, so that it cannot stop them.

    ``total``: bytes of the room. What takes none is not limited.
    """

    def __init__(self, connector: TransferConnector, layout: KVLayout, total: int) -> None:
        self._connector, self._total = connector, total
        self.num_states = layout.num_states
        """The last blocks of a send, which hold states."""
        self._whole = whole_planes(layout)
        self._taken: dict[Peer, int] = {}
        self._owners: dict[tuple[int, ...], tuple[Peer, int]] = {}

    def publish(
        self, peer: Peer, slots: Int32Array, first_plane: int, last_plane: int, pieces: Pieces | None
    ) -> tuple[int, ...] | None:
        """Do as the connector does; also return None if the peer has its share. Raises ``DeviceError``."""
        own = self._taken.get(peer, 0)
        found = pieces or self._whole
        needed = len(slots) * sum(found.sizes[slice(*found.range_of(first_plane, last_plane))])
        if own and own + needed > (self._total - sum(self._taken.values()) + own) // 2:
            return None
        before = self._connector.stats().places_used
        places = self._connector.publish(slots, first_plane, last_plane, pieces)
        taken = self._connector.stats().places_used - before
        if places is not None and taken > 0:
            self._owners[places] = peer, taken
            self._taken[peer] = own + taken
        return places

    def withdraw(self, places: tuple[int, ...]) -> None:
        """Free places."""
        self._connector.withdraw(places)
        if (owner := self._owners.pop(places, None)) is not None:
            peer, taken = owner
            self._taken[peer] -= taken
            if not self._taken[peer]:
                del self._taken[peer]
