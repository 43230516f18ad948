"""KVLayout: what one block is made of, on the device and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PlaneKind(str, Enum):
    """What a plane holds; the order of members is the order of planes within a layer."""

    KEY = "key"
    VALUE = "value"
    KEY_SCALE = "key_scale"
    VALUE_SCALE = "value_scale"
    INDEXER = "indexer"


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer x kind of a block: ``nbytes`` bytes at ``offset`` of the record.

    On the device a plane is a tensor whose block ``b`` starts at ``b * device_stride`` bytes.
    """

    layer: int
    kind: PlaneKind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    device_stride: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Planes of one block on one rank, main layers first, draft layers after them."""

    model: str
    revision: str
    block_size: int
    num_layers: int
    num_draft_layers: int
    planes: tuple[Plane, ...]
    record_bytes: int
    tp_size: int = 1
    draft_block_ratio: float = 1.0
    group: int = 0
