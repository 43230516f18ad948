"""The layout of a KV cache block: its planes, its record outside the device, and the fingerprint of both.

A block is one tensor per plane (layer x kind) on the device and one contiguous record everywhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Required, TypedDict, Unpack

from fdcache.errors import LayoutError, UnsupportedLayoutError
from fdcache.groups import CacheGroup, check_ranks, groups_of_rank
from fdcache.layout_encoding import encoded
from fdcache.layout_planes import (
    PLANE_ALIGNMENT,
    Plane,
    PlaneKind,
    PlaneSpec,
    from_fields,
    groups_from_json,
    plane_from_json,
    require_int,
)

RECORD_ALIGNMENT = 4096
"""A record's size is a multiple of this many bytes."""

MOST_RECORDS = 255
"""Records that a page may have, the states at its end among them."""

_KIND_ORDER = {kind: position for position, kind in enumerate(PlaneKind)}

_SCALES_OF = ((PlaneKind.KEY_SCALE, PlaneKind.KEY), (PlaneKind.VALUE_SCALE, PlaneKind.VALUE))
"""Each kind of scale and the kind that it scales."""


class LayoutOptions(TypedDict, total=False):
    """Arguments common to the constructors of ``KVLayout``; ``build`` has the defaults."""

    model: Required[str]
    revision: Required[str]
    num_layers: Required[int]
    num_draft_layers: int
    tp_size: int
    draft_block_ratio: float
    groups: tuple[CacheGroup, ...]
    replicas: int


@dataclass(frozen=True)
class KVLayout:
    """Planes of one block on one rank.

        layout = KVLayout.uniform(
            model="m", revision="1", num_layers=32, block_size=64, kv_heads=8, head_dim=128, dtype="bfloat16"
        )
        layout.record_bytes     # 8388608

    ``uniform``, ``mla`` and ``block_fp8`` build the common layouts, ``build`` any other.

    Args:
        model: name of the model. With ``revision`` it names the weights.
        revision: version of the weights.
        block_size: tokens of a block, or with ``groups`` of a page.
        num_layers: main layers.
        num_draft_layers: draft layers, numbered after the main ones.
        planes: planes ordered by layer, then kind, which is their order in the record.
        record_bytes: size of a record, a multiple of ``RECORD_ALIGNMENT``.
        tp_size: tensor-parallel ranks; all have the same layout.
        replicas: consecutive ranks of a node that hold the same bytes, which are kept once; a divisor of ``tp_size``.
            All ranks do with latent attention, as many as share a head where there are more ranks than heads.
        draft_block_ratio: blocks of a draft layer's device plane per block of a main layer's.
        groups: the groups of layers with block tables of their own; empty for one that attends to all tokens. A block
            then has the layers of one group, and ``num_layers`` are those of the largest. ``block_size`` is a multiple
            of the block sizes of all; states are kept at the ends of pages, those of each replica in its own groups.

    Raises:
        LayoutError: a field is out of range; the message names it.
        UnsupportedLayoutError: a layer without keys.
    """

    model: str
    revision: str
    block_size: int
    num_layers: int
    num_draft_layers: int
    planes: tuple[Plane, ...]
    record_bytes: int
    tp_size: int = 1
    draft_block_ratio: float = 1.0
    groups: tuple[CacheGroup, ...] = ()
    replicas: int = 1

    def __post_init__(self) -> None:
        _require_text("model", self.model)
        _require_text("revision", self.revision)
        require_int("block_size", self.block_size, least=1)
        require_int("num_layers", self.num_layers, least=1)
        require_int("num_draft_layers", self.num_draft_layers, least=0)
        require_int("record_bytes", self.record_bytes, least=1)
        require_int("tp_size", self.tp_size, least=1)
        if self.tp_size % require_int("replicas", self.replicas, least=1):
            raise LayoutError(f"replicas: {self.replicas} is no divisor of tp_size, {self.tp_size}")
        self._check_groups()
        ratio = self.draft_block_ratio
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 1 <= ratio < math.inf:
            raise LayoutError(f"draft_block_ratio must be a finite number of at least 1, got {ratio!r}")
        self._check_planes()

    def _check_groups(self) -> None:
        are_groups = isinstance(self.groups, tuple) and all(
            isinstance(each, CacheGroup) for each in self.groups
        )
        if not are_groups:
            raise LayoutError(f"groups must be a tuple of CacheGroup, got {self.groups!r}")
        for position, group in enumerate(self.groups):
            where = f"groups[{position}]"
            require_int(f"{where}.block_size", group.block_size, least=1)
            require_int(f"{where}.tokens", group.tokens, least=int(group.is_limited))
            if group.tokens and not group.is_limited:
                raise LayoutError(
                    f"{where}.tokens must be 0 for the reach {group.reach!r}, got {group.tokens}"
                )
            if self.block_size % group.block_size:
                raise LayoutError(
                    f"{where}: a page of {self.block_size} tokens must be a multiple of its blocks of "
                    f"{group.block_size} tokens"
                )
        check_ranks(self.groups, self.replicas)
        if self.groups == (CacheGroup(self.block_size),):
            raise LayoutError("groups: one group that attends to all tokens; use ()")
        records = sum(self.block_size // group.block_size for group in self.groups)
        if records > MOST_RECORDS:
            raise UnsupportedLayoutError(f"groups: {records} records of a page are more than {MOST_RECORDS}")

    def _check_planes(self) -> None:
        if not isinstance(self.planes, tuple) or not all(isinstance(plane, Plane) for plane in self.planes):
            raise LayoutError("planes must be a tuple of Plane")
        order = [(plane.layer, _KIND_ORDER[plane.kind]) for plane in self.planes]
        if order != sorted(set(order)):
            raise LayoutError("planes must be ordered by layer, then kind, each layer and kind once")
        if order and order[-1][0] >= self.total_layers:
            raise LayoutError(f"planes: layer {order[-1][0]} is not one of the {self.total_layers} layers")
        for layer in range(self.total_layers):
            kinds = {plane.kind for plane in self.layer_planes(layer)}
            if kinds.isdisjoint((PlaneKind.KEY, PlaneKind.PAIR)):
                raise UnsupportedLayoutError(
                    f"planes: layer {layer} has no key plane; hybrid caches with layers of another kind are "
                    "not supported"
                )
            for scale, scaled in _SCALES_OF:
                if scale in kinds and scaled not in kinds:
                    raise LayoutError(
                        f"planes: layer {layer} has a {scale.value} but no {scaled.value} plane"
                    )
        end = 0
        for plane in self.planes:
            if plane.offset < end:
                raise LayoutError(
                    f"planes: offset {plane.offset} of {plane.kind.value} of layer {plane.layer} overlaps "
                    f"the plane before it, which ends at {end}"
                )
            end = plane.offset + plane.nbytes
        if self.record_bytes % RECORD_ALIGNMENT or self.record_bytes < end:
            raise LayoutError(
                f"record_bytes must be a multiple of {RECORD_ALIGNMENT} and at least {end}, "
                f"got {self.record_bytes}"
            )

    def with_revision(self, revision: str) -> KVLayout:
        """Return the same layout for other weights. Raises ``LayoutError`` if the revision is the present one."""
        if revision == self.revision:
            raise LayoutError(f"revision: {revision!r} is the present one; give new weights a new revision")
        return replace(self, revision=revision)

    def of_rank(self, rank: int) -> KVLayout:
        """Return the layout of one rank by itself, for engines whose ranks each have a scheduler of their own.

        A rank then finds, loads and stores its own records, and those of ranks that hold the same bytes. Records of
        others differ, so the layouts do as well. Raises ``LayoutError`` for a rank that does not exist.
        """
        if not 0 <= rank < self.tp_size:
            raise LayoutError(f"rank {rank} is not one of the {self.tp_size} ranks")
        if self.tp_size == 1:
            return self
        groups = groups_of_rank(self.groups, rank % self.replicas)
        alike = self.replicas if groups == self.groups else 1
        alone = replace(self, tp_size=1, replicas=1, groups=groups)
        if alike == self.tp_size:
            return alone
        return replace(alone, revision=f"{self.revision} rank {rank // alike} of {self.tp_size // alike}")

    @property
    def record_ranks(self) -> int:
        """Number of records that a block has outside the device: one for each rank, or for those that hold the same."""
        return self.tp_size // self.replicas

    @property
    def block_bytes(self) -> int:
        """Bytes of all records of a block."""
        return self.record_bytes * self.record_ranks

    @property
    def is_latent(self) -> bool:
        """True for latent attention (MLA): there are no values, and all ranks have the same planes."""
        return all(plane.kind in (PlaneKind.KEY, PlaneKind.INDEXER) for plane in self.planes)

    def with_tp_size(self, tp_size: int) -> KVLayout:
        """Return the layout of a rank of the same model with another tensor parallelism.

        Planes are split, or joined, by the first dimension of their shape, the KV heads; those of latent attention
        stay. They are packed, in the record and on the device. Raises ``LayoutError`` for heads that cannot be divided.
        """
        require_int("tp_size", tp_size, least=1)
        if tp_size == self.tp_size:
            return self
        planes: list[Plane] = []
        end = 0
        for plane in self.planes:
            heads = plane.shape[0] * self.record_ranks
            if not self.is_latent and (plane.kind is PlaneKind.INDEXER or heads % tp_size):
                raise UnsupportedLayoutError(
                    f"tp_size {tp_size}: the {plane.kind.value} planes of {self.tp_size} ranks, {plane.shape[0]} heads "
                    "each, cannot be divided evenly"
                )
            shape = plane.shape if self.is_latent else (heads // tp_size, *plane.shape[1:])
            spec, offset = PlaneSpec(plane.kind, plane.dtype, shape), _align(end, PLANE_ALIGNMENT)
            planes.append(Plane(plane.layer, *spec, spec.nbytes, offset, spec.nbytes))
            end = offset + spec.nbytes
        return replace(
            self,
            tp_size=tp_size,
            replicas=tp_size if self.is_latent else 1,
            planes=tuple(planes),
            record_bytes=_align(end, RECORD_ALIGNMENT),
        )

    @cached_property
    def total_layers(self) -> int:
        """Number of main and draft layers."""
        return self.num_layers + self.num_draft_layers

    @cached_property
    def page_groups(self) -> tuple[int, ...]:
        """The group of each record of a page, in order, but for states."""
        sizes = [
            (at, self.block_size // each.block_size) for at, each in self._ordered_groups if not each.is_state
        ]
        return tuple(at for at, blocks in sizes for _ in range(blocks))

    @cached_property
    def state_groups(self) -> tuple[int, ...]:
        """The groups that keep states: a page may have one record of each at its end, all of them or none."""
        return tuple(at for at, each in self._ordered_groups if each.is_state)

    @cached_property
    def record_groups(self) -> tuple[int, ...]:
        """The group of each record that a page may have, by the mark of its key: see ``fdcache.groups``."""
        return self.page_groups[::-1] + self.state_groups[::-1]

    @property
    def _ordered_groups(self) -> list[tuple[int, CacheGroup]]:
        return list(enumerate(self.groups or (CacheGroup(self.block_size),)))

    @property
    def page_records(self) -> int:
        """Number of records that every page has."""
        return len(self.page_groups)

    @cached_property
    def num_states(self) -> int:
        """Number of records that a page with states has at its end."""
        return len(self.state_groups)

    @property
    def has_gaps(self) -> bool:
        """True if the engine gives up blocks of a prefix that it goes on to use."""
        return any(group.is_limited for group in self.groups)

    def require_one_group(self, user: str) -> None:
        """Raise ``UnsupportedLayoutError`` for groups of layers, which ``user`` does not serve."""
        if self.groups:
            raise UnsupportedLayoutError(
                f"groups {', '.join(f'{each.reach}/{each.block_size}' for each in self.groups)}: {user} serves one "
                "group of layers that attend to all tokens; use an OffloadManager, or let the engine keep all layers "
                "in one group"
            )

    @cached_property
    def num_planes(self) -> int:
        """Number of planes of all layers."""
        return len(self.planes)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one block's planes, without padding."""
        return sum(plane.nbytes for plane in self.planes)

    @cached_property
    def _planes_by_layer(self) -> dict[int, tuple[Plane, ...]]:
        layers: dict[int, list[Plane]] = {}
        for plane in self.planes:
            layers.setdefault(plane.layer, []).append(plane)
        return {layer: tuple(planes) for layer, planes in layers.items()}

    def layer_planes(self, layer: int) -> tuple[Plane, ...]:
        """Return the planes of a layer in record order. Raises ``LayoutError`` if there is no such layer."""
        if not 0 <= layer < self.total_layers:
            raise LayoutError(f"layer {layer} is not one of the {self.total_layers} layers")
        return self._planes_by_layer.get(layer, ())

    def is_draft(self, layer: int) -> bool:
        """Return True for a draft layer."""
        return layer >= self.num_layers

    def draft_blocks(self, num_blocks: int) -> int:
        """Return the blocks of a draft layer's device plane where a main layer's has ``num_blocks``."""
        return int(num_blocks * self.draft_block_ratio)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 (32 bytes) over everything that decides a record's content, written down in docs/format.md.

        It separates the keys of different models and layouts. All ranks of an engine have the same one: rank, device
        strides and the number of draft blocks are not part of it.
        """
        layers, sizes = (self.num_layers, self.num_draft_layers), (len(self.groups), self.record_bytes)
        numbers = (*layers, self.record_ranks, *sizes)
        names = self.model, self.revision
        parts = encoded(names, self.block_size, numbers, self.planes, self.groups)
        return hashlib.sha256(b"".join(parts)).digest()

    def to_json(self) -> str:
        """Return the layout as a JSON object with the fields of this class; ``group`` is the number of ``groups``."""
        data = asdict(self)
        groups = data.pop("groups")
        data["group"] = len(groups)
        groups = [{name: value for name, value in each.items() if value is not None} for each in groups]
        if self.replicas == 1:
            del data["replicas"]
        return json.dumps(data | {"groups": groups} if groups else data)

    @classmethod
    def from_json(cls, text: str | bytes) -> KVLayout:
        """Read the output of ``to_json``. Raises ``LayoutError`` for unknown, missing or wrong fields."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"layout: not JSON: {error}") from error
        if isinstance(data, dict):
            data["groups"] = groups_from_json(data)
            data.setdefault("replicas", 1)
        if isinstance(data, dict) and isinstance(data.get("planes"), list):
            data["planes"] = tuple(
                plane_from_json(plane, f"planes[{i}]") for i, plane in enumerate(data["planes"])
            )
        return from_fields(cls, data, "layout")

    @classmethod
    def build(
        cls,
        specs: Sequence[PlaneSpec],
        *,
        model: str,
        revision: str,
        block_size: int,
        num_layers: int,
        num_draft_layers: int = 0,
        tp_size: int = 1,
        draft_block_ratio: float = 1.0,
        groups: tuple[CacheGroup, ...] = (),
        replicas: int = 1,
    ) -> KVLayout:
        """Return a layout in which every layer, draft layers too, has the planes ``specs``, packed on the device."""
        layers = require_int("num_layers", num_layers, least=1)
        layers += require_int("num_draft_layers", num_draft_layers, least=0)
        return cls.of_layers(
            [specs] * layers,
            model=model,
            revision=revision,
            block_size=block_size,
            num_draft_layers=num_draft_layers,
            tp_size=tp_size,
            draft_block_ratio=draft_block_ratio,
            groups=groups,
            replicas=replicas,
        )

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[Sequence[PlaneSpec]],
        *,
        model: str,
        revision: str,
        block_size: int,
        num_draft_layers: int = 0,
        tp_size: int = 1,
        draft_block_ratio: float = 1.0,
        groups: tuple[CacheGroup, ...] = (),
        replicas: int = 1,
    ) -> KVLayout:
        """Return a layout with the planes of each layer, the last ``num_draft_layers`` of the draft, packed."""
        planes: list[Plane] = []
        end = 0
        for layer, specs in enumerate(layers):
            for spec in specs:
                offset = _align(end, PLANE_ALIGNMENT)
                planes.append(Plane(layer, *spec, spec.nbytes, offset, spec.nbytes))
                end = offset + spec.nbytes
        return cls(
            model=model,
            revision=revision,
            block_size=block_size,
            num_layers=len(layers) - num_draft_layers,
            num_draft_layers=num_draft_layers,
            planes=tuple(planes),
            record_bytes=_align(end, RECORD_ALIGNMENT),
            tp_size=tp_size,
            draft_block_ratio=draft_block_ratio,
            groups=groups,
            replicas=replicas,
        )

    @classmethod
    def uniform(
        cls, *, block_size: int, kv_heads: int, head_dim: int, dtype: str, **options: Unpack[LayoutOptions]
    ) -> KVLayout:
        """Return a layout for GQA or MHA: key and value [kv_heads, block_size, head_dim] in every layer.

        ``kv_heads`` counts the heads of one rank. ``options`` are the other arguments of ``build``.
        """
        shape = (kv_heads, block_size, head_dim)
        specs = [PlaneSpec(kind, dtype, shape) for kind in (PlaneKind.KEY, PlaneKind.VALUE)]
        return cls.build(specs, block_size=block_size, **options)

    @classmethod
    def mla(
        cls,
        *,
        block_size: int,
        latent_dim: int,
        dtype: str,
        indexer_dim: int = 0,
        indexer_dtype: str = "uint8",
        **options: Unpack[LayoutOptions],
    ) -> KVLayout:
        """Return a layout for multi-head latent attention: one key plane [1, block_size, latent_dim] per layer.

        ``latent_dim`` is the compressed latent and the rotary part together. A sparse-attention indexer
        (``indexer_dim`` > 0) adds a plane [block_size, indexer_dim]. By default all ranks hold the same bytes.
        """
        options.setdefault("replicas", options.get("tp_size", 1))
        specs = [PlaneSpec(PlaneKind.KEY, dtype, (1, block_size, latent_dim))]
        if indexer_dim:
            specs.append(PlaneSpec(PlaneKind.INDEXER, indexer_dtype, (block_size, indexer_dim)))
        return cls.build(specs, block_size=block_size, **options)

    @classmethod
    def block_fp8(
        cls,
        *,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "float8_e4m3fn",
        **options: Unpack[LayoutOptions],
    ) -> KVLayout:
        """Return a layout for block-wise fp8: ``uniform`` with float32 scales [kv_heads, block_size]."""
        if dtype not in {"float8_e4m3fn", "float8_e5m2"}:
            raise LayoutError(f"dtype {dtype!r} is not fp8; use float8_e4m3fn or float8_e5m2")
        shape, scales = (kv_heads, block_size, head_dim), (kv_heads, block_size)
        specs = [PlaneSpec(kind, dtype, shape) for kind in (PlaneKind.KEY, PlaneKind.VALUE)]
        specs += [PlaneSpec(kind, "float32", scales) for kind in (PlaneKind.KEY_SCALE, PlaneKind.VALUE_SCALE)]
        return cls.build(specs, block_size=block_size, **options)


# --- helpers ------------------------------------------------------------------------------------------------


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _require_text(name: str, value: object) -> None:
    """Raise ``LayoutError`` unless the value is a non-empty text that UTF-8 can encode."""
    if not isinstance(value, str) or not value:
        raise LayoutError(f"{name} must be a non-empty string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LayoutError(f"{name} must be text that UTF-8 can encode, got {value!r}") from error
