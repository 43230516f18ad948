"""The prefill side of a rank for the decode ranks that read from it, one state machine for each."""

from __future__ import annotations

from fdcache.metadata import UInt64Array
from fdcache.transfer.messages import FromDecode
from fdcache.transfer.prefill import (
    Effect,
    Offer,
    OfferEnded,
    Part,
    Peer,
    PlacesRead,
    PrefillSide,
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
        if (index := self._of.get(peer)) is not None:
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
