"""Regions of packed memory, and the error without NIXL."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache import _core
from fdcache._core import PlaneTable
from fdcache.errors import TransferNotFoundError
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.factory import require_connector
from fdcache.transfer.nixl import find_nixl
from fdcache.transfer.packed_memory import CHUNK_BYTES, Packing, Region, Regions
from tests.seeds import budget


@settings(max_examples=budget(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5 * CHUNK_BYTES), st.booleans()), max_size=60))
def test_regions_never_overlap_and_are_refused_only_without_a_gap(steps: list[tuple[int, bool]]) -> None:
    memory = Regions(16 * CHUNK_BYTES)
    taken: list[Region] = []
    for nbytes, frees in steps:
        if frees and taken:
            memory.free(taken.pop(nbytes % len(taken)))
        used = np.zeros(16, np.bool_)
        for each in taken:
            assert not used[each.first : each.first + each.chunks].any()
            used[each.first : each.first + each.chunks] = True
        region = memory.take(nbytes)
        chunks = -(-nbytes // CHUNK_BYTES)
        gaps = np.lib.stride_tricks.sliding_window_view(~used, chunks).all(axis=1)
        assert (region is None) == (not gaps.any())
        if region is not None:
            assert region.chunks == chunks
            taken.append(region)
    assert memory.bytes_taken == sum(each.chunks for each in taken) * CHUNK_BYTES


def test_planes_are_packed_one_block_after_the_other() -> None:
    packing = Packing([100, 200, 64, 8], 1, 3)
    assert packing.record_bytes == 256 + 64
    assert packing.offsets == (0, 0, 256, 0)
    assert packing.strides[1:3] == (320, 320)
    by_plane = Packing([100, 200, 64, 8], 1, 3, by_plane=5)
    assert by_plane.offsets == (0, 0, 5 * 256, 0)
    assert by_plane.strides[1:3] == (256, 64)


@settings(max_examples=budget(100), deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12, unique=True), st.integers(0, 2**32))
def test_runs_of_planes_are_the_bytes_of_the_blocks_and_never_adjoin(slots: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    mine = np.array(slots, np.int32)
    theirs = np.where(random.random(len(slots)) < 0.7, mine + 20, mine + 40).astype(np.int32)
    sizes, gap = [8, 24, 16], int(random.integers(0, 2)) * 8
    rows = [[(at + 1000 * i, size + gap) for i, size in enumerate(sizes)] for at in (1 << 40, 1 << 20)]
    tables = [PlaneTable([a for a, _ in row], [s for _, s in row], sizes, [0, 8, 32], None) for row in rows]
    runs = list(zip(*_core.plane_runs(tables[0], theirs, tables[1], mine, 1, 3), strict=True))
    expected = [
        (rows[0][plane][0] + t * rows[0][plane][1] + i, rows[1][plane][0] + m * rows[1][plane][1] + i)
        for plane in (1, 2)
        for t, m in zip(theirs.tolist(), mine.tolist(), strict=True)
        for i in range(sizes[plane])
    ]
    assert [(int(a) + i, int(b) + i) for a, b, n in runs for i in range(int(n))] == expected
    adjoins = [a + n == c and b + n == d for (a, b, n), (c, d, _) in itertools.pairwise(runs)]
    assert not any(adjoins)


def test_a_missing_package_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransferNotFoundError, match=r"pip install 'fdcache\[nixl\]'"):
        require_connector(PeerSettings(connector="rdma"))


def test_a_package_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nixl_cu12.py").write_text("import libucx_of_another_world\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nixl_cu12", raising=False)
    with pytest.raises(TransferNotFoundError, match="libucx_of_another_world"):
        find_nixl()
