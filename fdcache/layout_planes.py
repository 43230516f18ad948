"""The planes of a KV cache block: one tensor per layer and kind on the device, a part of the record elsewhere.

Planes and groups of layers are read from JSON here, field by field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fdcache.errors import LayoutError
from fdcache.groups import CacheGroup, Reach

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")

PLANE_ALIGNMENT = 128
"""Every plane of a record starts at a multiple of this many bytes."""

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element, by dtype name."""


class PlaneKind(StrEnum):
    """Content of a plane. Members are in the order of planes within a layer."""

    KEY = "key"
    VALUE = "value"
    KEY_SCALE = "key_scale"
    VALUE_SCALE = "value_scale"
    INDEXER = "indexer"
    PAIR = "pair"
    """Keys and values of each head side by side, in one plane."""


class PlaneSpec(NamedTuple):
    """A plane without layer and offset. ``shape`` is that of one block."""

    kind: PlaneKind
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the plane in one block."""
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"{self.kind.value}: dtype {self.dtype!r} is unknown; use one of {_dtypes()}")
        for position, size in enumerate(self.shape):
            require_int(f"{self.kind.value}: shape[{position}]", size, least=1)
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer x kind of a block: ``nbytes`` bytes at ``offset`` of the record.

    On the device a plane is one tensor, in which block ``b`` starts at byte ``b * device_stride``.

    Raises:
        LayoutError: a field is out of range.
    """

    layer: int
    kind: PlaneKind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    device_stride: int

    def __post_init__(self) -> None:
        require_int("layer", self.layer, least=0)
        if not isinstance(self.kind, PlaneKind):
            raise LayoutError(f"kind must be a PlaneKind, got {self.kind!r}")
        if not isinstance(self.shape, tuple) or not self.shape:
            raise LayoutError(f"shape must be a tuple with at least one dimension, got {self.shape!r}")
        needed = PlaneSpec(self.kind, self.dtype, self.shape).nbytes
        where = f"plane {self.kind.value} of layer {self.layer}"
        if require_int("nbytes", self.nbytes, least=1) != needed:
            raise LayoutError(f"{where}: nbytes is {self.nbytes}, but shape and dtype make {needed}")
        if require_int("offset", self.offset, least=0) % PLANE_ALIGNMENT:
            raise LayoutError(f"{where}: offset {self.offset} must be a multiple of {PLANE_ALIGNMENT}")
        if require_int("device_stride", self.device_stride, least=1) < self.nbytes:
            raise LayoutError(
                f"{where}: device_stride {self.device_stride} is less than the plane's {self.nbytes} bytes"
            )


def _dtypes() -> str:
    return ", ".join(DTYPE_BYTES)


def require_int(name: str, value: object, *, least: int) -> int:
    """Return the value. Raises ``LayoutError`` unless it is an int of at least ``least`` and below 2**63."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayoutError(f"{name} must be an int, got {value!r}")
    if not least <= value < 2**63:
        raise LayoutError(f"{name} must be at least {least} and below 2**63, got {value}")
    return value


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
    if isinstance(data, dict):
        data.setdefault("rank", None)
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
