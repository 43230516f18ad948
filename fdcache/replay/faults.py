"""Faults of a replay as they are asked for on the command line, and when each is due."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import numpy as np

from fdcache.errors import ReplayOptionError

Kind = TypeVar("Kind", bound=StrEnum)


def is_count(text: str) -> bool:
    """Return True for a number that can be a count."""
    return text.isascii() and text.isdigit() and len(text) < 10


def parse_faults(text: str, kinds: Sequence[Kind], at_random: Sequence[Kind]) -> dict[Kind, int]:
    """Read ``200``, in equal parts of ``at_random``, or ``kill=5,flip=3``. Raises ``ReplayOptionError``."""
    if is_count(text):
        count, parts = int(text), len(at_random)
        return {kind: count // parts + (index < count % parts) for index, kind in enumerate(at_random)}
    faults = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        found = next((kind for kind in kinds if kind.value == name), None)
        if found is None or not is_count(number):
            raise ReplayOptionError(
                "--faults", f"{part!r} is none; write 200, or kinds of {', '.join(kinds)} as in {kinds[0]}=5"
            )
        faults[found] = int(number)
    return faults


def spread(faults: Mapping[Kind, int], requests: int, random: np.random.Generator) -> deque[tuple[int, Kind]]:
    """Spread faults over the admissions of ``requests`` requests: (number of admitted requests, kind) in order."""
    kinds = [kind for kind, count in faults.items() for _ in range(count * bool(requests))]
    random.shuffle(kinds)
    after = np.sort(random.integers(0, requests, len(kinds)) + 1) if kinds else ()
    return deque(zip(map(int, after), kinds, strict=True))
