"""Capacities of a sweep, and how they are written: ``device-blocks=1000..20000/6``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fdcache.errors import ReplayOptionError
from fdcache.settings.kinds import parse_integer, parse_number, parse_size, readable_size

MOST_VALUES = 1000
"""Maximum number of capacities in a sweep."""

_RANGE_HELP = "write A..B/N for N values from A to B, or A..B/xF for A, A*F, A*F*F and so on up to B"


class Axis(StrEnum):
    """Tiers whose capacity a sweep varies, by the option that sets it."""

    DEVICE_BLOCKS = "device-blocks"
    HOST_MEMORY = "host-memory"

    @property
    def option(self) -> str:
        """The option of a single replay."""
        return f"--{self.value}"

    @property
    def setting(self) -> str:
        """The field of ``CacheSettings``."""
        return self.value.replace("-", "_")

    @property
    def least(self) -> int:
        """The smallest capacity; there may be no host tier."""
        return 1 if self is Axis.DEVICE_BLOCKS else 0

    def parse(self, text: str) -> int:
        """Parse one capacity. Raises ``ValueError``."""
        return parse_integer(text) if self is Axis.DEVICE_BLOCKS else parse_size(text)

    def describe(self, value: int) -> str:
        """Write one capacity in words."""
        if self is Axis.DEVICE_BLOCKS:
            return f"{value:,} device blocks"
        return f"{readable_size(value)} of host memory"


@dataclass(frozen=True, slots=True)
class Capacities:
    """The capacities of a sweep, ascending: numbers of device blocks, or bytes of host memory."""

    axis: Axis
    values: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Capacities:
        """Parse ``AXIS=VALUE,...``; instead of a value, ``A..B/N`` is N values from A to B and ``A..B/xF`` A times F
        and so on up to B.

            Capacities.parse("device-blocks=500,1000..20000/6")
            Capacities.parse("host-memory=0,1GiB..64GiB/x2")

        Raises ``ReplayOptionError`` naming what is wrong.
        """
        name, _, listed = text.partition("=")
        if name not in set(Axis):
            known = " or ".join(f"{axis}=VALUES" for axis in Axis)
            raise _error(f"{name!r} cannot be varied; write {known}")
        axis = Axis(name)
        values = {value for item in listed.split(",") for value in _values(axis, item.strip())}
        if len(values) > MOST_VALUES:
            raise _error(f"{len(values)} capacities are more than {MOST_VALUES}; give fewer")
        return cls(axis, tuple(sorted(values)))


def _values(axis: Axis, item: str) -> list[int]:
    first, is_range, rest = item.partition("..")
    if not is_range:
        return [_value(axis, item)]
    last, _, step = rest.partition("/")
    low, high = _value(axis, first), _value(axis, last)
    if low > high:
        raise _error(f"{item!r} descends; write the smaller end first")
    if step.startswith("x"):
        return _multiples(item, low, high, step[1:])
    try:
        count = parse_integer(step)
    except ValueError:
        raise _error(f"{item!r} is not a range; {_RANGE_HELP}") from None
    if not 2 <= count <= MOST_VALUES:
        raise _error(f"{item!r}: {count} is not between 2 and {MOST_VALUES} values; {_RANGE_HELP}")
    return [low + round(index * (high - low) / (count - 1)) for index in range(count)]


def _multiples(item: str, low: int, high: int, step: str) -> list[int]:
    try:
        factor = parse_number(step)
    except ValueError:
        raise _error(f"{item!r}: {step!r} is not a factor; {_RANGE_HELP}") from None
    if factor <= 1 or not low:
        raise _error(
            f"{item!r} never gets from {low} to {high}; give a factor above 1 and a first value above 0"
        )
    values: list[int] = []
    value = float(low)
    while value <= high * (1 + 1e-9) and len(values) <= MOST_VALUES:
        values.append(round(value))
        value *= factor
    return values


def _value(axis: Axis, text: str) -> int:
    try:
        value = axis.parse(text)
    except ValueError:
        wants = "a number of blocks" if axis is Axis.DEVICE_BLOCKS else "a size such as 512MiB or 4G"
        raise _error(f"{axis.value}: {text!r} is not {wants}") from None
    if value < axis.least:
        raise _error(f"{axis.value}: {value} is below {axis.least}")
    return value


def _error(reason: str) -> ReplayOptionError:
    return ReplayOptionError("--sweep", reason)
