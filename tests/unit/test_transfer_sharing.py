"""Which ranks and which bytes meet between instances of unequal tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache import _core
from fdcache.errors import TransferError, UnsupportedLayoutError
from fdcache.groups import CacheGroup, Reach
from fdcache.layout import KVLayout
from fdcache.transfer.connector import LocalPlanes, agreed_fingerprint, share
from fdcache.transfer.messages import Identity, difference
from tests.seeds import budget


def kept_by_each(layout: KVLayout, tp_size: int) -> KVLayout:
    """A layout of latents that every rank keeps for itself, as FastDeploy's do."""
    return replace(layout, tp_size=tp_size)


def gqa(heads: int = 8, tp_size: int = 1) -> KVLayout:
    whole = KVLayout.block_fp8(
        model="m", revision="1", num_layers=2, block_size=8, kv_heads=heads, head_dim=24
    )
    return whole.with_tp_size(tp_size)


MLA = KVLayout.mla(
    model="m", revision="1", num_layers=2, block_size=8, latent_dim=24, dtype="bfloat16", indexer_dim=8
)

OTHER_MLA = replace(MLA, revision="2")


@settings(max_examples=budget(50), deadline=None)
@given(st.integers(0, 3), st.integers(0, 3))
def test_every_byte_of_decode_is_read_once_and_is_the_byte_that_prefill_has(a: int, b: int) -> None:
    prefill, decode = gqa(tp_size=2**a), gqa(tp_size=2**b)
    sides = [share(prefill, rank, 2**b) for rank in range(2**a)]
    for rank in range(2**b):
        mine = share(decode, rank, 2**a)
        covered = [np.zeros(plane.nbytes, np.uint8) for plane in decode.planes]
        for source, joint in mine.sources:
            served = sides[source].readers[rank - sides[source].first_reader if b > a else 0]
            if joint is None:
                return
            if served is not None:
                assert served == joint.theirs
            assert joint.theirs.sizes == joint.own.sizes
            assert joint.theirs.positions == joint.own.positions
            for index, plane in enumerate(covered):
                start, size = joint.own.starts[index], joint.own.sizes[index]
                plane[start : start + size] += 1
                head = decode.planes[index].nbytes // decode.planes[index].shape[0]
                in_model = rank * decode.planes[index].nbytes + start
                assert in_model == source * prefill.planes[index].nbytes + joint.theirs.starts[index]
                assert start % head == size % head == 0
        assert all((plane == 1).all() for plane in covered)


@given(st.integers(0, 2**32))
@settings(max_examples=budget(20), deadline=None)
def test_sums_of_the_head_ranges_add_up_to_that_of_the_block(seed: int) -> None:
    layout, blocks = gqa(), 3
    random = np.random.default_rng(seed)
    arrays = [random.integers(0, 256, (blocks, plane.nbytes), np.uint8) for plane in layout.planes]
    strides = tuple(plane.nbytes for plane in layout.planes)
    addresses = tuple(each.ctypes.data for each in arrays)
    sizes, offsets = list(strides), [plane.offset for plane in layout.planes]
    table = _core.PlaneTable(list(addresses), list(strides), sizes, offsets, arrays)
    planes = LocalPlanes(layout, table, blocks, addresses, strides)
    slots = np.arange(blocks, dtype=np.int32)
    whole, *parts = (
        _core.sum_planes(planes.table_of(pieces), blocks, slots, 0, layout.num_planes)
        for pieces in (None, *share(layout, 0, 4).readers)
    )
    assert len(parts) == 4
    assert (whole == np.sum(parts, axis=0, dtype=np.uint64)).all()


def test_latent_planes_are_read_from_one_rank() -> None:
    four, two = MLA.with_tp_size(4), MLA.with_tp_size(2)
    assert four.payload_bytes == two.payload_bytes
    decode = share(two, 1, 4)
    assert [rank for rank, _ in decode.sources] == [2]
    assert decode.declined == (3,)
    assert [rank for rank, _ in share(four, 3, 2).sources] == [1]
    assert len(share(two, 1, 4).readers) == 2
    assert len(share(four, 3, 2).readers) == 1


@pytest.mark.parametrize(
    ("layout", "peer", "words"),
    [
        (gqa(tp_size=2), 3, "one has to be a multiple of the other"),
        (gqa(heads=3), 2, "3 heads each, cannot be divided evenly"),
        (
            KVLayout.uniform(
                model="m", revision="1", num_layers=1, block_size=1, kv_heads=2, head_dim=3, dtype="int8"
            ),
            2,
            "no multiple of 8",
        ),
    ],
)
def test_what_does_not_divide_is_refused(layout: KVLayout, peer: int, words: str) -> None:
    with pytest.raises(TransferError, match=f"FDCACHE_TRANSFER_PEER_RANKS.*{words}"):
        share(layout, 0, peer)


def test_states_beside_latents_go_between_as_many_ranks_alone() -> None:
    """The states are each rank's own, so that the latents' records are kept by each as well."""
    layout = replace(kept_by_each(MLA, 2), groups=(CacheGroup(8), CacheGroup(8, Reach.STATE)))
    words = "FDCACHE_TRANSFER_PEER_RANKS=1: .* states beside latents.*give all instances 2 ranks"
    with pytest.raises(TransferError, match=words):
        share(layout, 0, 1, (8,))
    assert share(layout, 1, 2, (8,)).sources == ((1, None),)  # the remedy: all of it, from the same rank


def test_a_layout_of_another_tensor_parallelism_comes_back() -> None:
    assert gqa(tp_size=4).with_tp_size(1) == gqa()
    assert gqa(tp_size=4).planes[0].shape[0] == 2
    with pytest.raises(UnsupportedLayoutError, match="cannot be divided evenly"):
        gqa().with_tp_size(16)


def identity(layout: KVLayout, rank: int, peer_ranks: int) -> Identity:
    sharing = share(layout, rank, peer_ranks)
    return Identity(
        boot=bytes(16),
        address="ipc:///a",
        role="mixed",
        connector="ipc",
        block_size=layout.block_size,
        tp_size=layout.tp_size,
        rank=rank,
        planes=layout.num_planes,
        draft_layers=0,
        lookahead_tokens=0,
        record_bytes=layout.record_bytes,
        fingerprint=agreed_fingerprint(layout),
        machine="m",
        live=None,
        memory=b"",
        peer_tp_size=sharing.layout.tp_size,
        peer_fingerprint=agreed_fingerprint(sharing.layout),
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "field"),
    [
        (identity(gqa(tp_size=4), 2, 2), identity(gqa(tp_size=2), 1, 4), None),
        (identity(gqa(tp_size=2), 1, 4), identity(gqa(tp_size=4), 3, 2), None),
        (identity(MLA.with_tp_size(2), 1, 1), identity(MLA, 0, 2), None),
        (identity(kept_by_each(MLA, 2), 0, 1), identity(MLA, 0, 2), None),
        (identity(MLA, 0, 4), identity(kept_by_each(MLA, 4), 3, 1), None),
        (identity(kept_by_each(MLA, 2), 1, 2), identity(MLA.with_tp_size(2), 1, 2), None),
        (identity(kept_by_each(MLA, 2), 0, 1), identity(OTHER_MLA, 0, 2), "fingerprint"),
        (identity(gqa(tp_size=4), 2, 2), identity(gqa(tp_size=2), 0, 4), "rank"),
        (identity(gqa(tp_size=4), 2, 4), identity(gqa(tp_size=2), 1, 4), "tp_size"),
        (identity(gqa(tp_size=4), 2, 2), identity(gqa(tp_size=2), 1, 2), "tp_size"),
        (identity(gqa(16, tp_size=4), 2, 2), identity(gqa(tp_size=2), 1, 4), "fingerprint"),
    ],
)
def test_identities_that_do_not_fit_are_refused_by_field(
    prefill: Identity, decode: Identity, field: str | None
) -> None:
    refused = difference(prefill, decode)
    assert (None if refused is None else refused.field) == field
