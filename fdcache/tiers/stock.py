"""Session: one registration at a service, and what this process copies there."""

from __future__ import annotations

from dataclasses import dataclass, field

from fdcache._core import OutgoingCopies

FIRST_STOCK = 64
MOST_STOCK = 8192
_STEPS = 4  # the stock is for so many reservations as large as the largest so far


@dataclass(eq=False, slots=True)
class Session:
    """One registration, from its answer until the service is lost.

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

    def expect(self, count: int) -> None:
        """So many slots were wanted at once: keep enough for the next times."""
        self.wanted = min(max(self.wanted, _STEPS * count), MOST_STOCK)
