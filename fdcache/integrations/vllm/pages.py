"""Groups of vLLM's layers, and the bytes that a block takes in the memory that they share, read by attribute name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fdcache.errors import ConfigurationError
from fdcache.groups import CacheGroup, Reach

_REACHES = {
    "FullAttentionSpec": Reach.ALL,
    "MLAAttentionSpec": Reach.ALL,
    "SinkFullAttentionSpec": Reach.ALL,
    "SlidingWindowSpec": Reach.LAST,
    "ChunkedLocalAttentionSpec": Reach.CHUNK,
    "MambaSpec": Reach.STATE,
}
_HEADS_APART = ("LBHNC", "BLHNC")
_WORD = 8
_ALIGNED = "align"
"""The mode of vLLM in which it keeps states at the ends of blocks."""


class Page(NamedTuple):
    """Bytes of every block: those of block ``b`` begin at ``offset + b * stride``."""

    offset: int
    nbytes: int
    stride: int


def layer_specs(group: Any) -> dict[str, Any]:
    """Return the specification of each layer of a group: layers of one type may have pages of unequal size."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(own) if own is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def words_for(group: Any) -> str:
    """Return a group in vLLM's words."""
    specs = layer_specs(group).values()
    kinds = "/".join(sorted({type(spec).__name__ for spec in specs}))
    modes = {getattr(spec, "mamba_cache_mode", _ALIGNED) for spec in specs}
    mode = "" if modes <= {_ALIGNED} else f" with mamba_cache_mode {', '.join(map(repr, sorted(modes)))}"
    return (
        f"{kinds}: {len(group.layer_names)} layers{mode}, blocks of {group.kv_cache_spec.block_size} tokens"
    )


def is_of_states(group: Any) -> bool:
    """Return True for a group whose layers keep states."""
    return all(is_state(spec) for spec in layer_specs(group).values())


def group_of(group: Any) -> CacheGroup | None:
    """Return what a group's layers need of the tokens before; None for one that is not served."""
    block_size, specs = int(group.kv_cache_spec.block_size), list(layer_specs(group).values())
    reaches = {_REACHES.get(type(spec).__name__) for spec in specs}
    tokens = {_tokens_of(spec) for spec in specs}
    reach = reaches.pop() if len(reaches) == 1 else None
    is_kept = all(getattr(spec, "prefix_cacheable", True) for spec in specs) and not getattr(
        group, "host_resident", False
    )
    if reach is None or len(tokens) > 1 or not is_kept or not getattr(group, "enable_kv_transfer", True):
        return None
    if reach is Reach.STATE and any(spec.mamba_cache_mode != _ALIGNED for spec in specs):
        return None
    return CacheGroup(block_size, reach, tokens.pop())


def _tokens_of(spec: Any) -> int:
    kind = _REACHES.get(type(spec).__name__)
    if kind is Reach.LAST:
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if kind is Reach.CHUNK else 0


def pages_of(kv_cache_config: Any) -> list[Page] | None:
    """Return the bytes of a block in the memory of all layers, in order; None if each layer has a tensor of its own.

    Layers of several groups lie over each other: their pages are one. vLLM tells the scheduler places and strides, not
    the layers' page sizes where these are unequal. Raises ``ConfigurationError`` for pages that overlap otherwise.
    """
    tensors: Sequence[Any] = getattr(kv_cache_config, "kv_cache_tensors", ())
    if not tensors or not all(hasattr(tensor, "layer_stride") for tensor in tensors):
        return None
    pages: list[Page] = []
    for page in sorted(set(_places(tensors))):
        before = pages[-1] if pages else None
        if before is None or page.offset >= before.offset + before.nbytes:
            pages.append(page)
            continue
        if page.stride != before.stride:
            raise ConfigurationError(
                f"FdcacheConnector: pages {before.stride} and {page.stride} bytes apart lie over each other; set "
                "VLLM_KV_CACHE_LAYOUT to LBNHC"
            )
        nbytes = max(before.nbytes, page.offset + page.nbytes - before.offset)
        pages[-1] = Page(before.offset, nbytes, before.stride)
    return pages


def is_state(spec: Any) -> bool:
    """Return True for the specification of a layer that keeps a state."""
    return _REACHES.get(type(spec).__name__) is Reach.STATE


def heads_apart(kv_cache_config: Any, arrangement: object) -> int | None:
    """Return the KV heads of a rank if each page has one run of bytes for each, and all layers have as many.

    States lie in the same pages. Where all layers keep them, words of eight bytes count as heads. ``arrangement``: the
    name of vLLM's order of layers, blocks, heads, tokens and contents.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group).values()]
    kept = [spec for spec in specs if not is_state(spec)]
    heads = {getattr(spec, "num_kv_heads", None) for spec in kept or specs}
    is_dense = all(getattr(spec, "real_page_size_bytes", 0) == spec.page_size_bytes for spec in kept)
    is_latent = any(type(spec).__name__ == "MLAAttentionSpec" for spec in specs)
    pages = pages_of(kv_cache_config) or ()
    sizes = {int(spec.page_size_bytes) for spec in specs} | {page.nbytes for page in pages}
    is_apart = not kept or str(arrangement) in _HEADS_APART
    if not (is_apart and pages and is_dense) or is_latent or len(sizes) > 1:
        return None
    if not kept:
        heads = {pages[0].nbytes // _WORD}
    count = heads.pop() if len(heads) == 1 else None
    return count if isinstance(count, int) and count and not sizes.pop() % count else None


def _places(tensors: Sequence[Any]) -> Iterator[Page]:
    """Yield the page of each layer. With the layers of a block side by side one page ends where the next begins."""
    for tensor in tensors:
        nbytes = min(tensor.layer_stride, tensor.block_stride)
        for number in range(len(tensor.layers)):
            yield Page(tensor.offset + number * tensor.layer_stride, nbytes, tensor.block_stride)


def plane_bytes(kv_cache_config: Any) -> list[int]:
    """Return the bytes of each plane of a block: the pages of its layers."""
    if (pages := pages_of(kv_cache_config)) is not None:
        return [page.nbytes for page in pages]
    return [nbytes for _, nbytes in memories(kv_cache_config)]


def memories(kv_cache_config: Any) -> list[tuple[list[str], int]]:
    """Return the layers that share each tensor, one of each group, and the bytes of a block in it."""
    first, *others = kv_cache_config.kv_cache_groups
    num_blocks, tensors = kv_cache_config.num_blocks, getattr(kv_cache_config, "kv_cache_tensors", ())
    if others:
        return [(list(each.shared_by), each.size // num_blocks) for each in tensors]
    sizes = {name: int(spec.page_size_bytes) for name, spec in layer_specs(first).items()}
    for tensor in tensors:
        sizes |= dict.fromkeys(tensor.shared_by, tensor.size // num_blocks)
    return [([name], sizes[name]) for name in first.layer_names]
