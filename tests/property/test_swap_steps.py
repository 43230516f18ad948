"""The planner's steps move every byte, in any order that a GPU's queues allow."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache import _core
from fdcache.layout import KVLayout
from tests.property.test_round_trips import LAYOUTS
from tests.swap_steps import HostLane, Step

PER_EXTENT = 8
HOST_BLOCKS = 24
DEVICE_BLOCKS = 16


class Memory:
    """Planes and records of a layout: random bytes, except the gaps of a record."""

    def __init__(self, layout: KVLayout, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.layout = layout
        self.planes = [
            random.integers(0, 256, DEVICE_BLOCKS * plane.device_stride, dtype=np.uint8)
            for plane in layout.planes
        ]
        shape = (HOST_BLOCKS // PER_EXTENT, PER_EXTENT, layout.record_bytes)
        self.records = random.integers(0, 256, shape, dtype=np.uint8)
        gaps = np.ones(layout.record_bytes, bool)
        for plane in layout.planes:
            gaps[plane.offset : plane.offset + plane.nbytes] = False
        self.records[:, :, gaps] = 0
        headers = np.zeros(HOST_BLOCKS * 128, np.uint8)
        self.plane_table = _core.PlaneTable(
            [plane.ctypes.data for plane in self.planes],
            [plane.device_stride for plane in layout.planes],
            [plane.nbytes for plane in layout.planes],
            [plane.offset for plane in layout.planes],
            self.planes,
        )
        self.record_table = _core.RecordTable(
            [extent.ctypes.data for extent in self.records],
            PER_EXTENT,
            layout.record_bytes,
            [headers.ctypes.data + 128 * PER_EXTENT * i for i in range(len(self.records))],
            HOST_BLOCKS,
            (self.records, headers),
        )

    def record(self, slot: int) -> Any:
        return self.records[slot // PER_EXTENT, slot % PER_EXTENT]

    def block(self, slot: int, index: int) -> Any:
        plane = self.layout.planes[index]
        return self.planes[index][slot * plane.device_stride :][: plane.nbytes]

    def expect(self, pairs: list[tuple[int, int]], *, to_host: bool) -> tuple[list[Any], Any]:
        """Return the expected planes and records."""
        planes, records = [plane.copy() for plane in self.planes], self.records.copy()
        for device, host in pairs:
            record = records[host // PER_EXTENT, host % PER_EXTENT]
            for index, plane in enumerate(self.layout.planes):
                part = slice(plane.offset, plane.offset + plane.nbytes)
                if to_host:
                    record[part] = self.block(device, index)
                else:
                    at = device * plane.device_stride
                    planes[index][at : at + plane.nbytes] = self.record(host)[part]
        return planes, records


def draw_pairs(data: st.DataObject) -> list[tuple[int, int]]:
    """Draw device and host slots, by host slot, often in runs on either side."""
    count = data.draw(st.integers(0, DEVICE_BLOCKS))
    starts = st.integers(0, HOST_BLOCKS - count)
    hosts = data.draw(
        st.one_of(
            starts.map(lambda start: list(range(start, start + count))),
            st.permutations(range(HOST_BLOCKS)).map(lambda slots: slots[:count]),
        )
    )
    devices = data.draw(st.one_of(st.just(list(range(DEVICE_BLOCKS))), st.permutations(range(DEVICE_BLOCKS))))
    return list(zip(devices, sorted(hosts), strict=False))


def draw_policy(data: st.DataObject, layout: KVLayout) -> _core.SwapPolicy:
    sizes = st.sampled_from([1, 64, 1024, 4096, layout.record_bytes, 1 << 40])
    return _core.SwapPolicy(
        choice=data.draw(
            st.sampled_from(
                [
                    _core.SwapChoice.AUTO,
                    _core.SwapChoice.DIRECT,
                    _core.SwapChoice.STAGED,
                    _core.SwapChoice.KERNEL,
                ]
            )
        ),
        to_host=data.draw(st.lists(sizes, min_size=3, max_size=3)),
        to_device=data.draw(st.lists(sizes, min_size=3, max_size=3)),
        staging_bytes=1 << 20,
        kernel_ctas=data.draw(st.sampled_from([0, 2])),
        transpose_ctas=32,
        direct_pieces=data.draw(st.sampled_from([0, 1 << 20])),
        small_pieces=data.draw(st.sampled_from([0, 1 << 20])),
        batched=data.draw(st.booleans()),
    )


def draw_ranges(data: st.DataObject, planes: int) -> list[tuple[int, int]]:
    inner = sorted(data.draw(st.sets(st.integers(1, planes), max_size=3)) | {planes})
    return list(zip([0, *inner], inner, strict=False))


@settings(max_examples=150)
@given(data=st.data())
def test_any_order_of_the_queues_gives_the_same_bytes(data: st.DataObject) -> None:
    layout = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))]
    memory = Memory(layout, data.draw(st.integers(0, 100)))
    policy = draw_policy(data, layout)
    widest = max(
        after - before
        for before, after in zip(
            [plane.offset for plane in layout.planes],
            [*(plane.offset for plane in layout.planes[1:]), layout.record_bytes],
            strict=True,
        )
    )
    slot_bytes = data.draw(st.sampled_from([widest, 3 * widest, 2 * layout.record_bytes]))
    lane = HostLane(
        layout, memory.planes, slots=data.draw(st.integers(1, 3)), slot_bytes=max(slot_bytes, widest)
    )
    # Several batches follow each other through one ring without a wait of the host between them. Each leaves
    # alone what the others touch, as the manager's plans do.
    to_host = data.draw(st.booleans())
    pairs = draw_pairs(data)
    cut = data.draw(st.integers(0, len(pairs)))
    wanted = memory.expect(pairs, to_host=to_host)
    summed = []
    for part in (pairs[:cut], pairs[cut:]):
        devices, hosts = [pair[0] for pair in part], [pair[1] for pair in part]
        records = [memory.record(slot).ctypes.data for slot in hosts]
        for first, last in draw_ranges(data, layout.num_planes):
            steps = _core.plan_steps(
                policy,
                to_host,
                memory.plane_table,
                memory.record_table,
                np.array(devices, np.int32),
                np.array(hosts, np.int32),
                first,
                last,
                max(slot_bytes, widest),
                data.draw(st.booleans()),
                data.draw(st.booleans()),
            )
            lane.enqueue(steps, devices, records, to_host=to_host)
        summed.append(lane.summed)
        lane.summed = []
    lane.finish(Random(data.draw(st.integers(0, 1000))))
    planes, expected_records = wanted
    assert all(np.array_equal(plane, other) for plane, other in zip(memory.planes, planes, strict=True))
    assert np.array_equal(memory.records, expected_records)
    if to_host:
        for part, sums in zip((pairs[:cut], pairs[cut:]), summed, strict=True):
            assert sorted(sums) == [
                (row, index) for row in range(len(part)) for index in range(layout.num_planes)
            ]


def staged_load(drop: str | None) -> bool:
    """Return True when a load through a ring of two slots arrives in every order, without one kind of step."""
    layout = LAYOUTS["uniform"]
    limits = [1 << 40, 1, 1 << 40]
    policy = _core.SwapPolicy(_core.SwapChoice.STAGED, limits, limits, 1 << 20, 2, 32, 0, 0, True)
    pairs = [(slot, slot) for slot in range(DEVICE_BLOCKS)]
    for seed in range(20):
        memory = Memory(layout, seed)
        wanted, _ = memory.expect(pairs, to_host=False)
        slots = np.arange(DEVICE_BLOCKS, dtype=np.int32)
        steps: list[Step] = _core.plan_steps(
            policy,
            False,
            memory.plane_table,
            memory.record_table,
            slots,
            slots,
            0,
            layout.num_planes,
            2 * layout.record_bytes,
            False,
            False,
        )
        lane = HostLane(layout, memory.planes, slots=2, slot_bytes=2 * layout.record_bytes)
        records = [memory.record(slot).ctypes.data for slot in range(DEVICE_BLOCKS)]
        kept = [step for step in steps if step[0] != drop]
        lane.enqueue(kept, list(range(DEVICE_BLOCKS)), records, to_host=False)
        lane.finish(Random(seed))
        if not all(np.array_equal(plane, other) for plane, other in zip(memory.planes, wanted, strict=True)):
            return False
    return True


@pytest.mark.parametrize("drop", ["hand over", "free"])
def test_a_missing_wait_is_detected(drop: str) -> None:
    assert staged_load(None)
    assert not staged_load(drop)
