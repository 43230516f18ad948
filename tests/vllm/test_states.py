"""What of vLLM's states a rank has: by vLLM's own shapes, cut as its layers cut their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "vllm.v1.core.kv_cache_planning", reason="this vLLM keeps the layers of such models in one group"
)

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import ssm_conv_transfer_utils as theirs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.core import kv_cache_planning
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from fdcache.errors import ConfigurationError
from fdcache.integrations.vllm.config import layout_from_config, require_peer_ranks
from fdcache.integrations.vllm.states import state_parts
from fdcache.layout import KVLayout
from fdcache.transfer.connector import share
from tests.vllm.engine import connector_config

F32, F16 = torch.float32, torch.float16
_HEADS, _DIM, _STATE, _KERNEL, _BLOCK, _RANKS = 8, 16, 16, 4, 32, (1, 2, 4)
_INNER = _HEADS * _DIM


def shapes_of(kind: Kind, ranks: int, groups: int = 4) -> tuple[tuple[int, ...], ...]:
    made: Any = Shapes.linear_attention_state_shape(_HEADS, ranks, _DIM)
    if kind is Kind.MAMBA1:
        made = Shapes.mamba1_state_shape(ranks, _INNER, _STATE, _KERNEL)
    elif kind is Kind.MAMBA2:
        made = Shapes.mamba2_state_shape(ranks, _INNER, groups, _HEADS, _DIM, _STATE, _KERNEL)
    elif kind is Kind.GDN_ATTN:
        made = Shapes.gated_delta_net_state_shape(ranks, 4, _HEADS, _STATE, _DIM, _KERNEL)
    elif kind is Kind.SHORT_CONV:
        made = Shapes.short_conv_state_shape(ranks, _INNER, _KERNEL)
    return tuple(made)


def projections_of(kind: Kind, groups: int) -> list[int]:
    """The channels of the projections of a convolution, as the layers of vLLM's models order them."""
    if kind is Kind.MAMBA2:
        return [_INNER, groups * _STATE, groups * _STATE]
    return [4 * _STATE, 4 * _STATE, _INNER] if kind is Kind.GDN_ATTN else [_INNER]


def spec_of(kind: Kind, ranks: int, groups: int = 4, page: int | None = None) -> MambaSpec:
    shapes = shapes_of(kind, ranks, groups)
    dtypes = (F16, F32) if kind is not Kind.LINEAR else (F32,)
    return MambaSpec(
        block_size=_BLOCK,
        shapes=shapes,
        dtypes=dtypes[: len(shapes)],
        page_size_padded=page,
        mamba_type=kind,
        mamba_cache_mode="align",
    )


def _full(ranks: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=_BLOCK, num_kv_heads=4 // ranks, head_size=128, dtype=F32)


def made(
    model: Path, kind: Kind, ranks: int, channels_first: bool, groups: int = 4, *, attends: bool = True
) -> tuple[KVLayout, tuple[int, ...], Any]:
    """Return the layout of a rank, the parts of its states, and vLLM's groups."""
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=_BLOCK,
        max_model_len=1024,
        num_gpu_blocks_override=20,
        kv_transfer_config=connector_config(),
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.mamba_cache_mode = "align"
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    page = _full(ranks).page_size_bytes if attends else None
    specs = [*[spec_of(kind, ranks, groups, page)] * 3, *[_full(ranks)] * attends]
    found = kv_cache_planning.get_kv_cache_groups(
        config, {f"layer.{at}": each for at, each in enumerate(specs)}
    )
    cache = kv_cache_planning.get_kv_cache_config_from_groups(config, found, 1 << 40)
    parts = state_parts(cache, channels_first=channels_first)
    assert parts is not None
    return layout_from_config(config, cache, None, None, parts), parts, cache


@pytest.fixture(params=[False, True], ids=["SD", "DS"])
def channels_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """How the inputs of convolutions are arranged."""
    for module in (mamba_utils, theirs):
        monkeypatch.setattr(module, "is_conv_state_dim_first", lambda: request.param)
    return bool(request.param)


def bytes_of_rank(kind: Kind, rank: int, ranks: int, channels_first: bool) -> torch.Tensor:
    """Return a rank's state: of each projection of the convolution its share of the channels, and its heads."""
    sizes = projections_of(kind, 4)
    (*convolved, last), dtypes = shapes_of(kind, 1), spec_of(kind, 1).dtypes
    states = []
    if kind is not Kind.LINEAR:
        first, others = (convolved[0], [last]) if convolved else (last, [])
        length = first[1] if channels_first else first[0]
        whole = torch.arange(sum(sizes) * length, dtype=F32).reshape(sum(sizes), length).to(dtypes[0])
        shares = [each.chunk(ranks)[rank] for each in whole.split(sizes)]
        own = torch.cat(shares)
        states.append(own if channels_first else own.T.contiguous())
    else:
        others = [last]
    for shape, dtype in zip(others, dtypes[len(states) :], strict=True):
        states.append(
            torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).chunk(ranks)[rank]
        )
    assert [each.shape for each in states] == [torch.Size(each) for each in shapes_of(kind, ranks)]
    return torch.cat([each.contiguous().reshape(-1).view(torch.uint8) for each in states])


_KINDS = [Kind.MAMBA1, Kind.MAMBA2, Kind.GDN_ATTN, Kind.SHORT_CONV, Kind.LINEAR]


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.name)
def test_the_pieces_between_unequal_ranks_are_those_of_vllms_layers(
    kind: Kind, channels_first: bool, model: Path
) -> None:
    for prefill in _RANKS:
        for decode in _RANKS:
            if prefill == decode:
                continue
            layout, parts, _ = made(model, kind, decode, channels_first)
            sources = [bytes_of_rank(kind, rank, prefill, channels_first) for rank in range(prefill)]
            for rank in range(decode):
                wanted = bytes_of_rank(kind, rank, decode, channels_first)
                assert len(wanted) == sum(parts)
                read = torch.full_like(wanted, 1)
                covered = torch.zeros(len(wanted), dtype=torch.int32)
                for source, joint in share(layout, rank, prefill, parts).sources:
                    assert joint is not None
                    mine, other = joint.own.of(is_state=True), joint.theirs.of(is_state=True)
                    for at in range(mine.per_plane):
                        into = slice(mine.starts[at], mine.starts[at] + mine.sizes[at])
                        covered[into] += 1
                        begin = other.starts[at]
                        read[into] = sources[source][begin : begin + other.sizes[at]]
                assert (covered == 1).all()
                assert torch.equal(read, wanted)


@pytest.mark.parametrize("attends", [True, False], ids=["beside attention", "alone"])
@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.name)
def test_engines_of_unequal_ranks_know_each_others_layout(
    kind: Kind, attends: bool, channels_first: bool, model: Path
) -> None:
    layouts = {ranks: made(model, kind, ranks, channels_first, attends=attends) for ranks in _RANKS}
    for layout, parts, cache in layouts.values():
        assert layout.state_groups
        for others, (other, _, _) in layouts.items():
            assert layout.with_tp_size(others).fingerprint == other.fingerprint
            require_peer_ranks(layout, cache, others, parts)


@pytest.mark.parametrize("channels_first", [True], indirect=True, ids=["DS"])
@pytest.mark.parametrize("kind", [Kind.MAMBA1, Kind.MAMBA2, Kind.GDN_ATTN], ids=lambda kind: kind.name)
def test_parts_are_those_that_vllms_own_connector_reads(
    kind: Kind, channels_first: bool, model: Path
) -> None:
    for ranks in _RANKS:
        split = theirs.derive_mamba_conv_split(spec_of(kind, ranks), ranks)
        _, parts, _ = made(model, kind, ranks, channels_first)
        assert parts == (*split.proj_bytes, split.ssm_sizes[1])


def test_a_part_that_several_ranks_have_alike_keeps_engines_apart(channels_first: bool, model: Path) -> None:
    """One group of B and C, which each of two ranks has whole: their layouts differ, and they refuse each other."""
    alone, _, _ = made(model, Kind.MAMBA2, 1, channels_first, groups=1)
    two, _, _ = made(model, Kind.MAMBA2, 2, channels_first, groups=1)
    assert alone.with_tp_size(2).fingerprint != two.fingerprint


def test_states_whose_parts_are_not_known_are_refused_by_name(channels_first: bool, model: Path) -> None:
    layout, _, cache = made(model, Kind.MAMBA2, 2, channels_first)
    with pytest.raises(ConfigurationError, match="layers that keep states, with parts that are not known"):
        require_peer_ranks(layout, cache, 1, None)
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec):
            object.__setattr__(spec, "tp_replicated", True)
    assert state_parts(cache, channels_first=channels_first) is None
