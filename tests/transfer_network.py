"""A prefill and a decode state machine joined by a network that loses, repeats, delays and reorders messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fdcache.transfer import decode, prefill
from fdcache.transfer.decode import BeginRead, ComputeTargetSums, DecodeSide, FetchEnd, FetchEnded, PeerFetch
from fdcache.transfer.messages import AskForBlocks, End, Renew
from fdcache.transfer.prefill import (
    ComputeSums,
    Offer,
    OfferEnded,
    Part,
    PlacesRead,
    PrefillSide,
    PublishPart,
    SendEnd,
    SendMessage,
)

PREFILL, DECODE = b"p" * 16, b"d" * 16
PLANES = 3
BLOCKS = 4
LEASE, RENEW, TIMEOUT = 5.0, 1.0, 20.0
FREE = "free"


def hashes_of(transfer: int) -> np.ndarray:
    return np.random.default_rng(transfer).integers(0, 256, (BLOCKS, 32), np.uint8)


def content_of(transfer: int, block: int) -> int:
    return int(hashes_of(transfer)[block, :6].view(np.uint16)[0]) * 1000 + transfer * 10 + block


@dataclass
class Network:
    """The world: memory on both sides, messages in flight, reads in flight, offers and fetches."""

    seed: int
    verifies: bool = True
    loses: float = 0.15
    repeats: float = 0.15
    now: float = 0.0
    wrong_blocks: int = 0
    whole_blocks: int = 0
    ends: list[FetchEnd] = field(default_factory=list)
    send_ends: list[SendEnd] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.decode = DecodeSide(PLANES, lease=LEASE, renew=RENEW, verifies=self.verifies)
        self.prefill = PrefillSide()
        self.to_prefill: list[object] = []
        self.to_decode: list[object] = []
        self.reads: list[BeginRead] = []
        self.sums: list[ComputeTargetSums] = []
        self.publishing: list[PublishPart] = []
        self.source: dict[int, list[int]] = {}
        self.target: dict[int, list[int]] = {}
        self.target_of: dict[int, int | str] = {}  # slot to plan
        self.offers: dict[int, tuple[int, list[int], list[Part]]] = {}
        self.fetches: dict[int, tuple[int, int, list[int]]] = {}
        self.next_plan = self.next_slot = self.next_transfer = 1

    # --- actions ------------------------------------------------------------------------------------------

    def offer(self, transfer: int) -> None:
        slots = self._slots()
        plan, self.next_plan = self.next_plan, self.next_plan + 1
        for slot in slots:
            self.source[slot] = [0] * PLANES
        parts = [Part(a, a + 2, p, p + 1) for p in range(PLANES) for a in (0, 2)]
        self.offers[plan] = (transfer, slots, parts)
        array = np.array(slots, np.int32)
        self.prefill.offer(Offer(plan, str(transfer), hashes_of(transfer), array, PLANES, LEASE), self.now)
        self.settle()

    def fetch(self, transfer: int, attempt: int = 1, first: int = 0, last: int = BLOCKS) -> None:
        slots = self._slots()[first:last]
        plan, self.next_plan = self.next_plan, self.next_plan + 1
        for slot in slots:
            self.target[slot], self.target_of[slot] = [-1] * PLANES, plan
        self.fetches[plan] = (transfer, first, slots)
        hashes = hashes_of(transfer)[first:last]
        array = np.array(slots, np.int32)
        self.decode.fetch(
            PeerFetch(plan, PREFILL, str(transfer), attempt, first, hashes, array, TIMEOUT), self.now
        )
        self.settle()

    def compute(self) -> None:
        """Compute the next part of some offer; a chunk of blocks, a group of planes."""
        open_ = [plan for plan, (_, _, parts) in self.offers.items() if parts]
        if not open_:
            return
        plan = self.random.choice(open_)
        transfer, slots, parts = self.offers[plan]
        part = parts.pop(0)
        for block in range(part.first, part.last):
            for plane in range(part.first_plane, part.last_plane):
                self.source[slots[block]][plane] = content_of(transfer, block) + plane
        self.prefill.computed(plan, part)
        self.settle()

    def publish(self) -> None:
        """Publish a part, or the first block of it."""
        if not self.publishing:
            return
        wanted = self.publishing.pop(self.random.randrange(len(self.publishing)))
        part = wanted.part
        head = part._replace(last=self.random.choice((part.last, part.first + 1)))
        if head.last < part.last:
            self.publishing.append(wanted._replace(part=part._replace(first=head.last)))
        if wanted.plan_id in self.offers:
            slots = tuple(self.offers[wanted.plan_id][1][head.first : head.last])
            self.prefill.published(wanted.plan_id, wanted.peer, wanted.attempt, head, slots)
        self.settle()

    def deliver(self) -> None:
        """Deliver, lose or repeat any message in flight."""
        ways = [way for way in (self.to_prefill, self.to_decode) if way]
        if not ways:
            return
        way = self.random.choice(ways)
        index = self.random.randrange(len(way))
        luck = self.random.random()
        if luck < self.loses:
            way.pop(index)
            return
        message = way[index] if luck < self.loses + self.repeats else way.pop(index)
        if way is self.to_prefill:
            self.prefill.receive(DECODE, message, self.now)  # type: ignore[arg-type]
        else:
            self.decode.receive(PREFILL, message, self.now)  # type: ignore[arg-type]
        self.settle()

    def end_read(self, *, error: str | None = None) -> None:
        """Copy what a read names now, and end it."""
        if not self.reads:
            return
        read = self.reads.pop(self.random.randrange(len(self.reads)))
        if error is None:
            sources = read.ready.places[read.skip : read.skip + read.take]
            for source, target in zip(sources, read.slots.tolist(), strict=True):
                assert self.target_of[target] in self.fetches, "a read writes into a slot that is free"
                for plane in range(read.ready.first_plane, read.ready.last_plane):
                    self.target[target][plane] = self.source.get(source, [99] * PLANES)[plane]
        self.decode.read_ended(read.read_id, error)
        self.settle()

    def end_sums(self) -> None:
        if self.sums:
            asked = self.sums.pop(0)
            sums = [sum(self.target[slot][asked.planes]) for slot in asked.slots.tolist()]
            self.decode.sums(asked.plan_id, asked.blocks, np.array(sums, np.int64).astype(np.uint64))
            self.settle()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.prefill.tick(self.now)
        self.decode.tick(self.now)
        self.settle()

    def stop_decode(self) -> None:
        """Decode is stopped until its leases are over. Its reads end before it looks at its messages."""
        self.now += 1.2 * LEASE
        self.prefill.tick(self.now)
        self.settle()
        while self.reads or self.sums:
            self.end_read()
            self.end_sums()

    def cancel_fetch(self) -> None:
        if self.fetches:
            self.decode.cancel(self.random.choice(list(self.fetches)))
            self.settle()

    def cancel_offer(self) -> None:
        if self.offers:
            self.prefill.cancel(self.random.choice(list(self.offers)), "aborted")
            self.settle()

    def lose_prefill(self) -> None:
        """The prefill process is gone, with its memory and the messages to it."""
        self.prefill = PrefillSide()
        self.to_prefill.clear()
        self.offers.clear()
        self.publishing.clear()
        self.source.clear()
        self.decode.peer_gone(PREFILL, "killed")
        while self.reads:
            self.end_read(error="the peer is gone")
        self.settle()

    # --- effects ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carry out what the machines ask for."""
        while effects := [*self.prefill.take_effects(), *self.decode.take_effects()]:
            for effect in effects:
                self._carry_out(effect)

    def _carry_out(self, effect: prefill.Effect | decode.Effect) -> None:
        match effect:
            case SendMessage():
                self.to_decode.append(effect.message)
            case ComputeSums():
                planes = slice(effect.part.first_plane, effect.part.last_plane)
                sums = [sum(self.source[slot][planes]) for slot in effect.slots.tolist()]
                self.prefill.sums(effect.plan_id, effect.part, np.array(sums, np.int64).astype(np.uint64))
            case OfferEnded():
                self.send_ends.append(effect.end)
                self.publishing = [each for each in self.publishing if each.plan_id != effect.plan_id]
                _, slots, _ = self.offers.pop(effect.plan_id)
                for slot in slots:  # used again at once
                    self.source[slot] = [self.random.randrange(10**6) for _ in range(PLANES)]
            case PlacesRead():
                pass
            case PublishPart():
                self.publishing.append(effect)
                if self.random.random() < 0.8:
                    self.publish()
            case BeginRead():
                self.reads.append(effect)
            case ComputeTargetSums():
                self.sums.append(effect)
            case FetchEnded():
                self._end_fetch(effect)
            case _:
                assert isinstance(effect.message, AskForBlocks | Renew | End)
                self.to_prefill.append(effect.message)

    def _end_fetch(self, effect: FetchEnded) -> None:
        assert not any(
            self.target_of[slot] == effect.plan_id for read in self.reads for slot in read.slots.tolist()
        ), "a fetch was reported while a read was in flight"
        transfer, first, slots = self.fetches.pop(effect.plan_id)
        self.ends.append(effect.end)
        for block, slot in enumerate(slots):
            if block < effect.whole:
                expected = [content_of(transfer, first + block) + plane for plane in range(PLANES)]
                self.whole_blocks += 1
                self.wrong_blocks += self.target[slot] != expected
            self.target_of[slot] = FREE
        assert (effect.whole == len(slots)) == (effect.end is FetchEnd.DONE)

    def _slots(self) -> list[int]:
        slots = list(range(self.next_slot, self.next_slot + BLOCKS))
        self.next_slot += BLOCKS
        return slots

    # --- a life -------------------------------------------------------------------------------------------

    def run(self, steps: int = 300, *, kills: bool = True) -> None:
        """Do random things, then let everything end on a network that works."""
        for _ in range(steps):
            self.step(kills=kills)
        self.loses = self.repeats = 0.0
        for _ in range(200):
            while self.to_prefill or self.to_decode or self.reads or self.sums or self.publishing:
                self.random.choice((self.deliver, self.end_read, self.end_sums, self.publish))()
            self.compute()
            self.tick(0.5)

    def step(self, *, kills: bool) -> None:
        choice = self.random.random()
        if choice < 0.03:
            transfer, self.next_transfer = self.next_transfer, self.next_transfer + 1
            first = self.random.randrange(BLOCKS)
            last = self.random.randint(first + 1, BLOCKS)
            both = [partial(self.offer, transfer), partial(self.fetch, transfer, first=first, last=last)]
            self.random.shuffle(both)
            for each in both[: 1 if self.random.random() < 0.1 else 2]:
                each()
        elif choice < 0.034:
            self.cancel_fetch()
        elif choice < 0.038:
            self.cancel_offer()
        elif choice < 0.04 and kills:
            self.lose_prefill()
        elif choice < 0.043:
            self.end_read(error="refused")
        elif choice < 0.06:
            self.stop_decode()
        elif choice < 0.27:
            self.random.choices((self.compute, self.publish), (10, 1))[0]()
        elif choice < 0.295:
            self.tick(self.random.choice((0.1, 0.3, 1.0)))
        elif choice < 0.39:
            self.end_read()
        elif choice < 0.43:
            self.end_sums()
        else:
            self.deliver()
