"""Annotations of the records that a service shows of itself.

Each field says once how it appears::

    hit_blocks: Annotated[int, shown("Blocks found.", counter("fdcache_hit_blocks", tier="host"), column="hits")] = 0

``fields`` reads these annotations: server/metrics.py makes Prometheus families of them, ``fdcache_cli`` tables, and the
descriptions are those of the OpenAPI schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

Record = TypeVar("Record", bound=msgspec.Struct)


class Unit(StrEnum):
    """Format of a value in tables."""

    PLAIN = "plain"
    BYTES = "bytes"
    SECONDS = "seconds"
    MOMENT = "moment"
    """Seconds since the epoch."""
    SHARE = "share"
    FLAG = "flag"
    HASH = "hash"
    """Hexadecimal, of which a table shows the beginning."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Prometheus metric of a field. ``label`` names the keys of a field that is a dictionary."""

    kind: str
    name: str
    help: str | None
    labels: Mapping[str, str]
    label: str | None


@dataclass(frozen=True, slots=True)
class Field:
    """Presentation of a field."""

    name: str
    description: str
    metric: Metric | None
    column: str | None
    unit: Unit
    inline: bool


def counter(name: str, help: str | None = None, *, label: str | None = None, **labels: str) -> Metric:  # noqa: A002
    """Return a counter; ``help`` defaults to the description of the field."""
    return Metric("counter", name, help, labels, label)


def gauge(name: str, help: str | None = None, **labels: str) -> Metric:  # noqa: A002
    """Return a gauge; ``help`` defaults to the description of the field."""
    return Metric("gauge", name, help, labels, None)


def histogram(name: str, *, label: str) -> Metric:
    """Return a histogram for a field that has one ``Histogram`` for each value of ``label``."""
    return Metric("histogram", name, None, {}, label)


def shown(
    description: str,
    metric: Metric | None = None,
    *,
    column: str | None = None,
    unit: Unit = Unit.PLAIN,
    inline: bool = False,
) -> msgspec.Meta:
    """Describe a field. ``column`` is its title in tables; the columns of an ``inline`` record are added to them."""
    return msgspec.Meta(
        description=description, extra={"metric": metric, "column": column, "unit": unit, "inline": inline}
    )


@cache
def fields(record: type[msgspec.Struct]) -> tuple[Field, ...]:
    """Return the fields of a record that were described with ``shown``, in order."""
    found = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.extra and "unit" in meta.extra:
                found.append(Field(name, meta.description or "", **meta.extra))
    return tuple(found)


def total(records: Iterable[msgspec.Struct], kind: type[Record], **others: Any) -> Record:
    """Return a ``kind`` with the sums of the fields that it shares with ``records``, and with ``others``."""
    rows = list(records)
    names = [name for name in kind.__struct_fields__ if name not in others]
    return kind(**{name: sum(getattr(each, name) or 0 for each in rows) for name in names}, **others)
