"""The arguments of a tool's question, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fdcache.metadata import HashArray

MOST_BLOCKS = 131072
Arguments = Mapping[str, Any]


class ArgumentError(ValueError):
    """An argument of a question that is not what it must be."""


def number(arguments: Arguments, name: str, default: float, least: float, most: float) -> float:
    """A number within its range. Raises ``ArgumentError`` naming it."""
    value = arguments.get(name, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ArgumentError(f"{name}: {value!r} is not a number from {least:g} to {most:g}")
    return value


def choice(arguments: Arguments, name: str, among: Sequence[str], default: str) -> str:
    """One of some words. Raises ``ArgumentError`` naming them."""
    value = arguments.get(name)
    if value is None:
        return default
    if value not in among:
        raise ArgumentError(f"{name}: {value!r} is not one of {', '.join(among)}")
    return str(value)


def path(arguments: Arguments) -> HashArray:
    """The hashes of a path, given in hexadecimal. Raises ``ArgumentError``."""
    texts = arguments.get("hashes")
    if not isinstance(texts, list) or len(texts) > MOST_BLOCKS:
        raise ArgumentError(f"hashes: give a list of up to {MOST_BLOCKS} hashes in hexadecimal")
    try:
        data = b"".join(bytes.fromhex(text) for text in texts)
    except ValueError as error:
        raise ArgumentError(f"hashes: {error}") from error
    if len(data) != 32 * len(texts):
        raise ArgumentError("hashes: each has 64 hexadecimal digits")
    return np.frombuffer(data, np.uint8).reshape(-1, 32)
