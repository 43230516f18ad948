"""The prefill side of transfers as a state machine without I/O.

    side = PrefillSide(peer_lease=30.0)
    side.offer(Offer(plan_id=7, transfer="request-1", hashes=hashes, slots=slots, num_planes=4), now)
    side.computed(7, Part(0, 8, 0, 2))
    side.receive(peer, message, now)
    for effect in side.take_effects(): ...      # Publish(7, peer, 1, Part(0, 8, 0, 2)), ...
    side.published(7, peer, 1, Part(0, 8, 0, 2), places)

It decides which messages are sent, when sums are needed and when an offer has ended. It reads no clock and copies
nothing: the endpoint does both, and property tests drive it with lost, late, repeated and reordered messages.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdcache.metadata import HashArray, Int32Array, UInt64Array
from fdcache.transfer.leases import MOST_LEASES, Leases, lease_seconds
from fdcache.transfer.messages import (
    AskForBlocks,
    BlocksGranted,
    End,
    EndReason,
    Failed,
    FromDecode,
    Last,
    Ready,
    Renew,
)

Peer = bytes
"""Boot id of a peer."""

_MOST_REMEMBERED = 4096
_MOST_WAITING_BYTES = 64 << 20
"""Bytes of the hashes of asks that wait for their offer: two million blocks."""
_LEARNS_WITHIN = 5.0
"""Seconds within which the ranks of a loaded engine learn of a hand-over that its client knows of."""


class Part(NamedTuple):
    """Planes ``first_plane`` to ``last_plane`` of blocks ``first`` to ``last`` of a transfer."""

    first: int
    last: int
    first_plane: int
    last_plane: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that a prefill plan hands over: block i of the transfer has hash i and lies in slot i."""

    plan_id: int
    transfer: str
    hashes: HashArray
    slots: Int32Array
    num_planes: int
    wait: float
    """Seconds until decode has to ask."""


class SendEnd(StrEnum):
    """How an offer ended."""

    DONE = "done"
    NOT_WANTED = "not_wanted"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    PEER_GONE = "peer_gone"


class SendMessage(NamedTuple):
    """Effect: send a message to a peer."""

    peer: Peer
    message: BlocksGranted | Ready | Last | Failed


class ComputeSums(NamedTuple):
    """Effect: sum a part of an offer while it lasts, after what is published, and pass the sums to ``sums``."""

    plan_id: int
    part: Part
    slots: Int32Array


class PublishPart(NamedTuple):
    """Effect: make a part readable for a peer, in pieces if need be, and pass each to ``published``."""

    plan_id: int
    peer: Peer
    attempt: int
    part: Part


class OfferEnded(NamedTuple):
    """Effect: report the plan; nothing of it is sent any more. ``places`` are free again.

    ``peer`` has asked for ``blocks`` of it, None if no peer has.
    """

    plan_id: int
    end: SendEnd
    error: str | None
    places: tuple[tuple[int, ...], ...]
    peer: Peer | None = None
    blocks: int = 0


class PlacesRead(NamedTuple):
    """Effect: these places are free again; decode has read them, or needs them no more."""

    plan_id: int
    places: tuple[int, ...]


Effect = SendMessage | ComputeSums | PublishPart | OfferEnded | PlacesRead


@dataclass(slots=True)
class _Answers:
    """The numbered answers to one attempt of one peer."""

    peer: Peer
    attempt: int
    first: int
    last: int
    is_announced: NDArray[np.bool_]
    log: list[BlocksGranted | Ready | Last] = field(default_factory=list)
    freed: int = 0

    def take_places(self, read: int) -> list[tuple[int, ...]]:
        """Return the places of the answers below this number that were not returned before."""
        unread = self.log[self.freed : read]
        self.freed = max(self.freed, min(read, len(self.log)))
        return [message.places for message in unread if isinstance(message, Ready)]


@dataclass(slots=True)
class _Send:
    offer: Offer
    is_computed: NDArray[np.bool_]
    is_summed: NDArray[np.bool_]
    sums: UInt64Array
    parts: list[Part] = field(default_factory=list)
    answers: _Answers | None = None
    has_grown: bool = False
    """More of it was computed since the last look."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    peer: Peer
    ask: AskForBlocks


class PrefillSide:
    """Offers of one rank and the decode peers that ask for them."""

    def __init__(self) -> None:
        self._sends: Leases[int, _Send] = Leases()
        self._by_transfer: dict[str, int] = {}
        self._waiting: Leases[str, _Waiting] = Leases()
        """Asks for what is not offered yet, those that were heard of longest ago in front."""
        self._waiting_bytes = 0
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Highest attempt that decode has ended, of transfers that it ended before they were offered."""
        self._unknown: OrderedDict[tuple[Peer, str], float] = OrderedDict()
        """When a peer first asked to hold a transfer that was not offered yet."""
        self._over: OrderedDict[str, str] = OrderedDict()
        """Transfers whose offer has ended, and why."""
        self._effects: list[Effect] = []

    def __len__(self) -> int:
        return len(self._sends)

    @property
    def num_waiting(self) -> int:
        """Asks for transfers that are not offered yet."""
        return len(self._waiting)

    @property
    def blocks_held(self) -> int:
        """Blocks of all offers."""
        return sum(len(send.offer.slots) for send in self._sends.values())

    def take_effects(self) -> list[Effect]:
        """Remove and return what is to be done, in order."""
        effects, self._effects = self._effects, []
        return effects

    # --- this instance ----------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float) -> None:
        """Hand over the blocks of a plan, as they are computed, to whoever asks for the transfer."""
        if offer.transfer in self._by_transfer:
            reason = f"transfer {offer.transfer!r} is offered already"
            self._effects.append(OfferEnded(offer.plan_id, SendEnd.FAILED, reason, ()))
            return
        self._over.pop(offer.transfer, None)
        waiting, ended = self._take_waiting(offer.transfer), self._ended.pop(offer.transfer, None)
        if ended is not None and (waiting is None or waiting.ask.attempt <= ended):
            self._effects.append(OfferEnded(offer.plan_id, SendEnd.NOT_WANTED, "not wanted by decode", ()))
            return
        computed = np.zeros((len(offer.slots), offer.num_planes), np.bool_)
        sums = np.zeros(len(offer.slots), np.uint64)
        self._sends.grant(offer.plan_id, _Send(offer, computed, computed.copy(), sums), now + offer.wait)
        self._by_transfer[offer.transfer] = offer.plan_id
        if waiting is not None:
            self._grant(self._sends[offer.plan_id], waiting.peer, waiting.ask, now)

    def is_live(self, plan_id: int) -> bool:
        """Return True until the offer of a plan has ended."""
        return plan_id in self._sends

    def is_complete(self, plan_id: int) -> bool:
        """Return True once the sums of a live offer are known."""
        return plan_id in self._sends and bool(self._sends[plan_id].is_summed.all())

    def computed(self, plan_id: int, part: Part) -> None:
        """Record that a part of an offer is computed, each plane of a block once. Ignored once the offer has ended."""
        if (send := self._sends.get(plan_id)) is None:
            return
        send.has_grown = True
        send.parts.append(part)
        send.is_computed[part.first : part.last, part.first_plane : part.last_plane] = True
        self._publish(send, part)
        self._effects.append(ComputeSums(plan_id, part, send.offer.slots[part.first : part.last]))

    def published(self, plan_id: int, peer: Peer, attempt: int, part: Part, places: tuple[int, ...]) -> None:
        """Announce a part to the peer for which it was published; free its places if the peer needs it no more."""
        send = self._sends.get(plan_id)
        answers = None if send is None else send.answers
        if send is None or answers is None or (answers.peer, answers.attempt) != (peer, attempt):
            self._effects.append(PlacesRead(plan_id, places))
            return
        answers.is_announced[part.first : part.last, part.first_plane : part.last_plane] = True
        count = part.last - part.first
        where = (part.first, count, part.first_plane, part.last_plane, places)
        self._answer(send, Ready(send.offer.transfer, attempt, len(answers.log), *where))
        self._finish(send)

    def is_asked(self, plan_id: int, peer: Peer, attempt: int) -> bool:
        """Return True while this attempt of a peer is answered."""
        send = self._sends.get(plan_id)
        answers = None if send is None else send.answers
        return answers is not None and (answers.peer, answers.attempt) == (peer, attempt)

    def sums(self, plan_id: int, part: Part, sums: UInt64Array) -> None:
        """Take the sums of a part; those of a block's parts add up. Ignored once the offer has ended."""
        if (send := self._sends.get(plan_id)) is not None:
            send.sums[part.first : part.last] += sums
            send.is_summed[part.first : part.last, part.first_plane : part.last_plane] = True
            self._finish(send)

    def cancel(self, plan_id: int, reason: str) -> None:
        """End an offer whose blocks will not be complete, and tell decode. Idempotent."""
        if (send := self._sends.get(plan_id)) is not None:
            self._fail(send, SendEnd.CANCELLED, reason)

    # --- peers ------------------------------------------------------------------------------------------------

    def receive(self, peer: Peer, message: FromDecode, now: float) -> None:
        """Take a message of a peer that was accepted."""
        if isinstance(message, AskForBlocks):
            self._asked(peer, message, now)
        elif isinstance(message, Renew):
            self._renewed(peer, message, now)
        else:
            self._end_by_decode(peer, message)

    def peer_gone(self, peer: Peer) -> None:
        """End the offers that a peer, whose process is proved gone, has asked for."""
        for waiting in self._waiting.values():
            if waiting.peer == peer:
                self._take_waiting(waiting.ask.transfer)
        for send in self._sends.values():
            if send.answers is not None and send.answers.peer == peer:
                self._end(send, SendEnd.PEER_GONE, "the decode process is gone")

    def tick(self, now: float) -> None:
        """End what has lasted too long. Decode has time to ask as long as blocks are being computed."""
        for send in self._sends.values():
            if send.has_grown and send.answers is None:
                self._sends.extend(send.offer.plan_id, now + send.offer.wait)
            send.has_grown = False
        for plan_id in self._sends.expired(now):
            send = self._sends[plan_id]
            reason = "decode did not ask" if send.answers is None else "decode did not renew its lease"
            self._fail(send, SendEnd.EXPIRED, reason)
        for transfer in self._waiting.expired(now):
            self._refuse_waiting(transfer, "prefill has no such transfer")

    def _asked(self, peer: Peer, ask: AskForBlocks, now: float) -> None:
        if ask.attempt <= self._ended.get(ask.transfer, -1):
            failed = Failed(ask.transfer, ask.attempt, "decode has ended this transfer")
            self._effects.append(SendMessage(peer, failed))
            return
        plan_id = self._by_transfer.get(ask.transfer)
        if plan_id is None and (reason := self._over.get(ask.transfer)) is not None:
            self._effects.append(SendMessage(peer, Failed(ask.transfer, ask.attempt, reason)))
            return
        if plan_id is None:
            waiting = self._waiting.get(ask.transfer)
            if waiting is None or ask.attempt >= waiting.ask.attempt:
                self._wait(_Waiting(peer, ask), now)
            return
        send = self._sends[plan_id]
        answers = send.answers
        if answers is None or ask.attempt > answers.attempt:
            self._grant(send, peer, ask, now)
        elif answers.peer == peer and answers.attempt == ask.attempt:
            self._sends.renew(plan_id, now + lease_seconds(ask.lease_ms))
            self._resend(answers, 0)
        elif answers.peer != peer:
            failed = Failed(ask.transfer, ask.attempt, "another decode instance reads this transfer")
            self._effects.append(SendMessage(peer, failed))

    def _wait(self, waiting: _Waiting, now: float) -> None:
        """Keep an ask until its transfer is offered; refuse the oldest if there are more than decode has requests."""
        ask = waiting.ask
        self._take_waiting(ask.transfer)
        self._waiting.grant(ask.transfer, waiting, now + lease_seconds(ask.lease_ms))
        self._waiting_bytes += len(ask.hashes)
        while len(self._waiting) > MOST_LEASES or self._waiting_bytes > _MOST_WAITING_BYTES:
            self._refuse_waiting(
                next(iter(self._waiting)), "too many ask prefill for what it does not know yet"
            )

    def _take_waiting(self, transfer: str) -> _Waiting | None:
        waiting = self._waiting.end(transfer)
        if waiting is not None:
            self._waiting_bytes -= len(waiting.ask.hashes)
        return waiting

    def _refuse_waiting(self, transfer: str, reason: str) -> None:
        if (waiting := self._take_waiting(transfer)) is not None:
            failed = Failed(transfer, waiting.ask.attempt, reason)
            self._effects.append(SendMessage(waiting.peer, failed))

    def _grant(self, send: _Send, peer: Peer, ask: AskForBlocks, now: float) -> None:
        wanted = np.frombuffer(ask.hashes, np.uint8).reshape(-1, 32)
        mine = send.offer.hashes[ask.first : ask.first + len(wanted)]
        if len(mine) != len(wanted) or not np.array_equal(mine, wanted):
            reason = f"the blocks from {ask.first} on are not those of prefill"
            self._effects.append(SendMessage(peer, Failed(ask.transfer, ask.attempt, reason)))
            return
        self._sends.renew(send.offer.plan_id, now + lease_seconds(ask.lease_ms))
        self._free(send)
        nothing = np.zeros_like(send.is_computed)
        send.answers = _Answers(peer, ask.attempt, ask.first, ask.first + len(wanted), nothing)
        self._answer(send, BlocksGranted(ask.transfer, ask.attempt, 0))
        for part in send.parts:
            self._publish(send, part)
        self._finish(send)

    def _publish(self, send: _Send, part: Part) -> None:
        """Publish the blocks of a part that decode wants."""
        if (answers := send.answers) is not None:
            wanted = part._replace(first=max(part.first, answers.first), last=min(part.last, answers.last))
            if wanted.first < wanted.last:
                plan_id = send.offer.plan_id
                self._effects.append(PublishPart(plan_id, answers.peer, answers.attempt, wanted))

    def _free(self, send: _Send) -> None:
        """Free the places of answers that are replaced."""
        if (answers := send.answers) is not None:
            for places in answers.take_places(len(answers.log)):
                self._effects.append(PlacesRead(send.offer.plan_id, places))

    def _finish(self, send: _Send) -> None:
        """Send the last answer once everything was announced and the sums are known."""
        answers = send.answers
        if answers is None or not send.is_summed.all():
            return
        if not answers.is_announced[answers.first : answers.last].all():
            return
        wanted = slice(answers.first, answers.last)
        hashes = np.ascontiguousarray(send.offer.hashes[wanted]).tobytes()
        sums = np.ascontiguousarray(send.sums[wanted]).astype("<u8").tobytes()
        self._answer(send, Last(send.offer.transfer, answers.attempt, len(answers.log), hashes, sums))

    def _answer(self, send: _Send, message: BlocksGranted | Ready | Last) -> None:
        assert send.answers is not None
        send.answers.log.append(message)
        self._effects.append(SendMessage(send.answers.peer, message))

    def _resend(self, answers: _Answers, received: int) -> None:
        self._effects += [SendMessage(answers.peer, message) for message in answers.log[received:]]

    def _renewed(self, peer: Peer, renew: Renew, now: float) -> None:
        plan_id = self._by_transfer.get(renew.transfer)
        send = None if plan_id is None else self._sends[plan_id]
        answers = None if send is None else send.answers
        if send is not None and answers is None and not renew.received:  # decode will ask once it has room
            self._sends.extend(send.offer.plan_id, now + lease_seconds(renew.lease_ms))
            return
        if send is None and not renew.received and not self._is_gone(peer, renew.transfer, now):
            return
        if send is None or answers is None or answers.peer != peer or answers.attempt != renew.attempt:
            if answers is None or answers.peer != peer or renew.attempt > answers.attempt:
                failed = Failed(renew.transfer, renew.attempt, "prefill does not hold this transfer any more")
                self._effects.append(SendMessage(peer, failed))
            return
        self._sends.renew(send.offer.plan_id, now + lease_seconds(renew.lease_ms))
        for places in answers.take_places(renew.read):
            self._effects.append(PlacesRead(send.offer.plan_id, places))
        self._resend(answers, renew.received)

    def _is_gone(self, peer: Peer, transfer: str, now: float) -> bool:
        """Return False for a hold of what this rank may not have learned of yet: it does with a step after its end."""
        if transfer in self._over:
            return True
        since = self._unknown.setdefault((peer, transfer), now)
        if len(self._unknown) > _MOST_REMEMBERED:
            self._unknown.popitem(last=False)
        if now < since + _LEARNS_WITHIN:
            return False
        self._unknown.pop((peer, transfer), None)
        return True

    def _end_by_decode(self, peer: Peer, end: End) -> None:
        waiting = self._waiting.get(end.transfer)
        if waiting is not None and waiting.peer == peer and waiting.ask.attempt <= end.attempt:
            self._take_waiting(end.transfer)
        plan_id = self._by_transfer.get(end.transfer)
        if plan_id is None:
            if end.transfer not in self._over:
                self._remember(end.transfer, end.attempt)
            return
        send = self._sends[plan_id]
        answers = send.answers
        if answers is not None and (answers.peer != peer or answers.attempt > end.attempt):
            return
        reasons = {
            EndReason.DONE: (SendEnd.DONE, None),
            EndReason.NOT_WANTED: (SendEnd.NOT_WANTED, "not wanted by decode"),
        }
        self._end(send, *reasons.get(EndReason(end.reason), (SendEnd.FAILED, "blocks did not arrive whole")))

    def _remember(self, transfer: str, attempt: int) -> None:
        self._ended[transfer] = max(attempt, self._ended.get(transfer, -1))
        self._ended.move_to_end(transfer)
        if len(self._ended) > _MOST_REMEMBERED:
            self._ended.popitem(last=False)

    def _remember_over(self, transfer: str, reason: str) -> None:
        self._over[transfer] = reason
        self._over.move_to_end(transfer)
        if len(self._over) > _MOST_REMEMBERED:
            self._over.popitem(last=False)

    def _fail(self, send: _Send, end: SendEnd, reason: str) -> None:
        if (answers := send.answers) is not None:
            failed = Failed(send.offer.transfer, answers.attempt, reason)
            self._effects.append(SendMessage(answers.peer, failed))
        self._end(send, end, reason)

    def _end(self, send: _Send, end: SendEnd, error: str | None) -> None:
        self._sends.end(send.offer.plan_id)
        del self._by_transfer[send.offer.transfer]
        self._remember_over(send.offer.transfer, error or "the transfer has ended")
        peer, blocks = None, 0
        places: tuple[tuple[int, ...], ...] = ()
        if (answers := send.answers) is not None:
            peer, blocks = answers.peer, answers.last - answers.first
            places = tuple(answers.take_places(len(answers.log)))
        self._effects.append(OfferEnded(send.offer.plan_id, end, error, places, peer, blocks))
