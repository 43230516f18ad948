"""Session: one registration at a service, and the slots it has in stock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_STOCK = 64
MOST_STOCK = 8192


@dataclass(eq=False, slots=True)
class Session:
    """One registration, from its answer until the service is lost; ``stock`` holds (slot, generation).

    ``storage``: whether the service has a storage tier below its host tier.
    """

    number: int
    arena: str
    num_slots: int
    storage: bool = False
    recovered: bool = True
    stock: deque[tuple[int, int]] = field(default_factory=deque)
    wanted: int = FIRST_STOCK
    asked: int = 0
    figures: list[int] = field(default_factory=list)
