"""Layout from vLLM's configuration, read by attribute name, and what is refused or not cached."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from math import gcd
from pathlib import Path
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.groups import CacheGroup, groups_of_rank, groups_of_ranks, page_of, require_served
from fdcache.integrations.vllm.pages import (
    group_of,
    heads_apart,
    is_of_states,
    layer_specs,
    pages_of,
    plane_bytes,
    words_for,
)
from fdcache.integrations.weights import digest_of, has_weights
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec

_OF_EVERY_TOKEN = ("MEAN", "CLS", "STEP")


def require_supported(vllm_config: Any, kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """Return the groups of layers. Raise an error that names what would not be right, and the remedy.

    Raises ``UnsupportedLayoutError`` for groups of layers that cannot be served, ``ConfigurationError`` for anything
    else.
    """
    groups = kv_cache_config.kv_cache_groups
    made = [group_of(group) for group in groups]
    require_served([(words_for(group), each) for group, each in zip(groups, made, strict=True)])
    _refuse(_unsupported(vllm_config, vllm_config.kv_transfer_config))
    _refuse(_unsupported_groups(vllm_config, kv_cache_config, made))
    return tuple(each for each in made if each is not None)


def require_supported_options(vllm_config: Any, transfer_config: Any) -> None:
    """Raise the errors of ``require_supported`` that are known before vLLM has loaded the weights."""
    _refuse(_unsupported(vllm_config, transfer_config))


def _refuse(found: Iterable[tuple[str, str]]) -> None:
    for wrong, right in found:
        raise ConfigurationError(f"FdcacheConnector: {wrong}; {right}")


def why_not_cached(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why blocks of this engine have no use for another request, None if they have.

    vLLM then has its own prefix cache off as well. It would end at a hit where every token has to be computed, and
    answer wrongly where a token attends to later ones.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs:
        return "the model has no KV cache"
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return "the model has layers in which a token attends to later ones"
    model = vllm_config.model_config
    pooler = getattr(model, "pooler_config", None)
    if pooler is not None and not model.is_prefix_caching_supported:
        kinds = [str(getattr(pooler, f"{each}_pooling_type", None)) for each in ("seq", "tok")]
        named = next((kind for kind in kinds if kind in _OF_EVERY_TOKEN), "this model's")
        return f"with {named} pooling every token of a prompt has to be computed"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "vLLM's prefix caching is off (enable_prefix_caching)"
    return None


def _unsupported_groups(
    vllm_config: Any, kv_cache_config: Any, groups: Sequence[CacheGroup | None]
) -> Iterator[tuple[str, str]]:
    has_states = any(each is not None and each.is_state for each in groups)
    if len(groups) < 2 and not has_states:
        return
    remedy = "serve this model without fdcache" if has_states else "set --disable-hybrid-kv-cache-manager"
    sizes = {int(group.kv_cache_spec.page_size_bytes) for group in kv_cache_config.kv_cache_groups}
    if len(sizes) > 1 and pages_of(kv_cache_config) is None:
        yield f"the layers' groups have pages of {sorted(sizes)} bytes", remedy
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield "pipeline stages have different groups of layers", "set pipeline_parallel_size to 1"


def _unsupported(vllm_config: Any, transfer_config: Any) -> Iterator[tuple[str, str]]:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name}={getattr(parallel, name)} spreads the tokens of a block over ranks", "set it to 1"
    stages = parallel.pipeline_parallel_size
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    if layers % stages:
        yield (
            f"{layers} layers do not divide into {stages} equal pipeline stages",
            "choose a pipeline_parallel_size that divides them",
        )


def layout_from_config(
    vllm_config: Any,
    kv_cache_config: Any,
    packed_by: object = None,
    weights: str | None = None,
    states: tuple[int, ...] | None = (),
) -> KVLayout:
    """Return the layout of vLLM's pages: one plane of bytes for each layer of a rank, or for those that share memory.

    vLLM's groups take their blocks from one pool, and lie over each other in the same memory.
    Its revision names everything that decides the bytes of a page: the weights, the dtypes, the packing, the ranks.
    ``packed_by``: what else decides how vLLM packs a page: the GPUs' capability, and its variable. ``weights``: the
    name of the weights (``FDCACHE_WEIGHTS``), by default what vLLM and their files tell of them. ``states``: bytes of
    the parts of a state, None if they are not known.
    Raises the errors of ``require_supported``.
    """
    groups = require_supported(vllm_config, kv_cache_config)
    page, replicas = page_of(groups), replicas_of(vllm_config, kv_cache_config)
    groups = groups_of_ranks(groups, replicas)
    is_known = replicas == 1 and states is not None
    heads = _heads_of_pages(vllm_config, kv_cache_config) if is_known else None
    return KVLayout.of_layers(
        [[_plane_of(nbytes, heads)] for nbytes in plane_bytes(kv_cache_config)],
        model=weights or model_of(vllm_config.model_config),
        revision=revision_of(
            vllm_config, packed_by, weights, replicas, states=states or (), is_split=heads is not None
        ),
        block_size=page,
        tp_size=int(vllm_config.parallel_config.world_size),
        groups=() if groups == (CacheGroup(page),) else groups,
        replicas=replicas,
    )


def _plane_of(nbytes: int, heads: int | None) -> PlaneSpec:
    if heads is None:
        return PlaneSpec(PlaneKind.KEY, "uint8", (nbytes,))
    return PlaneSpec(PlaneKind.PAIR, "uint8", (heads, nbytes // heads))


def _heads_of_pages(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Return the KV heads of a rank if pages can be split and joined by head, between unequal numbers of ranks."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or vllm_config.speculative_config is not None:
        return None
    return heads_apart(kv_cache_config, getattr(vllm_config.cache_config, "kv_cache_layout", None))


def require_peer_ranks(
    layout: KVLayout, kv_cache_config: Any, peer_ranks: int | None, states: tuple[int, ...] | None = ()
) -> None:
    """Raise ``ConfigurationError`` if blocks cannot be handed over between unequal numbers of ranks.

    ``states``: bytes of the parts of a state, None if they are not known.
    """
    if peer_ranks in (None, layout.tp_size):
        return
    are_apart = all(plane.kind is PlaneKind.PAIR for plane in layout.planes)
    if layout.state_groups and not (states and are_apart):
        remedy = ""
        if _is_latent(kv_cache_config):
            missing = "latents (MLA) beside them, of which ranks have other shares"
        elif not states:
            missing = "parts that are not known"
        else:
            missing, remedy = (
                "no run of bytes for each head beside them",
                ", or set VLLM_KV_CACHE_LAYOUT to HND on all",
            )
        raise ConfigurationError(
            f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: the model has layers that keep states, with {missing}; give "
            f"all engines {layout.tp_size} ranks{remedy}"
        )
    if not (are_apart or _is_latent(kv_cache_config)):
        raise ConfigurationError(
            f"FDCACHE_TRANSFER_PEER_RANKS={peer_ranks}: vLLM's pages do not hold the bytes of each head together; set "
            "VLLM_KV_CACHE_LAYOUT to HND on all engines, or give both as many ranks"
        )


def replicas_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many consecutive ranks of a node have the same bytes in every page.

    All of them do with latents, but for the states beside these; and those that share a head where a model has fewer
    heads than ranks, as long as all its layers have as many. Ranks on other nodes, or with an executor that may use
    some, count by themselves.
    """
    parallel = vllm_config.parallel_config
    ranks = int(parallel.tensor_parallel_size)
    if ranks == 1 or getattr(parallel, "distributed_executor_backend", None) != "mp":
        return 1
    if not _is_latent(kv_cache_config):
        specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group).values()]
        heads = _heads_of_every_layer(vllm_config)
        is_split = any(getattr(spec, "num_kv_heads", None) != 1 for spec in specs)
        if heads is None or is_split or ranks % heads:
            return 1
        ranks //= heads
    return gcd(ranks, int(parallel.world_size) // int(getattr(parallel, "nnodes_within_dp", 1)))


def _is_latent(kv_cache_config: Any) -> bool:
    """Return True if all layers but those with states keep latents, which all ranks have alike."""
    groups = [group for group in kv_cache_config.kv_cache_groups if not is_of_states(group)]
    specs = [spec for group in groups for spec in layer_specs(group).values()]
    return bool(specs) and all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs)


def _heads_of_every_layer(vllm_config: Any) -> int | None:
    """Return the KV heads of each layer; None if layers may have unequal numbers."""
    fields = vllm_config.model_config.hf_text_config.to_dict()
    counts = {name: value for name, value in fields.items() if "kv_head" in name or "key_value_head" in name}
    if list(counts) != ["num_key_value_heads"] or vllm_config.speculative_config is not None:
        return None
    heads = counts["num_key_value_heads"]
    return heads if isinstance(heads, int) and heads > 0 else None


def kept_by(layout: KVLayout, host_blocks: int) -> str:
    """Return in words which groups of layers are kept, and how many tokens fit into ``host_blocks`` records of them."""
    groups = groups_of_rank(layout.groups, 0) or (CacheGroup(layout.block_size),)
    counts = Counter(
        f"{group.reach}{f' {group.tokens}' if group.tokens else ''} in blocks of {group.block_size} tokens"
        for group in groups
    )
    kept = ", ".join(f"{count} x {what}" if count > 1 else what for what, count in counts.items())
    shared = f", once for {layout.replicas} ranks" if layout.replicas > 1 else ""
    shared += " but for states" if shared and layout.num_states else ""
    if not host_blocks:
        return f"kept: {kept}{shared}, in the memory of a service"
    tokens = host_blocks // max(layout.page_records, layout.num_states, 1) * layout.block_size
    states = f", less {layout.num_states} blocks for each prompt's states" if layout.num_states else ""
    return f"kept: {kept}{shared}; host memory has room for {tokens:,} tokens{states}"


def model_of(model: Any) -> str:
    """Return the name of a model: for local weights its kind and the first digits of their digest, not their place."""
    place = str(model.model)
    if not has_weights(Path(place)):
        return place
    return f"{getattr(model.hf_config, 'model_type', 'model')}@{str(digest_of(Path(place)))[:8]}"


def revision_of(
    vllm_config: Any,
    packed_by: object = None,
    weights: str | None = None,
    replicas: int = 1,
    *,
    states: tuple[int, ...] = (),
    is_split: bool = False,
) -> str:
    """Return a digest of the weights and of what decides how vLLM computes and packs a page.

    ``weights`` names them in place of their revision and files. ``replicas``: ranks that hold the same bytes, which do
    not depend on their number. ``is_split``: the layout says how the ranks share the heads; they share ``states`` by
    these parts. Rotary embeddings of the kind "longrope" have other factors from a certain longest prompt on.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    load, speculative = vllm_config.load_config, vllm_config.speculative_config
    parts = {
        "vllm": version("vllm"),
        "weights": weights or _weights_of(model, load),
        "config": _place_of(getattr(model, "hf_config_path", None)),
        "overrides": repr(getattr(model, "hf_overrides", None)),
        "quantization": (model.quantization, repr(getattr(model, "quantization_config", None))),
        "dtype": str(model.dtype),
        "cache_dtype": (str(cache.cache_dtype), getattr(cache, "kv_cache_dtype_skip_layers", None)),
        "inputs": repr(getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)),
        "load_format": str(load.load_format),
        "seed": model.seed if str(load.load_format) == "dummy" else None,
        "tensor_parallel": None if is_split else parallel.tensor_parallel_size // replicas,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "backend": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "packing": (getattr(cache, "kv_cache_layout", None), str(packed_by)),
        "max_model_len": model.max_model_len if "longrope" in _rope_of(model.hf_text_config) else None,
        "draft": None if speculative is None else (speculative.method, _place_of(speculative.model)),
    }
    if is_split and states:  # a part that several ranks have alike is larger in all than where one has it
        parts["states"] = [part * parallel.tensor_parallel_size for part in states]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _weights_of(model: Any, load: Any) -> tuple[object, ...]:
    """Return what names the weights, which a loader may take from another place than the model's folder."""
    elsewhere = (
        getattr(model, "model_weights", None),
        repr(getattr(load, "model_loader_extra_config", None)),
    )
    place = Path(str(model.model))
    if has_weights(place):
        return digest_of(place), *elsewhere
    commit = getattr(model.hf_config, "_commit_hash", None)
    return str(model.model), digest_of(place), model.revision, commit, *elsewhere


def _place_of(path: object) -> str | None:
    """Return what names a model or a configuration: the digest of local files, else its name."""
    return None if path is None else digest_of(Path(str(path))) or str(path)


def _rope_of(text_config: Any) -> str:
    return "".join(str(getattr(text_config, name, "")) for name in ("rope_scaling", "rope_parameters"))
