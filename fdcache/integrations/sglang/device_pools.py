"""The device pools of SGLang as planes of pages, by name; what is not carried is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from fdcache.errors import UnsupportedLayoutError
from fdcache.layout_planes import PlaneKind, PlaneSpec

REMEDY = "serve this model without --enable-unified-cache-external-linker"

_LEAST_SHARE = 1 / 8
"""Least part of memory and disk that a pool gets, before all parts make one whole."""


class Keys(StrEnum):
    """Which of a prompt's pages a pool has."""

    ALL = "all pages"
    LAST = "the last pages, for a window"
    END = "one state at the end"


@dataclass(eq=False)
class DevicePages:
    """The pages of one device pool, in SGLang's own memory: a plane of bytes, shape (pages, bytes), for each buffer.

    ``layers``: for each layer of the planes, the layer of the model at which SGLang waits for it. A page of a pool of
    states is one state, of ``page_size`` 1.
    """

    name: str
    pool: Any
    planes: list[torch.Tensor]
    kinds: Sequence[PlaneKind]
    layers: Sequence[int]
    page_size: int
    keys: Keys = Keys.ALL
    pages_of_window: int = 0
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def specs(self) -> list[list[PlaneSpec]]:
        """The planes of each layer of the layout."""
        width, planes = len(self.kinds), iter(self.planes)
        return [
            [PlaneSpec(kind, "uint8", (next(planes).shape[1],)) for kind in self.kinds]
            for _ in range(len(self.planes) // width)
        ]

    @property
    def num_layers(self) -> int:
        """Layers of the layout."""
        return len(self.planes) // len(self.kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.planes[0].device


def device_pages(params: Any, components: set[Any]) -> list[DevicePages]:
    """Return the pools of a model, that of the keys and values of all tokens first.

    Raises ``UnsupportedLayoutError`` for a pool that cannot be carried, or that nobody else would check.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    _refuse_drafts(params)
    names = {component.name for component in components}
    page = int(params.page_size)
    kind = type(kvcache).__name__
    if kind == "SWAKVPool" and names == {"FULL", "SWA"}:
        return list(_windows(kvcache, params, page))
    if kind == "HybridLinearKVPool" and names == {"FULL", "MAMBA"}:
        mapping = kvcache.full_attention_layer_id_mapping
        layers = [layer - kvcache.start_layer for layer in sorted(mapping, key=mapping.__getitem__)]
        return [_attention("kv", kvcache.full_kv_pool, page, layers), _states(params, kvcache)]
    if names == {"FULL"}:
        return [_attention("kv", kvcache, page, range(int(kvcache.layer_num)))]
    raise _unsupported(kvcache, f"with the components {', '.join(sorted(names))}")


def _refuse_drafts(params: Any) -> None:
    for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools"):
        if getattr(params, name, ()):
            raise UnsupportedLayoutError(
                f"FdcacheLinker: the pools of draft layers ({name}) are not stored, and drafts would read what nobody "
                "has loaded; serve this model without speculative decoding, or without "
                "--enable-unified-cache-external-linker"
            )


def _windows(kvcache: Any, params: Any, page: int) -> Iterator[DevicePages]:
    layers: dict[bool, list[int]] = {False: [], True: []}
    for layer, (_, is_window) in sorted(kvcache.layers_mapping.items(), key=lambda each: each[1][0]):
        layers[is_window].append(layer - kvcache.start_layer)
    window = int(params.sliding_window_size)
    yield _attention("kv", kvcache.full_kv_pool, page, layers[False])
    swa = _attention("swa", kvcache.swa_kv_pool, page, layers[True])
    swa.keys, swa.pages_of_window = Keys.LAST, -(-window // page)
    yield swa


def _attention(name: str, pool: Any, page: int, layers: Sequence[int]) -> DevicePages:
    kind = type(pool).__name__
    if kind == "MLATokenToKVPool" and pool.kv_scale_buffer is None and not pool.layer_shard_enabled:
        buffers, kinds = list(pool.kv_buffer), [PlaneKind.KEY]
        shape = {"latent": int(pool.kv_cache_dim)}
    elif kind == "MHATokenToKVPool" and _is_plain(pool):
        buffers = [each for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for each in pair]
        kinds = [PlaneKind.KEY, PlaneKind.VALUE]
        shape = {"heads": int(pool.head_num), "dim": int(pool.head_dim), "v_dim": int(pool.v_head_dim)}
    else:
        raise _unsupported(pool, f"named {name}")
    if len(buffers) != len(layers) * len(kinds):
        raise _unsupported(pool, f"named {name}, with buffers for some of its layers alone")
    description = {"type": kind, "dtype": str(pool.dtype), **shape}
    planes = [_plane(name, buffer, page) for buffer in buffers]
    return DevicePages(name, pool, planes, kinds, list(layers), page, description=description)


def _is_plain(pool: Any) -> bool:
    has_scales = pool.k_scale_buffer is not None or pool.v_scale_buffer is not None
    return pool.kv_cache_layout == "nhd" and not has_scales and not pool.post_capture_active


def _states(params: Any, kvcache: Any) -> DevicePages:
    """Return the states of linear attention: one slot has those of all layers."""
    pool, tokens = kvcache.mamba_pool, params.req_to_token_pool
    cache = pool.mamba_cache
    rings = [
        name for name in vars(cache) if name.startswith("replayssm") and getattr(cache, name) is not None
    ]
    tensors = [
        each for each in (*cache.conv, cache.temporal) if each.numel()
    ]  # convolutions alone have no other
    if (
        type(pool).__name__ != "MambaPool"
        or rings
        or pool._slot_siblings
        or not 0 < len(tensors) <= len(PlaneKind)
    ):
        raise _unsupported(pool, "named mamba")
    by_index = {index: layer for layer, index in tokens.mamba_map.items()}
    layers = [by_index[index] - kvcache.start_layer for index in range(tensors[0].shape[0])]
    planes = [_bytes_of(tensor[index]) for index in range(len(layers)) for tensor in tensors]
    description = {
        "type": "MambaPool",
        "planes": [[str(each.dtype), list(each.shape[2:])] for each in tensors],
    }
    kinds = list(PlaneKind)[: len(tensors)]
    return DevicePages("mamba", pool, planes, kinds, layers, 1, Keys.END, description=description)


def _plane(name: str, buffer: torch.Tensor, page: int) -> torch.Tensor:
    """Return a buffer of rows of tokens as pages of bytes."""
    rows = _bytes_of(buffer)
    pages = rows.shape[0] // page
    return rows[: pages * page].view(pages, page * rows.shape[1])


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_contiguous():
        raise UnsupportedLayoutError(
            f"FdcacheLinker: a buffer of the shape {tuple(buffer.shape)} is not contiguous; {REMEDY}"
        )
    return buffer.view(torch.uint8).view(buffer.shape[0], -1)


def _unsupported(pool: Any, what: str) -> UnsupportedLayoutError:
    return UnsupportedLayoutError(
        f"FdcacheLinker: the device pool {type(pool).__name__} {what} is not carried; {REMEDY}"
    )


def shares_of(sizes: Sequence[int]) -> list[float]:
    """Return the part of memory and disk that each of several pools of these sizes gets.

    SGLang gives states what is left of the device, so that the pool of the keys and values may be a tiny part of all.
    """
    total = sum(sizes)
    parts = [max(size / total, _LEAST_SHARE) for size in sizes]
    return [part / sum(parts) for part in parts]
