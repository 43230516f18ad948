"""What a tier answers for each block, and what it tells of itself: a byte of an array each."""

ABSENT, READY, PENDING = range(3)
"""Of ``contains``."""

RESERVED, IS_READY, IS_PENDING, NO_PARENT = range(4)
"""Of ``reserve_copies``: a slot was taken, or why none was."""

STORED, DUPLICATE = range(2)
"""Of ``commit``."""

EVENT_STORED, EVENT_REMOVED, EVENT_CLEARED, EVENT_LOST = range(4)
"""Of ``take_events``. From ``EVENT_CLEARED`` on they are of the tier as a whole."""
