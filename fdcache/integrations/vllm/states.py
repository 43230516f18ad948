"""What vLLM's states are made of: parts that ranks share evenly, read by attribute name.

A state of a layer is one run of bytes: a convolution's last inputs, of several projections side by side, then what goes
on by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fdcache.integrations.vllm.pages import is_state, layer_specs

_CONVOLVED = ("MAMBA1", "MAMBA2", "GDN_ATTN", "SHORT_CONV")
_BY_HEAD = ("LINEAR",)


def state_parts(kv_cache_config: Any, *, channels_first: bool) -> tuple[int, ...] | None:
    """Return the bytes of the parts of a rank's state, each of which ranks share evenly; none without states.

    ``channels_first``: how vLLM arranges the inputs of a convolution. None if the parts are not known: states of
    several kinds, those that every rank has whole, and kinds of which vLLM does not tell the parts.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group).values()]
    found = {_parts_of(spec, channels_first=channels_first) for spec in specs if is_state(spec)}
    return found.pop() if len(found) == 1 else None if found else ()


def _parts_of(spec: Any, *, channels_first: bool) -> tuple[int, ...] | None:
    kind = getattr(getattr(spec, "mamba_type", None), "name", "")
    if getattr(spec, "tp_replicated", False) or kind not in _CONVOLVED + _BY_HEAD:
        return None
    sizes = [dtype.itemsize for dtype in spec.dtypes]
    shapes = list(spec.shapes)
    parts: list[int] = []
    if kind in _CONVOLVED:
        first, size = shapes.pop(0), sizes.pop(0)
        channels, length = first if channels_first else first[::-1]
        projections = _projections(kind, channels, shapes)
        if projections is None:
            return None
        if channels_first:
            parts = [each * length * size for each in projections]
        else:
            parts = [each * size for each in projections] * length
    return tuple(parts + [prod(shape) * size for shape, size in zip(shapes, sizes, strict=True)])


def _projections(kind: str, channels: int, others: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Return the channels of each projection of a convolution's inputs, None if that cannot be.

    MAMBA2 has those of the heads, then two of equal size by group; GDN_ATTN two of keys before those of the values.
    """
    if kind not in ("MAMBA2", "GDN_ATTN"):
        return [channels]
    of_heads = others[0][0] * others[0][1]
    rest = channels - of_heads
    if rest <= 0 or rest % 2:
        return None
    return [of_heads, rest // 2, rest // 2] if kind == "MAMBA2" else [rest // 2, rest // 2, of_heads]
