"""Session: one registration at a service, and what this process copies there."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache._core import OutgoingCopies
from fdcache.metadata import Int32Array, UInt32Array

FIRST_STOCK = 64
MOST_STOCK = 8192
_STEPS = 4  # the stock is for so many reservations as large as the largest so far


@dataclass(eq=False, slots=True)
class Session:
    """One registration, from its answer until the service is lost.

    ``arena`` is what plans name: the memory's incarnation, the session and this process's live file;
    ``copies`` has the stock of slots, of which ``wanted`` are to be there and ``asked`` are on their way;
    ``is_resetting``: a reset is asked for, and what is granted before it would be of no use;
    ``storage``: whether the service has a storage tier below its host tier; ``unheard``: signs of life sent since
    the service last said anything.
    """

    number: int
    arena: str
    num_slots: int
    copies: OutgoingCopies
    storage: bool = False
    recovered: bool = True
    wanted: int = FIRST_STOCK
    asked: int = 0
    is_resetting: bool = False
    figures: list[int] = field(default_factory=list)
    unheard: int = 0

    @property
    def is_short(self) -> bool:
        """Whether slots have to be asked for, and were not yet."""
        return not (self.asked or self.is_resetting) and self.copies.stock < (self.wanted + 1) // 2

    def ask(self) -> int:
        """How many slots to ask for now, which are then on their way."""
        self.asked = self.wanted - self.copies.stock
        return self.asked

    def grant(self, slots: Int32Array, generations: UInt32Array, num_slots: int) -> None:
        """They came, or as many as there are; ``num_slots`` are those of the whole tier by now."""
        self.copies.grant(slots, generations)
        self.num_slots = num_slots
        if len(slots) < self.asked:  # there is no more to give: be content until the next sign of life
            self.wanted = max(self.copies.stock, 1)
        self.asked = 0

    def beat(self) -> None:
        """A sign of life is sent; after one that was answered, what was asked for before it may be asked for again."""
        if not self.unheard:
            self.asked = 0  # granted by now, unless that found no room in a queue
        self.unheard += 1
        self.wanted = max(self.wanted, FIRST_STOCK)

    def expect(self, count: int) -> None:
        """So many slots were wanted at once: keep enough for the next times."""
        self.wanted = min(max(self.wanted, _STEPS * count), MOST_STOCK)
