"""What a tier answers for each block, a byte of an array."""

ABSENT, READY, PENDING = range(3)
"""Of ``contains``."""

RESERVED, IS_READY, IS_PENDING, NO_PARENT = range(4)
"""Of ``reserve_copies``: a slot was taken, or why none was."""

STORED, DUPLICATE = range(2)
"""Of ``commit``."""
