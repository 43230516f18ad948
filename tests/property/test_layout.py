import dataclasses
import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from fdcache.groups import CacheGroup, Reach, groups_of_ranks
from fdcache.layout import RECORD_ALIGNMENT, KVLayout
from fdcache.layout_planes import DTYPE_BYTES, PLANE_ALIGNMENT
from tests.format_oracle import oracle_fingerprint

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
common = st.fixed_dictionaries(
    {
        "model": names,
        "revision": names,
        "block_size": st.integers(1, 128),
        "num_layers": st.integers(1, 5),
        "num_draft_layers": st.integers(0, 2),
        "tp_size": st.integers(1, 8),
        "draft_block_ratio": st.floats(1, 8),
    }
)


@st.composite
def groups_of(draw: st.DrawFn, block_size: int) -> tuple[CacheGroup, ...]:
    sizes = [block_size // parts for parts in range(1, 17) if block_size % parts == 0]
    found = []
    for reach in draw(st.lists(st.sampled_from(Reach), max_size=4)):
        tokens = draw(st.integers(1, 1 << 40)) if reach in (Reach.LAST, Reach.CHUNK) else 0
        size = draw(st.sampled_from(sizes))
        found.append(CacheGroup(size, reach, tokens))
    return () if found == [CacheGroup(block_size)] else tuple(found)


heads = st.fixed_dictionaries({"kv_heads": st.integers(1, 4), "head_dim": st.integers(1, 130)})
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    options: dict[str, Any] = draw(common)
    divisors = [each for each in range(1, 9) if not options["tp_size"] % each]
    replicas = options["replicas"] = draw(st.sampled_from(divisors))
    groups = draw(groups_of(options["block_size"]))
    options["groups"] = groups_of_ranks(groups, replicas) if draw(st.booleans()) else groups
    head_options: dict[str, Any] = draw(heads)
    match draw(st.sampled_from(["uniform", "mla", "block_fp8"])):
        case "uniform":
            return KVLayout.uniform(**options, **head_options, dtype=draw(dtypes))
        case "mla":
            dims = draw(st.tuples(st.integers(1, 600), st.integers(0, 140)))
            return KVLayout.mla(**options, latent_dim=dims[0], indexer_dim=dims[1], dtype=draw(dtypes))
        case _:
            return KVLayout.block_fp8(**options, **head_options)


@given(layouts())
def test_json_round_trip_keeps_layout_and_fingerprint(layout: KVLayout) -> None:
    copy = KVLayout.from_json(layout.to_json())
    assert copy == layout
    assert copy.fingerprint == layout.fingerprint


@given(layouts())
def test_planes_are_aligned_disjoint_and_inside_the_record(layout: KVLayout) -> None:
    end = 0
    for plane in layout.planes:
        assert plane.offset % PLANE_ALIGNMENT == 0
        assert end <= plane.offset < end + PLANE_ALIGNMENT
        end = plane.offset + plane.nbytes
    assert end <= layout.record_bytes < end + RECORD_ALIGNMENT
    assert layout.record_bytes % RECORD_ALIGNMENT == 0
    assert sum((layout.layer_planes(i) for i in range(layout.total_layers)), ()) == layout.planes


@given(layouts())
def test_fingerprint_is_the_documented_one(layout: KVLayout) -> None:
    assert layout.fingerprint == oracle_fingerprint(json.loads(layout.to_json()))


@given(layouts(), st.data())
def test_fields_of_the_record_change_the_fingerprint(layout: KVLayout, data: st.DataObject) -> None:
    changes: list[dict[str, Any]] = [
        {"model": layout.model + "x"},
        {"revision": layout.revision + "x"},
        {"model": layout.model + layout.revision[:1], "revision": layout.revision[1:] or "x"},
        {"block_size": layout.block_size + 1, "groups": ()},
        {"tp_size": layout.tp_size + layout.replicas},
        {"record_bytes": layout.record_bytes + RECORD_ALIGNMENT},
        {"num_layers": layout.num_layers + 1, "num_draft_layers": layout.num_draft_layers - 1},
    ]
    if layout.num_draft_layers == 0:
        changes.pop()
    for change in changes:
        assert dataclasses.replace(layout, **change).fingerprint != layout.fingerprint, change

    position = data.draw(st.integers(0, layout.num_planes - 1), label="plane")
    plane = layout.planes[position]
    roomy = dataclasses.replace(layout, record_bytes=layout.record_bytes + 2 * RECORD_ALIGNMENT)
    later = tuple(dataclasses.replace(p, offset=p.offset + 4096) for p in layout.planes[position:])
    flat = dataclasses.replace(plane, shape=(*plane.shape, 1))
    same_size = {"int8": "uint8", "uint8": "int8", "float16": "bfloat16", "bfloat16": "float16"}
    variants = [
        (*layout.planes[:position], *later),
        (*layout.planes[:position], flat, *layout.planes[position + 1 :]),
    ]
    if plane.dtype in same_size:
        other = dataclasses.replace(plane, dtype=same_size[plane.dtype])
        variants.append((*layout.planes[:position], other, *layout.planes[position + 1 :]))
    for planes in variants:
        assert dataclasses.replace(roomy, planes=planes).fingerprint != roomy.fingerprint


@given(layouts(), st.integers(1, 4))
def test_ranks_that_hold_the_same_do_not_change_the_fingerprint(layout: KVLayout, times: int) -> None:
    assume(all(group.rank is None for group in layout.groups))
    more: dict[str, Any] = {"tp_size": layout.tp_size * times, "replicas": layout.replicas * times}
    assert dataclasses.replace(layout, **more).fingerprint == layout.fingerprint
    assert dataclasses.replace(layout, **more).block_bytes == layout.block_bytes


@given(layouts(), st.integers(0, 10**6))
def test_draft_planes_never_have_fewer_blocks(layout: KVLayout, blocks: int) -> None:
    assert blocks <= layout.draft_blocks(blocks) <= blocks * layout.draft_block_ratio
