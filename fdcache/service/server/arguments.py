"""Checks of the arguments of a view or command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fdcache.metadata import HashArray
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service

MAX_HASHES = 131072
Arguments = Mapping[str, Any]


class ArgumentError(ValueError):
    """An argument that is missing, of the wrong type or out of range. ``code`` is that of the refusal."""

    code = "malformed"


class UnknownNameError(ArgumentError):
    """There is nothing of this name."""

    code = "unknown"


def number(arguments: Arguments, name: str, default: float, least: float, most: float) -> float:
    """Return a number. Raises ``ArgumentError`` naming its range."""
    value = arguments.get(name, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ArgumentError(f"{name}: {value!r} is not a number from {least:g} to {most:g}")
    return value


def whole(arguments: Arguments, name: str, default: int, least: int, most: int) -> int:
    """Return a whole number. Raises ``ArgumentError`` naming its range."""
    value = number(arguments, name, default, least, most)
    if not isinstance(value, int):
        raise ArgumentError(f"{name}: {value!r} is not a whole number")
    return value


def choice(arguments: Arguments, name: str, among: Sequence[str], default: str) -> str:
    """Return one of several words. Raises ``ArgumentError`` naming them."""
    value = arguments.get(name)
    if value is None:
        return default
    if value not in among:
        raise ArgumentError(f"{name}: {value!r} is not one of {', '.join(among)}")
    return str(value)


def check_path(texts: Any) -> list[str]:
    """Return the hashes of a path, not decoded yet. Raises ``ArgumentError`` for what is no list of this length."""
    if not isinstance(texts, list) or len(texts) > MAX_HASHES:
        raise ArgumentError(f"hashes: give a list of up to {MAX_HASHES} hashes in hexadecimal")
    return texts


def hashes_of_path(texts: list[str]) -> HashArray:
    """Return the hashes of a path, given in hexadecimal. Raises ``ArgumentError``."""
    try:
        data = b"".join(bytes.fromhex(text) for text in texts)
    except ValueError as error:
        raise ArgumentError(f"hashes: {error}") from error
    if len(data) != 32 * len(texts):
        raise ArgumentError("hashes: each has 64 hexadecimal digits")
    return np.frombuffer(data, np.uint8).reshape(-1, 32)


def select_namespaces(service: Service, arguments: Arguments, *, required: bool = True) -> list[Namespace]:
    """Return the namespaces whose names begin with ``namespace``, or all without it.

    Raises ``UnknownNameError`` if none does and one is ``required``.
    """
    wanted = arguments.get("namespace")
    if wanted is None:
        return list(service.namespaces.values())
    fitting = [each for each in service.namespaces.values() if each.id.startswith(str(wanted).lower())]
    if not fitting and required:
        raise UnknownNameError(f"namespace: no name begins with {wanted!r}; see `fdcache inspect namespaces`")
    return fitting


def select_namespace(service: Service, arguments: Arguments) -> Namespace:
    """Return the only namespace that fits. Raises ``ArgumentError`` if none or several do."""
    chosen = select_namespaces(service, arguments)
    if len(chosen) != 1:
        kind = ArgumentError if chosen else UnknownNameError
        raise kind(f"namespace: {len(chosen)} fit; give one name of `fdcache inspect namespaces`")
    return chosen[0]
