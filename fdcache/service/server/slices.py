"""Answers of views in slices: JSON made a part at a time, with the requests of engines between two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def in_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of up to ``size`` items, each made when it is asked for."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def json_list(batches: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """Yield a JSON list, a part for each batch."""
    lead = b"["
    for batch in batches:
        if items := msgspec.json.encode(batch)[1:-1]:
            yield lead + items
            lead = b","
    yield b"]" if lead == b"," else b"[]"


def json_object(**fields: Any) -> Iterator[bytes]:
    """Yield a JSON object. A field may be an iterator of a list's batches, or a function that is called in its turn."""
    lead = b"{"
    for name, value in fields.items():
        yield lead + msgspec.json.encode(name) + b":"
        if isinstance(value, Iterator):
            yield from json_list(value)
        else:
            yield msgspec.json.encode(value() if isinstance(value, Callable) else value)  # type: ignore[arg-type]
        lead = b","
    yield b"}"
