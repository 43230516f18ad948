"""The host arena."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from fdcache.controller import arena as arena_module
from fdcache.controller.arena import HostArena
from fdcache.devices.base import PinnedMemory
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import HostMemoryError
from tests.swaps import uniform_layout

GIB = 1 << 30


def test_records_are_page_aligned_apart_and_within_one_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = uniform_layout()
    monkeypatch.setattr(arena_module, "EXTENT_BYTES", 3 * layout.record_bytes + 1)
    arena = HostArena(layout, 10, CpuDevice())
    assert {extent.nbytes for extent in arena.extents} == {3 * layout.record_bytes}
    starts = [arena.table.record(slot).ctypes.data for slot in range(10)]
    assert all(start % 4096 == 0 for start in starts)
    for slot, start in enumerate(starts):
        extent = arena.extents[slot // 3]
        assert extent.address <= start
        assert start + layout.record_bytes <= extent.address + extent.nbytes
        arena.table.record(slot)[:] = slot
    assert all((arena.table.record(slot) == slot).all() for slot in range(10))
    for slot in (-1, 10):
        with pytest.raises(IndexError):
            arena.table.record(slot)


def test_a_record_view_keeps_the_arena_alive() -> None:
    view = HostArena(uniform_layout(), 2, CpuDevice()).table.record(1)
    view[:] = 7
    assert int(np.sum(view)) == 7 * len(view)


def test_refuses_no_blocks() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        HostArena(uniform_layout(), 0, CpuDevice())


def test_says_how_many_blocks_would_fit() -> None:
    with pytest.raises(HostMemoryError, match=r"ask for at most \d+ blocks"):
        HostArena(uniform_layout(), 1 << 40, CpuDevice())


class DeviceOnNode(CpuDevice):
    """A device that sits on the first NUMA node."""

    numa_node = 0  # type: ignore[assignment]


def memory_policy(address: int) -> str:
    """Return the kernel's entry for the mapping that begins there; skip where there is none."""
    try:
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    except FileNotFoundError:
        pytest.skip("this kernel does not tell memory policies")
    return next(line for line in lines if line.startswith(f"{address:x} "))


def mapping_of(address: int) -> dict[str, str]:
    """The fields of the mapping that begins there."""
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split()[0]:
            inside = line.startswith(f"{address:x}-")
        elif inside:
            fields[name] = value.strip()
    return fields


def test_records_lie_on_the_node_of_the_device() -> None:
    layout = uniform_layout()
    status = Path("/proc/self/status").read_text()
    near, anywhere = HostArena(layout, 4, DeviceOnNode()), HostArena(layout, 4, CpuDevice())
    if "prefer" not in memory_policy(near.extents[0].address) and "Seccomp:\t2" in status:
        pytest.skip("this container refuses memory policies")
    assert "prefer" in memory_policy(near.extents[0].address)
    assert "prefer" not in memory_policy(anywhere.extents[0].address)


def test_every_page_is_there_at_once_huge_where_the_system_has_such() -> None:
    threads = set(Path("/proc/self/task").iterdir())
    layout = uniform_layout(num_layers=16, block_size=64, kv_heads=8, head_dim=64)
    arena = HostArena(layout, 12, CpuDevice())
    for extent in arena.extents:
        fields = mapping_of(extent.address)
        assert fields["Rss"] == fields["Size"] == f"{extent.nbytes // 1024} kB"
        if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
            assert "hg" in fields["VmFlags"].split()
    assert set(Path("/proc/self/task").iterdir()) <= threads


def test_progress_counts_the_extents_that_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = uniform_layout()
    monkeypatch.setattr(arena_module, "EXTENT_BYTES", 3 * layout.record_bytes)
    told: list[tuple[int, int]] = []
    HostArena(layout, 10, CpuDevice(), lambda ready, total: told.append((ready, total)))
    assert told == [(3 * (i + 1) * layout.record_bytes, 12 * layout.record_bytes) for i in range(4)]


def test_a_large_arena_says_in_the_log_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = uniform_layout()
    monkeypatch.setattr(arena_module, "EXTENT_BYTES", 3 * layout.record_bytes)
    caplog.set_level("INFO", logger=arena_module.__name__)
    HostArena(layout, 10, CpuDevice())
    assert caplog.messages == ["host arena: 10 blocks in 4 extents ready"]
    monkeypatch.setattr(arena_module, "_LOG_INTERVAL", 0.0)
    HostArena(layout, 10, CpuDevice())
    assert caplog.messages[1:-1] == [f"host arena: {done} of 4 extents ready" for done in (1, 2, 3, 4)]


class Pinned:
    """An object that keeps an extent pinned."""

    def __init__(self, address: int, owner: object) -> None:
        self.device_address = address
        self.owner = owner


class UnpinnableDevice(CpuDevice):
    """Pins some extents and refuses the next, as a system does whose limit is reached."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most
        self.pinned: list[weakref.ref[Pinned]] = []

    def pin_memory(self, address: int, nbytes: int, owner: object) -> PinnedMemory:
        if self.left == 0:
            raise HostMemoryError("no more may be locked")
        self.left -= 1
        pinned = Pinned(address, owner)
        self.pinned.append(weakref.ref(pinned))
        return pinned


def test_memory_that_cannot_be_pinned_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = uniform_layout()
    monkeypatch.setattr(arena_module, "EXTENT_BYTES", 3 * layout.record_bytes)
    device = UnpinnableDevice(most=2)
    with pytest.raises(HostMemoryError, match="locked"):
        HostArena(layout, 10, device)
    gc.collect()
    assert len(device.pinned) == 2 and all(pinned() is None for pinned in device.pinned)
