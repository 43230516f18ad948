"""The arrays of a plan's transfers as the native module reads them: types, lengths, slots, and their lifetime."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from fdcache import _core
from fdcache.devices.cpu import CpuDevice
from fdcache.metadata import CacheSwapMetadata, SwapPurpose
from fdcache.tasks import CpuEvent
from tests.swaps import Worker, block_hash, swap

ARRAYS = (
    "src_block_ids",
    "dst_block_ids",
    "src_generations",
    "dst_generations",
    "hash_values",
    "parent_hashes",
    "unverified",
)
HUGE = [-(1 << 31), 1 << 25, (1 << 31) - 1]
SLOTS = st.integers(-2, 12) | st.sampled_from(HUGE)


def made(pairs: list[tuple[int, int]], purpose: SwapPurpose = SwapPurpose.LOAD) -> CacheSwapMetadata:
    return replace(swap(purpose, pairs), unverified=np.zeros(len(pairs), np.uint8))


def is_sound(transfer: CacheSwapMetadata, device_blocks: int = 8, host_blocks: int = 8) -> bool:
    return _core.is_sound_transfer(transfer, transfer.to_host, device_blocks, host_blocks)


def alone(transfer: CacheSwapMetadata) -> bool:
    return _core.are_sound_transfers(None, transfer, None)


@given(
    st.lists(st.tuples(SLOTS, SLOTS), max_size=12),
    st.sampled_from(list(SwapPurpose)[:3]),
    *2 * [st.sampled_from([0, 3, 10, 1 << 26])],
)
def test_a_transfer_is_sound_when_its_slots_exist_and_none_is_written_twice(
    pairs: list[tuple[int, int]], purpose: SwapPurpose, device_blocks: int, host_blocks: int
) -> None:
    transfer = swap(purpose, pairs)
    device, host = transfer.device_slots.tolist(), transfer.host_slots.tolist()
    exist = all(0 <= slot < device_blocks for slot in device) and all(
        0 <= slot < host_blocks for slot in host
    )
    written = transfer.dst_block_ids.tolist()
    assert is_sound(transfer, device_blocks, host_blocks) == (exist and len(set(written)) == len(written))


@given(*2 * [st.lists(st.integers(-5, 60) | st.sampled_from(HUGE), max_size=40)])
def test_slots_are_disjoint_when_none_is_in_both(first: list[int], second: list[int]) -> None:
    both = [np.array(values, np.int32) for values in (first, second)]
    assert _core.are_disjoint_slots(*both) == set(first).isdisjoint(second)


@given(
    st.lists(st.integers(-5, 60) | st.sampled_from(HUGE), max_size=40), st.sampled_from([1, 3, 64, 2**31 - 1])
)
def test_extents_are_those_of_the_slots_that_exist(slots: list[int], size: int) -> None:
    expected = sorted({slot // size for slot in slots if slot >= 0})
    assert _core.extents_of(np.array(slots, np.int32), size) == expected


@given(*3 * [st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3)])
def test_transfers_are_sound_together_when_backups_share_no_slot(
    evict: list[tuple[int, int]], load: list[tuple[int, int]], backup: list[tuple[int, int]]
) -> None:
    transfers = [
        swap(SwapPurpose.EVICT, evict),
        swap(SwapPurpose.LOAD, load),
        swap(SwapPurpose.BACKUP, backup),
    ]
    device = {slot for slot, _ in evict} | {slot for _, slot in load}
    host = {slot for _, slot in evict}
    apart = device.isdisjoint(slot for slot, _ in backup) and host.isdisjoint(slot for _, slot in backup)
    assert _core.are_sound_transfers(*transfers) == apart


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_type_or_length_is_not_sound(name: str) -> None:
    transfer = made([(0, 1), (2, 3), (4, 5)])
    assert is_sound(transfer) and alone(transfer)
    array = getattr(transfer, name)
    wrong: list[Any] = [array.tolist(), array[:-1], array.astype(np.int64), array[:, None], memoryview(array)]
    for value in wrong:
        changed = replace(transfer, **{name: value})
        assert not is_sound(changed) and not alone(changed), value


def test_hashes_of_another_width_are_not_sound() -> None:
    transfer = made([(0, 1)])
    for name in ("hash_values", "parent_hashes"):
        for width in (31, 33):
            assert not is_sound(replace(transfer, **{name: np.zeros((1, width), np.uint8)}))


def test_arrays_need_not_be_contiguous_or_writable() -> None:
    every = asdict(made([(slot, slot) for slot in range(8)]))
    spread = {name: every[name][::-2] for name in ARRAYS}
    for array in spread.values():
        array.setflags(write=False)
    transfer = CacheSwapMetadata(**(every | spread))
    assert is_sound(transfer) and alone(transfer)
    assert not is_sound(transfer, device_blocks=7), "the slots are 7, 5, 3, 1"
    assert is_sound(replace(transfer, src_block_ids=spread["src_block_ids"][1:].repeat(2)[:4]))


def test_a_copy_keeps_the_arrays_that_it_reads() -> None:
    """They are used in place: a copy that starts after the plan was dropped still finds its hashes."""
    with Worker(device_blocks=2, host_blocks=2) as worker:
        core, device = worker.controller, CpuDevice()
        planes = core._parts.memory.planes
        assert planes is not None and core.host_arena is not None
        stream, gate = device.create_stream(), CpuEvent()
        stream.wait_event(gate)
        transfer = swap(SwapPurpose.BACKUP, [(0, 0), (1, 1)])
        names = [block_hash(name).copy() for name in ("first", "second")]
        transfer.hash_values = np.stack(names)
        copy = device.copy_blocks(planes, core.host_arena, transfer)
        copy.enqueue(stream, 0, planes.num_planes)
        transfer.hash_values = np.zeros((2, 32), np.uint8)
        del transfer
        gc.collect()
        noise = [np.full((2, 32), 255, np.uint8) for _ in range(64)]  # takes the memory if it was released
        gate.set()
        assert copy.done.wait(60.0) and noise
        headers = [core.host_arena.table.header(slot).hash for slot in range(2)]
        stream.close()
    assert headers == [name.tobytes() for name in names]
