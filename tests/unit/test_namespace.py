"""Memory of a namespace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fdcache import _core
from fdcache.layout import KVLayout
from fdcache.service.server.arena import Arena
from fdcache.service.server.namespace_memory import READY_HEADER, NamespaceMemory
from fdcache.service.wire.shared_memory import Geometry
from tests.property.test_round_trips import COMMON
from tests.service_engine import layout as service_layout
from tests.swaps import uniform_layout

EXTENT = 1 << 16


def memory_of(arena: Arena, layout: KVLayout, name: str) -> tuple[NamespaceMemory, Geometry]:
    geometry = Geometry(str(arena.directory), f"fdcache-t-{name}", 1, EXTENT, layout.record_bytes, 4096)
    return NamespaceMemory(arena, layout, geometry), geometry


def test_padding_of_an_extent_from_another_namespace_is_cleared(tmp_path: Path) -> None:
    arena = Arena(tmp_path, "t")
    arena.lock()
    arena.create(16 * EXTENT)
    assert arena.manifest.extent_bytes == EXTENT
    left, _ = memory_of(arena, uniform_layout(), "00112233aabbccdd")
    for _each in range(16):
        left.add_extent()
    for extent in left.extents(0):
        extent.data[:] = 0xFF
    while left.num_extents:
        left.remove_extent()
    layout = KVLayout.block_fp8(**COMMON, num_layers=2, block_size=16, kv_heads=1, head_dim=72)
    taken, geometry = memory_of(arena, layout, "ffeeddcc00112233")
    taken.add_extent()
    (extent,) = taken.extents(0)
    planes = np.zeros(layout.record_bytes, np.bool_)
    for plane in layout.planes:
        planes[plane.offset : plane.offset + plane.nbytes] = True
    records = extent.records(geometry)
    assert not planes.all() and len(records) == geometry.records_per_extent > 1
    assert not records[:, ~planes].any()
    assert (records[:, planes] == 0xFF).all(), "planes are not cleared: that would take the time of a copy"
    del records, extent
    taken.close()
    arena.close(discard=True)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("wrong", ["state", "generation", "hash"])
def test_a_block_is_complete_only_with_its_header_on_every_rank(
    tmp_path: Path, rank: int, wrong: str
) -> None:
    arena = Arena(tmp_path, "t")
    arena.lock()
    arena.create(16 * EXTENT)
    assert arena.manifest.extent_bytes == EXTENT
    layout = service_layout(ranks=2)
    memory, _ = memory_of(arena, layout, "00112233aabbccdd")
    memory.add_extent()
    slots, generations = np.array([0, 3], np.int32), np.array([5, 6], np.uint32)
    hashes = np.array([[1] * 32, [2] * 32], np.uint8)

    def write(rank: int, at: int, wrong: str = "") -> None:
        state = READY_HEADER - 1 if wrong == "state" else READY_HEADER
        generation = int(generations[at]) - (wrong == "generation")
        key = bytes(32) if wrong == "hash" else hashes[at].tobytes()
        header = _core.SlotHeader(state, generation, key, bytes(32), layout.fingerprint, 0, 0)
        memory.tables[rank].set_header(int(slots[at]), header)

    for each in (0, 1):
        write(each, 0)
        write(each, 1, wrong if each == rank else "")
    assert memory.are_complete(slots, generations, hashes).tolist() == [True, False]
    write(rank, 1)
    assert memory.are_complete(slots, generations, hashes).tolist() == [True, True]
    memory.close()
    arena.close(discard=True)
