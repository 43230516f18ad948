"""The fetches of one rank: the prefill ranks that each reads from, from the plan to its report."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from fdcache.errors import DeviceError, TransferError
from fdcache.metadata import HandoverEnd, PeerTask
from fdcache.settings.peers import PeerSettings, TransferRole
from fdcache.tasks import Event, HandoverTask
from fdcache.tiers.statistics import HandoverTally
from fdcache.transfer.connector import HandoverView, LocalPlanes, Pieces, ReadOrder, Sharing, pieces_of
from fdcache.transfer.decode import BeginRead, ComputeTargetSums, DecodeSide, FetchEnd, FetchEnded, PeerFetch
from fdcache.transfer.links import Links, LinkState, Outgoing
from fdcache.transfer.messages import unsendable


@dataclass(slots=True, eq=False)
class Gathering:
    """The fetch of a plan. It ends with its last leg, and a block is whole if all legs have read it whole."""

    handover: HandoverTask
    task: PeerTask
    payload_bytes: int
    after: Event | None = None
    """On a GPU, the work after which its slots may be written."""
    legs: dict[int, Leg] = field(default_factory=dict)
    """The legs that have not ended, by number."""
    ends: list[tuple[str, FetchEnded]] = field(default_factory=list)

    @property
    def is_failing(self) -> bool:
        """True once no block can be whole any more."""
        return any(not end.whole for _, end in self.ends)

    def take(self, leg: Leg, ended: FetchEnded) -> HandoverEnd | None:
        """Take the end of a leg; report the plan and return its end if it was the last."""
        del self.legs[leg.number]
        if leg.wanted or not self.task.wanted:
            self.ends.append((leg.address, ended))
        if any(each.wanted for each in self.legs.values()) or self.handover.has_ended or not self.ends:
            return None
        whole = min(end.whole for _, end in self.ends)
        address, worst = next(
            ((address, end) for address, end in self.ends if end.end is not FetchEnd.DONE), self.ends[-1]
        )
        corrupt = sorted({block for _, end in self.ends for block in end.corrupt})
        result = HandoverEnd(address, worst.end.value, whole)
        self.handover.finish(result, whole, corrupt, whole * self.payload_bytes, worst.error)
        return result


@dataclass(slots=True, eq=False)
class Leg:
    """The part of a fetch that one prefill rank has. One that is not ``wanted`` tells the rank so."""

    number: int
    gathering: Gathering
    address: str
    deadline: float
    wanted: bool
    boot: bytes = b""
    pieces: Pieces | None = None
    """Pieces of the own planes that it reads, None for all."""

    @property
    def task(self) -> PeerTask:
        """The hand-over that it is a part of."""
        return self.gathering.task


logger = logging.getLogger(__name__)

_MOST_OVER = 1024


class PeerFetches:
    """The fetches that have not ended, and what peers have to be told of those that have."""

    def __init__(
        self,
        planes: LocalPlanes,
        settings: PeerSettings,
        sharing: Sharing,
        side: DecodeSide,
        links: Links,
        tally: HandoverTally,
    ) -> None:
        self._planes, self._settings, self._sharing = planes, settings, sharing
        self._side, self._links, self._tally = side, links, tally
        self._gatherings: dict[int, Gathering] = {}
        self._legs: dict[int, Leg] = {}
        self._leg_numbers = count(1)
        self._over: OrderedDict[tuple[str, str], int] = OrderedDict()
        """Last attempts of transfers that have ended here, by address and name: a peer that was not told, or has been
        replaced since and computes them again, is told once it is connected."""

    def __len__(self) -> int:
        return len(self._gatherings)

    def cancel(self, plan_id: int) -> None:
        """End a fetch that is not needed any more, and tell the peers."""
        if (gathering := self._gatherings.get(plan_id)) is not None:
            for leg in list(gathering.legs.values()):
                self._cancel_leg(leg)

    def cancel_all(self, reason: str) -> None:
        """End every fetch, and tell the peers."""
        for leg in list(self._legs.values()):
            self._cancel_leg(leg, reason)

    def drop_all(self, reason: str, *, read: bool) -> None:
        """Report what has not ended, and with ``read`` also fetches into whose slots a read may still write."""
        for number in list(self._legs):
            if read or not self._side.is_reading(number):
                self._end_unasked(number, FetchEnd.CANCELLED, reason)

    def accepted(self, link: Outgoing, now: float) -> None:
        """Ask a peer for what waits for it, and tell it what has ended."""
        for leg in self._waiting_for(link.address):
            self._ask(leg, link, now)
        for (address, transfer), attempt in self._over.items():
            if address == link.address:
                self._side.decline(link.boot, transfer, attempt)

    def lost(self, addresses: Iterable[str], now: float) -> None:
        """Look for the processes that replace lost ones, to tell them what has ended."""
        told = {address for address, _ in self._over}
        for address in told.intersection(addresses):
            self.connect_early(address, now)

    def views(self) -> Iterator[HandoverView]:
        """Yield the state of what has not ended."""
        for each in self._legs.values():
            if each.wanted or not each.task.wanted:
                age = each.gathering.handover.age
                blocks = len(each.task.swap)
                yield HandoverView(each.task.plan_id, "fetch", each.task.transfer, each.address, blocks, age)

    def begin(self, task: PeerTask, handover: HandoverTask, after: Event | None, now: float) -> None:
        """Begin the hand-over of a plan, once its peers are connected."""
        sharing = self._sharing
        gathering = Gathering(handover, task, self._planes.layout.payload_bytes, after)
        self._gatherings[task.plan_id] = gathering
        ranks = [(rank, task.wanted) for rank, _ in sharing.sources]
        ranks += [(rank, False) for rank in sharing.declined]
        for rank, wanted in ranks:
            address = task.addresses[rank] if rank < len(task.addresses) else ""
            leg = Leg(next(self._leg_numbers), gathering, address, now + task.timeout, wanted)
            self._over.pop((address, task.transfer), None)
            gathering.legs[leg.number] = self._legs[leg.number] = leg
        if TransferRole(self._settings.role) is TransferRole.PREFILL:
            refusal = "FDCACHE_TRANSFER_ROLE=prefill reads from nobody"
        elif (fault := unsendable(task.transfer, task.attempt)) is not None:
            refusal = fault
        elif len(task.addresses) != sharing.layout.tp_size:
            refusal = f"{len(task.addresses)} addresses of a peer with {sharing.layout.tp_size} ranks"
        else:
            for leg in list(gathering.legs.values()):
                self._connect(leg, now)
            return
        for number in list(gathering.legs):
            self._end_unasked(number, FetchEnd.REFUSED, refusal)

    def _connect(self, leg: Leg, now: float) -> None:
        try:
            link = self._links.connect(leg.address, now, leg.deadline)
        except TransferError as error:
            self._end_unasked(leg.number, FetchEnd.REFUSED, str(error))
            return
        if link.state is LinkState.ACCEPTED:
            self._ask(leg, link, now)
        elif link.state is LinkState.REFUSED:
            if link.identity is not None:  # refused by this side
                self._side.decline(link.boot, leg.task.transfer, leg.task.attempt)
            self._end_unasked(leg.number, FetchEnd.REFUSED, link.error)

    def ask_again(self, numbers: Iterable[int], now: float) -> None:
        """Connect anew for fetches that came to no process which knew of them."""
        for number in numbers:
            leg = self._legs[number]
            leg.boot = b""
            self._connect(leg, now)

    def connect_early(self, address: str, now: float) -> None:
        """Connect to a peer before it is needed."""
        try:
            self._links.connect(address, now, now + self._settings.timeout)
        except TransferError as error:
            logger.warning("%s", error)  # and a fetch from it is refused for the same reason

    def _ask(self, leg: Leg, link: Outgoing, now: float) -> None:
        assert link.identity is not None
        task, boot, rank = leg.task, link.boot, link.identity.rank
        leg.boot = boot
        if not leg.wanted or rank not in self._sharing.joints:
            self._side.decline(boot, task.transfer, task.attempt)
            if leg.wanted:
                refusal = f"rank: {link.address} is that of rank {rank}, from which this rank does not read"
                self._end_unasked(leg.number, FetchEnd.REFUSED, refusal)
            else:
                self._end_unasked(leg.number, FetchEnd.DECLINED, None)
            return
        joint, swap = self._sharing.joints[rank], task.swap
        leg.pieces = None if joint is None else joint.own
        first = int(swap.src_block_ids[0]) if len(swap) else 0
        timeout = max(leg.deadline - now, 0.0)
        hashes = swap.hash_values
        if task.peer_hashes:
            hashes = np.frombuffer(task.peer_hashes, np.uint8).reshape(-1, 32)
        fetch = PeerFetch(
            leg.number, boot, task.transfer, task.attempt, first, hashes, swap.dst_block_ids, timeout
        )
        self._side.fetch(fetch, now)

    def _waiting_for(self, address: str) -> list[Leg]:
        return [each for each in self._legs.values() if not each.boot and each.address == address]

    def refused(self, link: Outgoing, error: str | None) -> None:
        """End the fetches that waited for a peer."""
        for leg in self._waiting_for(link.address):
            self._end_unasked(leg.number, FetchEnd.REFUSED, error)

    def expire(self, now: float) -> None:
        """End the fetches from peers that did not answer in time."""
        for leg in list(self._legs.values()):
            if not leg.boot and now > leg.deadline:
                self._end_unasked(leg.number, FetchEnd.TIMEOUT, f"no peer answers at {leg.address}")

    def _end_unasked(self, number: int, end: FetchEnd, error: str | None) -> None:
        """End a leg of which nothing was read."""
        self.end(FetchEnded(number, end, 0, (), error))

    def end(self, effect: FetchEnded) -> None:
        """Take the end of a leg, and report the plan with its last."""
        leg = self._legs.pop(effect.plan_id, None)
        if leg is None:
            return
        self._remember_over(leg)
        gathering, plan_id = leg.gathering, leg.task.plan_id
        if gathering.take(leg, effect) is not None:
            self._tally.record(gathering.handover.execution.result())
        if gathering.is_failing:
            for other in [each for each in gathering.legs.values() if each.wanted]:
                self._cancel_leg(other)
        if not gathering.legs:
            self._gatherings.pop(plan_id, None)

    def _remember_over(self, leg: Leg) -> None:
        key = leg.address, leg.task.transfer
        if unsendable(leg.task.transfer, leg.task.attempt):  # no peer has heard of it
            return
        self._over[key] = leg.task.attempt
        self._over.move_to_end(key)
        if len(self._over) > _MOST_OVER:
            self._over.popitem(last=False)

    def _cancel_leg(self, leg: Leg, reason: str = "cancelled") -> None:
        if leg.boot:
            self._side.cancel(leg.number, reason)
        elif leg.wanted:
            self._end_unasked(leg.number, FetchEnd.CANCELLED, reason)

    def order(self, effect: BeginRead) -> ReadOrder:
        """Return the read that is to begin; its plan has begun then."""
        ready, gathering = effect.ready, self._legs[effect.plan_id].gathering
        gathering.handover.begin()
        place = ready.first + effect.skip - int(gathering.task.swap.src_block_ids[0])
        return ReadOrder(
            effect.read_id,
            effect.peer,
            ready.places,
            ready.count,
            effect.skip,
            ready.first_plane,
            ready.last_plane,
            effect.slots,
            gathering.after,
            self._is_state(gathering.task, place),
        )

    def _is_state(self, task: PeerTask, block: int) -> bool:
        """Return True for one of the last blocks of a fetch, which hold states."""
        return block >= len(task.swap) - self._planes.layout.num_states

    def sum_targets(self, effect: ComputeTargetSums) -> None:
        """Compute the sums of a part that has arrived. Does nothing once the fetch has ended."""
        if (leg := self._legs.get(effect.plan_id)) is None:
            return
        try:
            pieces = pieces_of(leg.pieces, is_state=self._is_state(leg.task, effect.blocks.start))
            sums = self._planes.sums(effect.slots, pieces, effect.planes)
        except DeviceError as error:
            self._side.cancel(effect.plan_id, str(error))
        else:
            self._side.sums(effect.plan_id, effect.blocks, sums)
