"""What an order of eviction has learned of reuse: by class and age for tools, and in a file for the next process."""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from fdcache import _core
from fdcache._core import ReuseTables
from fdcache.metadata import CacheLevel

Amounts = list[Annotated[float, msgspec.Meta(ge=0, le=1e300)]]

ROLES = (
    "end of a path, new",
    "end of a path, used before",
    "new, of a fresh prompt",
    "new, of a continuation",
    "used once before",
    "used twice before",
    "used 3 times before",
    "used 4 to 7 times before",
    "used 8 times or more",
)
OUTPUTS = ("up to 4", "up to 32", "up to 128", "up to 512", "more")
NEWS = ("up to 512", "up to 2,048", "up to 8,192", "up to 32,768", "more")
HINTS = (
    "not needed again",
    *(f"needed within {seconds} s" for seconds in ("6", "37", "220", "1,400", "8,200", "50,000")),
    *(f"priority {numbers}" for numbers in ("1 to 34", "35 to 68", "69 to 100")),
)
GROUPS = {
    "all": ("blocks",),
    "role": ROLES,
    "output tokens": OUTPUTS,
    "unknown prompt tokens": NEWS,
    "hint": HINTS,
    "path": ("left behind",),
}
"""Classes by what they differ in. Blocks with a hint, or left behind by their path, are in no other but ``all``."""

_SUMMED = {"role": (1, 2), "output tokens": (0, 2), "unknown prompt tokens": (0, 1)}

_DIGITS = 4
_LEARN_SECONDS = 16.0


class ReuseClass(msgspec.Struct, frozen=True):
    """Blocks of one class. For each age: how many were used again at it, and the seconds that blocks spent at it.

    Counts fade with a half-life of one hour. ``group`` is a key of ``GROUPS``, ``name`` one of its classes.
    """

    group: str
    name: str
    reused: Amounts
    seconds: Amounts

    def rates(self) -> list[float | None]:
        """Return the reuses per second of a block at each age; None where no block has been."""
        return [
            uses / spent if spent else None for uses, spent in zip(self.reused, self.seconds, strict=True)
        ]


class ReuseReport(msgspec.Struct, frozen=True):
    """Reuse in one tier. ``ages``: seconds at which the ages begin, and at which the last one ends."""

    ages: Amounts
    classes: list[ReuseClass]

    def __post_init__(self) -> None:
        lengths = {len(each) for found in self.classes for each in (found.reused, found.seconds)}
        if sorted(set(self.ages)) != self.ages or lengths - {len(self.ages) - 1}:
            raise ValueError("ages must ascend, and each class have a number for each")

    @classmethod
    def of(cls, tables: ReuseTables) -> ReuseReport:
        """Return the report of a native order; classes that no block has been in are left out."""
        reused, seconds = _by_group(tables, tables.reused), _by_group(tables, tables.at_risk)
        classes = [
            ReuseClass(group, name, _rounded(uses), _rounded(spent))
            for group, names in GROUPS.items()
            for name, uses, spent in zip(names, reused[group], seconds[group], strict=True)
            if spent.any()
        ]
        return cls(tables.begins.tolist(), classes)

    def of_group(self, group: str) -> list[ReuseClass]:
        """Return the classes of one group."""
        return [each for each in self.classes if each.group == group]

    def bands(self, width: int) -> list[tuple[float, float, slice]]:
        """Return begin, end and ages of each ``width`` ages in a row."""
        last = len(self.ages) - 1
        return [
            (self.ages[first], self.ages[min(first + width, last)], slice(first, first + width))
            for first in range(0, last, width)
        ]


def chance(found: ReuseClass, band: tuple[float, float, slice]) -> float | None:
    """Return the share of the blocks reaching the band that are used again within it; None if none was there."""
    begin, end, ages = band
    spent = sum(found.seconds[ages])
    return float(-np.expm1(-sum(found.reused[ages]) / spent * (end - begin))) if spent else None


Reports = dict[CacheLevel, ReuseReport]


class RecentReuse:
    """The reports of an engine's tiers. Once something was learned they are made anew every 16 s, as the tables are."""

    def __init__(self, read: Callable[[], Reports], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._reports: Reports = {}
        self._read_again = 0.0

    def recent(self) -> Reports:
        """Return the reports, by tier."""
        now = self._clock()
        if now >= self._read_again:
            self._reports = self._read()
            if any(report.classes for report in self._reports.values()):
                self._read_again = now + _LEARN_SECONDS
        return self._reports


def _by_group(tables: ReuseTables, table: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return the rows of a table summed for each class of each group."""
    left = tables.LEFT * tables.AGES
    told = left - tables.HINTS * tables.AGES
    known = table[:told].reshape(tables.ROLES, tables.OUTPUTS, tables.NEWS, tables.AGES)
    groups = {group: known.sum(axis=axes) for group, axes in _SUMMED.items()}
    groups["all"] = table.reshape(-1, tables.AGES).sum(axis=0, keepdims=True)
    groups["path"] = table[left:].reshape(1, tables.AGES)
    groups["hint"] = table[told:left].reshape(len(HINTS), -1, tables.AGES).sum(axis=1)
    return groups


def _rounded(row: NDArray[np.float64]) -> list[float]:
    return [float(f"{number:.{_DIGITS}g}") for number in row.tolist()]


log = logging.getLogger(__name__)

_MAGIC = b"fdcache-reuse\0\0\0"
_VERSION = 1
_HEADER = struct.Struct("<16sI4xQ32s")  # magic, version, bytes that follow and their SHA-256
_SAVE_SECONDS = 16.0
"""Between two files: the order computes its tables as often."""


class LearnedFile:
    """The file of one tier.

    ``save_if_due`` writes it from time to time, so that a process that is killed leaves it, too. A file that is
    damaged, or of another version, is ignored: the tables then start empty.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self.due = clock() + _SAVE_SECONDS
        self._is_writable = True

    def save_if_due(self, tier: _core.Tier) -> None:
        """Write what the tier has learned, if that was not done for 16 s."""
        if self._clock() >= self.due:
            self.due = self._clock() + _SAVE_SECONDS
            self.save(tier)

    def save(self, tier: _core.Tier) -> None:
        """Write what the tier has learned; nothing for a policy that does not learn. A full disk is logged once."""
        saved = tier.save_reuse()
        if not saved:
            return
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.write_bytes(
                _HEADER.pack(_MAGIC, _VERSION, len(saved), hashlib.sha256(saved).digest()) + saved
            )
            fresh.rename(self.path)
        except OSError as error:
            if self._is_writable:
                log.warning("%s: what eviction has learned is not kept: %s", self.path, error)
            self._is_writable = False
        else:
            self._is_writable = True

    def load(self, tier: _core.Tier) -> bool:
        """Restore the tier's tables from the file. Return True if it did; a policy that does not learn needs none."""
        if not tier.save_reuse():
            return False
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = str(error)
        else:
            problem = self._problem(tier, data)
        if problem:
            log.warning("%s: eviction learns anew: %s", self.path, problem)
        return not problem

    @staticmethod
    def _problem(tier: _core.Tier, data: bytes) -> str:
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            return "it is not a file of learned tables"
        _, version, size, digest = _HEADER.unpack_from(data)
        if version != _VERSION:
            return f"it has version {version}, not {_VERSION}"
        saved = data[_HEADER.size :]
        if len(saved) != size or hashlib.sha256(saved).digest() != digest:
            return "it is damaged"
        return "" if tier.load_reuse(saved) else "its tables are of another version"

    def remove(self) -> None:
        """Remove the file, if it is there."""
        self.path.unlink(missing_ok=True)
