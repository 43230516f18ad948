"""A layout written down: the encoding that its fingerprint is taken of, and its JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from fdcache.errors import LayoutError
from fdcache.groups import CacheGroup, Reach
from fdcache.layout_planes import Plane, PlaneKind

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fdcache.layout import KVLayout

_FINGERPRINT_TAG = b"fdcache.layout.1"

_Record = TypeVar("_Record", bound="DataclassInstance")


def canonical(layout: KVLayout) -> Iterator[bytes]:
    """Yield the encoding that the fingerprint is taken of."""

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little")

    def text(value: str) -> bytes:
        data = value.encode()
        return number(len(data)) + data

    yield _FINGERPRINT_TAG
    yield text(layout.model) + text(layout.revision)
    yield number(layout.block_size) + number(layout.num_layers) + number(layout.num_draft_layers)
    yield number(layout.tp_size) + number(len(layout.groups)) + number(layout.record_bytes)
    yield number(len(layout.planes))
    for plane in layout.planes:
        yield number(plane.layer) + text(plane.kind.value) + text(plane.dtype)
        yield number(len(plane.shape)) + b"".join(map(number, plane.shape))
        yield number(plane.nbytes) + number(plane.offset)
    yield b"".join(number(each.tokens if each.reach is Reach.LAST else 0) for each in layout.groups)
    if any(
        each.block_size != layout.block_size or each.reach not in (Reach.ALL, Reach.LAST)
        for each in layout.groups
    ):
        for each in layout.groups:
            yield text(each.reach.value) + number(each.block_size) + number(each.tokens)


def groups_from_json(data: dict[str, Any]) -> Any:
    """Return the groups, and remove their number. Raises ``LayoutError`` if that is missing or another one."""
    if "group" not in data:
        raise LayoutError("layout: missing group")
    number, groups = data.pop("group"), data.get("groups", [])
    if not isinstance(groups, list) or number != len(groups):
        raise LayoutError(f"layout: group must be the number of groups, got {number!r} for {groups!r}")
    return tuple(_group_from_json(group, f"groups[{i}]") for i, group in enumerate(groups))


def _group_from_json(data: Any, where: str) -> CacheGroup:
    if isinstance(data, dict) and data.get("reach") in [reach.value for reach in Reach]:
        data["reach"] = Reach(data["reach"])
    return from_fields(CacheGroup, data, where)


def plane_from_json(data: Any, where: str) -> Plane:
    """Read a plane from a JSON object. Raises ``LayoutError`` with ``where`` it is in the document."""
    if isinstance(data, dict):
        if data.get("kind") in [kind.value for kind in PlaneKind]:
            data["kind"] = PlaneKind(data["kind"])
        if isinstance(data.get("shape"), list):
            data["shape"] = tuple(data["shape"])
    return from_fields(Plane, data, where)


def from_fields(record: type[_Record], data: Any, where: str) -> _Record:
    """Return a record made from exactly its fields. Raises ``LayoutError`` for unknown or missing ones."""
    if not isinstance(data, dict):
        raise LayoutError(f"{where}: must be an object with the fields of {record.__name__}")
    names = {field.name for field in fields(record)}
    if missing := sorted(names - data.keys()):
        raise LayoutError(f"{where}: missing {', '.join(missing)}")
    if unknown := sorted(data.keys() - names):
        raise LayoutError(f"{where}: unknown {', '.join(unknown)}")
    return record(**data)
