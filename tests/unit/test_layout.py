import dataclasses
import json
import pickle
from typing import Any

import pytest

from fdcache.errors import LayoutError, UnsupportedLayoutError
from fdcache.groups import CacheGroup, Reach, engine_groups, groups_of_ranks, require_served
from fdcache.layout import KVLayout
from fdcache.layout_planes import Plane, PlaneKind, PlaneSpec
from tests.format_oracle import doc_vectors, oracle_fingerprint

SIZE = 64
FULL, STATE = CacheGroup(SIZE), CacheGroup(SIZE, Reach.STATE)
WINDOW = CacheGroup(SIZE, Reach.LAST, 64)
STATES = groups_of_ranks([STATE], 2)
OWN: dict[str, Any] = {"tp_size": 2, "replicas": 2}


def uniform(**changes: Any) -> KVLayout:
    options: dict[str, Any] = {
        "model": "org/model",
        "revision": "main",
        "block_size": SIZE,
        "num_layers": 2,
        "kv_heads": 2,
        "head_dim": 128,
        "dtype": "bfloat16",
    }
    return KVLayout.uniform(**(options | changes))


def of_rank(group: CacheGroup, rank: int) -> CacheGroup:
    return dataclasses.replace(group, rank=rank)


def replace(layout: KVLayout, **changes: Any) -> KVLayout:
    return dataclasses.replace(layout, **changes)


def test_uniform_layout_has_key_and_value_in_every_layer() -> None:
    layout = uniform()
    assert [(plane.layer, plane.kind) for plane in layout.planes] == [
        (0, PlaneKind.KEY),
        (0, PlaneKind.VALUE),
        (1, PlaneKind.KEY),
        (1, PlaneKind.VALUE),
    ]
    assert {plane.shape for plane in layout.planes} == {(2, 64, 128)}
    assert {plane.nbytes for plane in layout.planes} == {2 * 64 * 128 * 2}
    assert all(plane.device_stride == plane.nbytes for plane in layout.planes)
    assert layout.payload_bytes == 4 * 32768 == layout.record_bytes
    assert layout.num_planes == 4


def test_mla_layout_has_no_value_plane_and_may_have_an_indexer() -> None:
    common: dict[str, Any] = {
        "model": "m",
        "revision": "r",
        "block_size": 16,
        "num_layers": 1,
        "latent_dim": 576,
        "dtype": "bfloat16",
    }
    plain = KVLayout.mla(**common)
    assert [plane.kind for plane in plain.planes] == [PlaneKind.KEY]
    assert plain.planes[0].shape == (1, 16, 576)
    indexed = KVLayout.mla(**common, indexer_dim=132)
    assert [(plane.kind, plane.dtype, plane.shape) for plane in indexed.planes] == [
        (PlaneKind.KEY, "bfloat16", (1, 16, 576)),
        (PlaneKind.INDEXER, "uint8", (16, 132)),
    ]


def test_block_fp8_layout_has_float32_scales_for_each_head_and_token() -> None:
    layout = KVLayout.block_fp8(
        model="m", revision="r", block_size=64, num_layers=1, kv_heads=4, head_dim=128
    )
    assert [(plane.kind, plane.dtype, plane.shape) for plane in layout.layer_planes(0)] == [
        (PlaneKind.KEY, "float8_e4m3fn", (4, 64, 128)),
        (PlaneKind.VALUE, "float8_e4m3fn", (4, 64, 128)),
        (PlaneKind.KEY_SCALE, "float32", (4, 64)),
        (PlaneKind.VALUE_SCALE, "float32", (4, 64)),
    ]
    with pytest.raises(LayoutError, match="dtype 'bfloat16' is not fp8"):
        KVLayout.block_fp8(
            model="m", revision="r", block_size=64, num_layers=1, kv_heads=4, head_dim=128, dtype="bfloat16"
        )


def test_draft_layers_are_last_and_may_have_more_device_blocks() -> None:
    layout = uniform(num_draft_layers=1, draft_block_ratio=1.5)
    assert layout.total_layers == 3
    assert [layout.is_draft(layer) for layer in range(3)] == [False, False, True]
    assert [plane.kind for plane in layout.layer_planes(2)] == [PlaneKind.KEY, PlaneKind.VALUE]
    assert layout.draft_blocks(10) == 15
    assert layout.draft_blocks(1) == 1
    assert uniform(num_draft_layers=1).draft_blocks(7) == 7


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layer_is_refused(layer: int) -> None:
    with pytest.raises(LayoutError, match=f"layer {layer} is not one of the 2 layers"):
        uniform().layer_planes(layer)


def test_small_planes_are_aligned_and_the_record_is_padded() -> None:
    layout = uniform(block_size=3, kv_heads=1, head_dim=5)
    assert [plane.offset for plane in layout.planes] == [0, 128, 256, 384]
    assert layout.payload_bytes == 4 * 30
    assert layout.record_bytes == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model must be a non-empty string"),
        ({"model": "\ud800"}, "model must be text that UTF-8 can encode"),
        ({"revision": None}, "revision must be a non-empty string"),
        ({"block_size": 0}, r"block_size must be at least 1|shape\[1\] must be at least 1"),
        ({"block_size": True}, "must be an int"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_draft_layers": -1}, "num_draft_layers must be at least 0"),
        ({"tp_size": 0}, "tp_size must be at least 1"),
        ({"tp_size": 1.0}, "tp_size must be an int"),
        ({"kv_heads": 0}, r"key: shape\[0\] must be at least 1"),
        ({"head_dim": 2.5}, r"key: shape\[2\] must be an int"),
        ({"dtype": "bf16"}, "dtype 'bf16' is unknown; use one of float32, float16, bfloat16"),
        ({"draft_block_ratio": 0.5}, "draft_block_ratio must be a finite number of at least 1"),
        ({"draft_block_ratio": float("inf")}, "draft_block_ratio"),
        ({"draft_block_ratio": float("nan")}, "draft_block_ratio"),
        ({"groups": (FULL, CacheGroup(SIZE, Reach.LAST))}, r"groups\[1\].tokens must be at least 1"),
        ({"groups": (CacheGroup(SIZE, tokens=4),)}, r"groups\[0\].tokens must be 0 for the reach"),
        ({"groups": (FULL, CacheGroup(SIZE - 1))}, r"groups\[1\]: a page of \d+ tokens must be a multiple"),
        ({"groups": (CacheGroup(3, Reach.STATE),)}, "a multiple of its blocks of 3 tokens"),
        ({"groups": (FULL,)}, r"use \(\)"),
        ({"groups": (WINDOW,) * 256}, "256 records of a page are more than 255"),
        ({"groups": [FULL, WINDOW]}, "groups must be a tuple of CacheGroup"),
        (OWN | {"groups": (FULL, of_rank(WINDOW, 0), of_rank(WINDOW, 1))}, "only states are those"),
        (OWN | {"groups": (FULL, *STATES[:1])}, r"ranks \[None, 0\]; only states .* each of the 2 that hold"),
        (OWN | {"groups": (FULL, *STATES[::-1])}, "in order"),
        (OWN | {"groups": (FULL, of_rank(STATE, False), STATES[1])}, "in order"),
        ({"groups": (FULL, *STATES)}, "each of the 1 that hold the rest alike"),
    ],
)
def test_bad_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        uniform(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": -1}, "layer must be at least 0"),
        ({"kind": "key"}, "kind must be a PlaneKind"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"shape": ()}, "shape must be a tuple"),
        ({"shape": [1, 4, 4]}, "shape must be a tuple"),
        ({"nbytes": 31}, "nbytes is 31, but shape and dtype make 32"),
        ({"offset": 16}, "offset 16 must be a multiple of 128"),
        ({"offset": -128}, "offset must be at least 0"),
        ({"device_stride": 31}, "device_stride 31 is less than the plane's 32 bytes"),
    ],
)
def test_bad_plane_field_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "layer": 0,
        "kind": PlaneKind.KEY,
        "dtype": "float16",
        "shape": (1, 4, 4),
        "nbytes": 32,
        "offset": 0,
        "device_stride": 32,
    }
    assert Plane(**good).nbytes == 32
    with pytest.raises(LayoutError, match=message):
        Plane(**(good | change))


def test_planes_must_be_in_order_complete_and_disjoint() -> None:
    layout = uniform()
    key, value, *rest = layout.planes
    with pytest.raises(LayoutError, match="ordered by layer, then kind"):
        replace(layout, planes=(value, key, *rest))
    with pytest.raises(LayoutError, match="each layer and kind once"):
        replace(layout, planes=(key, key, *rest))
    with pytest.raises(LayoutError, match="layer 1 is not one of the 1 layers"):
        replace(layout, num_layers=1)
    with pytest.raises(LayoutError, match=r"offset 128 of value of layer 0 overlaps.*ends at 32768"):
        replace(layout, planes=(key, dataclasses.replace(value, offset=128), *rest))
    with pytest.raises(LayoutError, match="tuple of Plane"):
        replace(layout, planes=[key])


def test_scale_needs_the_plane_that_it_scales() -> None:
    layout = KVLayout.block_fp8(
        model="m", revision="r", block_size=64, num_layers=1, kv_heads=4, head_dim=128
    )
    without_value = tuple(plane for plane in layout.planes if plane.kind is not PlaneKind.VALUE)
    with pytest.raises(LayoutError, match="layer 0 has a value_scale but no value plane"):
        replace(layout, planes=without_value)


@pytest.mark.parametrize("record_bytes", [4096, 131073, 0])
def test_record_bytes_must_cover_all_planes_and_padding(record_bytes: int) -> None:
    with pytest.raises(LayoutError, match="record_bytes must be"):
        replace(uniform(), record_bytes=record_bytes)


def test_layers_without_keys_are_unsupported() -> None:
    with pytest.raises(UnsupportedLayoutError, match="layer 1 has no key plane"):
        replace(uniform(), planes=uniform().planes[:2])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.pop("tp_size"), "layout: missing tp_size"),
        (lambda data: data.pop("group"), "layout: missing group"),
        (lambda data: data.update(group=1), r"number of groups, got 1 for \[\]"),
        (lambda data: data.update(group=2, groups="04"), "number of groups"),
        (
            lambda data: data.update(group=1, groups=[{"block_size": 16}]),
            r"groups\[0\]: missing reach, tokens",
        ),
        (lambda data: data.update(rank=1), "layout: unknown rank"),
        (lambda data: data["planes"][1].pop("nbytes"), r"planes\[1\]: missing nbytes"),
        (lambda data: data["planes"][0].update(color="red"), r"planes\[0\]: unknown color"),
        (lambda data: data["planes"][0].update(kind="values"), "kind must be a PlaneKind, got 'values'"),
        (lambda data: data["planes"][0].update(kind=["key"]), "kind must be a PlaneKind"),
        (lambda data: data["planes"][0].update(shape=["2", 64, 128]), r"shape\[0\] must be an int"),
        (lambda data: data.update(planes=[3]), r"planes\[0\]: must be an object"),
        (lambda data: data.update(planes={}), "planes must be a tuple"),
        (lambda data: data.update(block_size="64"), "block_size must be an int"),
    ],
)
def test_from_json_refuses_wrong_fields(edit: Any, message: str) -> None:
    data = json.loads(uniform().to_json())
    edit(data)
    with pytest.raises(LayoutError, match=message):
        KVLayout.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "3", "{", b"\xff"])
def test_from_json_refuses_other_documents(text: str | bytes) -> None:
    with pytest.raises(LayoutError, match="layout: "):
        KVLayout.from_json(text)


def test_fingerprint_ignores_fields_without_effect_on_a_record() -> None:
    layout = uniform(num_draft_layers=1)
    strided = tuple(dataclasses.replace(plane, device_stride=65536) for plane in layout.planes)
    assert replace(layout, planes=strided).fingerprint == layout.fingerprint
    assert replace(layout, draft_block_ratio=2.0).fingerprint == layout.fingerprint


def test_pickling_keeps_layout_and_fingerprint() -> None:
    layout = uniform()
    fingerprint = layout.fingerprint
    copy = pickle.loads(pickle.dumps(layout))  # noqa: S301
    assert copy == layout
    assert copy.fingerprint == fingerprint


@pytest.mark.parametrize("vector", doc_vectors("layouts"), ids=lambda vector: vector["fingerprint"][:8])
def test_documented_fingerprints(vector: dict[str, Any]) -> None:
    layout = KVLayout.from_json(json.dumps(vector["layout"]))
    assert layout.fingerprint.hex() == vector["fingerprint"]
    assert oracle_fingerprint(vector["layout"]).hex() == vector["fingerprint"]


def test_each_rank_by_itself_has_a_layout_of_its_own() -> None:
    layout = KVLayout.uniform(
        model="m",
        revision="r",
        num_layers=2,
        block_size=4,
        kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
        tp_size=2,
    )
    ranks = [layout.of_rank(rank) for rank in range(2)]
    assert [each.tp_size for each in ranks] == [1, 1]
    assert len({layout.fingerprint, *(each.fingerprint for each in ranks)}) == 3
    assert ranks[0].of_rank(0) is ranks[0]
    with pytest.raises(LayoutError, match="rank 2"):
        layout.of_rank(2)


def test_a_rank_by_itself_has_its_own_states() -> None:
    layout = uniform(**OWN, groups=(*STATES, FULL, *STATES))
    assert engine_groups(layout.groups) == (0, 0, 1, 2, 2)
    assert (layout.state_groups, layout.page_groups) == ((0, 1, 3, 4), (2,))
    ranks = [layout.of_rank(rank) for rank in range(2)]
    assert [each.groups for each in ranks] == [(STATE, FULL, STATE)] * 2
    assert len({layout.fingerprint, *(each.fingerprint for each in ranks)}) == 3
    alike = replace(layout, groups=(STATE, FULL))
    assert alike.of_rank(0) == alike.of_rank(1)


@pytest.mark.parametrize(
    ("groups", "of_page", "states"),
    [
        ((), (0,), ()),
        ((WINDOW,), (0,), ()),
        ((FULL, WINDOW, WINDOW), (0, 1, 2), ()),
        ((CacheGroup(SIZE // 2, Reach.LAST, 64), FULL), (0, 0, 1), ()),
        ((STATE, STATE, FULL), (2,), (0, 1)),
        ((STATE,), (), (0,)),
    ],
)
def test_a_page_has_records_for_the_blocks_of_each_group(
    groups: tuple[CacheGroup, ...], of_page: tuple[int, ...], states: tuple[int, ...]
) -> None:
    layout = uniform(groups=groups)
    assert (layout.page_groups, layout.state_groups) == (of_page, states)
    assert layout.record_groups == (*reversed(of_page), *reversed(states))
    assert KVLayout.from_json(layout.to_json()) == layout


def test_groups_separate_fingerprints() -> None:
    given: list[tuple[CacheGroup, ...]] = [
        (),
        (WINDOW,),
        (FULL, WINDOW),
        (FULL, CacheGroup(SIZE, Reach.LAST, 32)),
        (WINDOW, FULL),
        (FULL, WINDOW, WINDOW),
        (FULL, CacheGroup(SIZE, Reach.CHUNK, 64)),
        (FULL, CacheGroup(SIZE // 2, Reach.LAST, 64)),
        (FULL, STATE),
        (STATE,),
    ]
    assert len({uniform(groups=each).fingerprint for each in given}) == len(given)
    assert "groups" not in json.loads(uniform().to_json())


@pytest.mark.parametrize(
    ("group", "tokens", "beyond"),
    [
        (FULL, 1000, 0),
        (STATE, 1000, 0),
        (CacheGroup(4, Reach.LAST, 6), 5, 0),
        (CacheGroup(4, Reach.LAST, 6), 9, 1),
        (CacheGroup(4, Reach.LAST, 6), 12, 1),
        (CacheGroup(4, Reach.LAST, 6), 13, 2),
        (CacheGroup(4, Reach.CHUNK, 8), 7, 0),
        (CacheGroup(4, Reach.CHUNK, 8), 8, 2),
        (CacheGroup(4, Reach.CHUNK, 8), 15, 2),
        (CacheGroup(4, Reach.CHUNK, 6), 6, 1),
    ],
)
def test_blocks_beyond_the_reach_of_the_next_token_are_of_no_use(
    group: CacheGroup, tokens: int, beyond: int
) -> None:
    assert group.blocks_beyond(tokens) == beyond


def test_a_group_that_is_not_known_is_refused_with_all_groups_of_the_model() -> None:
    require_served([("full", FULL), ("window", WINDOW)])
    with pytest.raises(
        UnsupportedLayoutError, match=r"2 groups \(full; other\).*serve this model without fdcache"
    ):
        require_served([("full", FULL), ("other", None)])
    with pytest.raises(UnsupportedLayoutError, match="no layers"):
        require_served([])


def test_planes_of_layers_may_have_any_shape() -> None:
    sizes = [[100, 30], [64], [5000]]
    kinds = (PlaneKind.KEY, PlaneKind.INDEXER)
    layout = KVLayout.of_layers(
        [[PlaneSpec(kind, "uint8", (size,)) for kind, size in zip(kinds, each)] for each in sizes],  # noqa: B905
        model="m",
        revision="r",
        block_size=16,
        num_draft_layers=1,
    )
    assert (layout.num_layers, layout.num_draft_layers) == (2, 1)
    assert [(plane.layer, plane.nbytes) for plane in layout.planes] == [(0, 100), (0, 30), (1, 64), (2, 5000)]
    assert KVLayout.from_json(layout.to_json()) == layout
