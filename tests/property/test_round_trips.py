"""Permuted slots over every kind of layout: what comes back is what went, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache import _core
from fdcache.controller import arena
from fdcache.layout import KVLayout
from tests.swaps import Worker, plan

COMMON: dict[str, Any] = {"model": "m", "revision": "r"}
LAYOUTS = {
    "uniform": KVLayout.uniform(
        **COMMON, num_layers=3, block_size=16, kv_heads=2, head_dim=16, dtype="bfloat16"
    ),
    "odd tails": KVLayout.uniform(**COMMON, num_layers=3, block_size=3, kv_heads=1, head_dim=7, dtype="int8"),
    "half words": KVLayout.uniform(
        **COMMON, num_layers=2, block_size=5, kv_heads=3, head_dim=9, dtype="float16"
    ),
    "over a chunk": KVLayout.uniform(
        **COMMON, num_layers=1, block_size=64, kv_heads=3, head_dim=43, dtype="float16"
    ),
    "mla": KVLayout.mla(
        **COMMON, num_layers=3, block_size=16, latent_dim=72, dtype="bfloat16", indexer_dim=9
    ),
    "fp8": KVLayout.block_fp8(**COMMON, num_layers=2, block_size=16, kv_heads=3, head_dim=24),
    "draft": KVLayout.uniform(
        **COMMON,
        num_layers=2,
        num_draft_layers=2,
        draft_block_ratio=1.5,
        block_size=8,
        kv_heads=1,
        head_dim=10,
        dtype="float32",
    ),
}
BLOCKS = 6


@pytest.fixture(autouse=True, scope="module")
def small_extents() -> Iterator[None]:
    """Arenas of several extents: two records or one in each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "EXTENT_BYTES", 2 * 4096)
        yield


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=15)
@given(data=st.data())
def test_blocks_come_back_as_they_went(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    slots = st.permutations(range(BLOCKS))
    out, host, back = data.draw(slots), data.draw(slots), data.draw(slots)
    count = data.draw(st.integers(0, BLOCKS))
    options: dict[str, Any] = {
        "copy_threads": data.draw(st.integers(1, 3)),
        "first_group_layers": data.draw(st.integers(1, 3)),
        "group_layers": data.draw(st.integers(1, 3)),
    }
    seed = data.draw(st.integers(0, 1000))
    with Worker(layout, device_blocks=BLOCKS, host_blocks=BLOCKS, seed=seed, **options) as worker:
        (saved,) = worker.run(plan(1, evict=list(zip(out, host, strict=True))[:count])).results
        before = [worker.block(slot) for slot in out]
        for slot in range(BLOCKS):
            worker.scramble(slot)
        expected = [worker.block(slot) for slot in range(BLOCKS)]
        for position in range(count):
            expected[back[position]] = before[position]
        (loaded,) = worker.run(plan(2, load=list(zip(host, back, strict=True))[:count])).results
        assert saved.success and loaded.success
        assert saved.copied_bytes == loaded.copied_bytes == count * layout.payload_bytes
        assert [worker.block(slot) for slot in range(BLOCKS)] == expected
        offsets, sizes = zip(*((plane.offset, plane.nbytes) for plane in layout.planes), strict=True)
        sums = [_core.record_checksum(worker.record(slot), offsets, sizes) for slot in host[:count]]
        assert saved.checksums.tolist() == sums
