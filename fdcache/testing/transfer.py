"""Test suite that every transfer connector must pass, and planes with known bytes to test one with.

    from fdcache.testing.transfer import TransferConformance, PeerPlanes

    class TestMyConnector(TransferConformance):
        @pytest.fixture
        def open_peer(self, tmp_path):
            def open_one(layout, num_blocks):
                planes = PeerPlanes(layout, num_blocks, tmp_path)
                return planes, MyConnector(planes.context(...))
            return open_one

``open_peer(layout, num_blocks)`` may be called several times in one test; each call returns another rank's planes and
its connector. The suite closes every connector that it opens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fdcache import _core
from fdcache.devices.shared_planes import SharedPlanes
from fdcache.layout import KVLayout
from fdcache.metadata import Int32Array, UInt64Array
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import (
    ConnectorStats,
    LocalPlanes,
    Packer,
    ReadEnd,
    ReadOrder,
    ReadOutcome,
    TransferConnector,
    TransferContext,
)

__all__ = ["PeerPlanes", "TransferConformance", "transfer_layout"]

_TIMEOUT = 30.0


def transfer_layout() -> KVLayout:
    """Return a small layout of several planes."""
    return KVLayout.uniform(
        block_size=16,
        kv_heads=2,
        head_dim=16,
        dtype="bfloat16",
        model="conformance",
        revision="1",
        num_layers=3,
    )


class PeerPlanes:
    """Planes of one rank in shared memory, filled with bytes of their own."""

    def __init__(self, layout: KVLayout, num_blocks: int, directory: Path) -> None:
        self.layout, self.num_blocks, self.boot = layout, num_blocks, os.urandom(16)
        self.shared = SharedPlanes(layout, num_blocks, directory)
        self.arrays = [each.reshape(num_blocks, -1).view(np.uint8) for each in self.shared.tensors()]
        addresses = tuple(each.ctypes.data for each in self.arrays)
        strides = tuple(plane.device_stride for plane in layout.planes)
        sizes, offsets = [plane.nbytes for plane in layout.planes], [plane.offset for plane in layout.planes]
        table = _core.PlaneTable(list(addresses), list(strides), sizes, offsets, self.shared)
        self.planes = LocalPlanes(layout, table, num_blocks, addresses, strides)
        self.ended = threading.Event()

    def context(self, settings: PeerSettings) -> TransferContext:
        """Return what a connector of these planes is made from."""
        return TransferContext(self.planes, settings, self.boot, self.ended.set)

    def fill(self, seed: int) -> None:
        """Fill all blocks with random bytes."""
        random = np.random.default_rng(seed)
        for each in self.arrays:
            each[:] = random.integers(0, 256, each.shape, np.uint8)

    def sums(self, slots: Int32Array) -> UInt64Array:
        """Return the sums of blocks."""
        return _core.sum_planes(self.planes.table, self.num_blocks, slots, 0, self.layout.num_planes)


Opened = tuple[PeerPlanes, TransferConnector]
OpenPeer = Callable[[KVLayout, int], Opened]


class TransferConformance:
    """The tests. A subclass defines the fixture ``open_peer``."""

    blocks = 12

    @pytest.fixture
    def open_peer(self) -> OpenPeer:
        """Return a function that opens a rank; the subclass defines it."""
        raise NotImplementedError("define the fixture open_peer")

    @contextmanager
    def _pair(self, open_peer: OpenPeer) -> Iterator[tuple[Opened, Opened]]:
        """Yield a source and a target that is connected to it."""
        source, target = open_peer(transfer_layout(), self.blocks), open_peer(transfer_layout(), self.blocks)
        try:
            source[0].fill(1)
            target[0].fill(2)
            assert target[1].connect(source[0].boot, source[1].memory) is None
            yield source, target
        finally:
            target[1].close()
            source[1].close()

    def _read(
        self, source: Opened, target: Opened, slots: list[int], into: list[int], **part: int
    ) -> ReadEnd:
        """Publish blocks, read them, and return the end."""
        first, last = part.get("first", 0), part.get("last", source[0].layout.num_planes)
        skip = part.get("skip", 0)
        places = source[1].publish(np.array(slots, np.int32), first, last)
        assert places is not None
        self.await_packed(source[1], places)
        order = ReadOrder(7, source[0].boot, places, len(slots), skip, first, last, np.array(into, np.int32))
        target[1].read(order)
        end = self._end(target[1], source[1])
        source[1].withdraw(places)
        return end

    @staticmethod
    def await_packed(connector: TransferConnector, places: tuple[int, ...]) -> None:
        """Wait until peers may read a part."""
        deadline = time.monotonic() + _TIMEOUT
        while isinstance(connector, Packer) and not connector.is_packed(places):
            if time.monotonic() > deadline:
                raise TimeoutError("the part is not packed")
            time.sleep(0.0001)

    @staticmethod
    def _end(connector: TransferConnector, *others: TransferConnector) -> ReadEnd:
        deadline = time.monotonic() + _TIMEOUT
        while not (ended := connector.poll()):
            for each in others:
                each.poll()
            if time.monotonic() > deadline:
                raise TimeoutError("the read does not end")
            time.sleep(0.001)
        return ended[0]

    def test_is_a_connector(self, open_peer: OpenPeer) -> None:
        """Every method exists, and the statistics name it."""
        with self._pair(open_peer) as (source, target):
            assert isinstance(target[1], TransferConnector)
            stats = target[1].stats()
            assert isinstance(stats, ConnectorStats)
            assert stats.name == target[1].name == source[1].name
            assert target[1].peers() == [source[0].boot]

    def test_blocks_arrive_whole_in_other_slots(self, open_peer: OpenPeer) -> None:
        """Every byte of every plane arrives, and no other slot changes."""
        with self._pair(open_peer) as (source, target):
            before = [each.copy() for each in target[0].arrays]
            end = self._read(source, target, [3, 9, 0], [5, 1, 8])
            assert end == ReadEnd(7, ReadOutcome.OK, 3 * source[0].layout.payload_bytes, end.seconds)
            for mine, theirs, old in zip(target[0].arrays, source[0].arrays, before, strict=True):
                assert (mine[[5, 1, 8]] == theirs[[3, 9, 0]]).all()
                others = [slot for slot in range(self.blocks) if slot not in (5, 1, 8)]
                assert (mine[others] == old[others]).all()
            moved = np.array([3, 9, 0], np.int32)
            assert (source[0].sums(moved) == target[0].sums(np.array([5, 1, 8], np.int32))).all()

    def test_a_range_of_planes_arrives_alone(self, open_peer: OpenPeer) -> None:
        """A layer group is read without the planes of others."""
        with self._pair(open_peer) as (source, target):
            before = [each.copy() for each in target[0].arrays]
            assert self._read(source, target, [2, 4], [2, 3], first=2, last=4).outcome is ReadOutcome.OK
            for index, (mine, theirs, old) in enumerate(
                zip(target[0].arrays, source[0].arrays, before, strict=True)
            ):
                if 2 <= index < 4:
                    assert (mine[[2, 3]] == theirs[[2, 4]]).all()
                else:
                    assert (mine == old).all()

    def test_leading_blocks_of_a_part_are_skipped(self, open_peer: OpenPeer) -> None:
        """A part of which the target has the first blocks."""
        with self._pair(open_peer) as (source, target):
            assert self._read(source, target, [1, 2, 3, 4], [7, 6], skip=1).outcome is ReadOutcome.OK
            for mine, theirs in zip(target[0].arrays, source[0].arrays, strict=True):
                assert (mine[[7, 6]] == theirs[[2, 3]]).all()

    def test_a_read_of_an_unknown_peer_ends(self, open_peer: OpenPeer) -> None:
        """It is a value, and nothing is written."""
        with self._pair(open_peer) as (source, target):
            before = [each.copy() for each in target[0].arrays]
            target[1].disconnect(source[0].boot)
            assert target[1].peers() == []
            end = self._read(source, target, [1], [1])
            assert end.outcome is ReadOutcome.PEER_GONE
            assert end.error
            assert all((mine == old).all() for mine, old in zip(target[0].arrays, before, strict=True))

    def test_a_peer_can_come_back_under_another_boot_id(self, open_peer: OpenPeer) -> None:
        """The memory of the former process is not read."""
        with self._pair(open_peer) as (source, target):
            target[1].disconnect(source[0].boot)
            later = open_peer(transfer_layout(), self.blocks)
            try:
                later[0].fill(9)
                assert target[1].connect(later[0].boot, later[1].memory) is None
                assert self._read(later, target, [4], [4]).outcome is ReadOutcome.OK
                assert all(
                    (mine[4] == theirs[4]).all()
                    for mine, theirs in zip(target[0].arrays, later[0].arrays, strict=True)
                )
            finally:
                later[1].close()

    def test_places_of_no_block_are_an_error(self, open_peer: OpenPeer) -> None:
        """A peer's message may say anything."""
        with self._pair(open_peer) as (source, target):
            before = [each.copy() for each in target[0].arrays]
            planes = source[0].layout.num_planes
            order = ReadOrder(7, source[0].boot, (2**40, 2**40), 2, 0, 0, planes, np.array([1, 2], np.int32))
            target[1].read(order)
            assert self._end(target[1], source[1]).outcome is ReadOutcome.ERROR
            assert all((mine == old).all() for mine, old in zip(target[0].arrays, before, strict=True))

    def test_memory_that_is_none_is_refused(self, open_peer: OpenPeer) -> None:
        """With a reason, and without an exception."""
        with self._pair(open_peer) as (_, target):
            assert target[1].connect(os.urandom(16), b"nonsense")

    def test_places_are_free_again(self, open_peer: OpenPeer) -> None:
        """Publishing and withdrawing goes on for ever."""
        with self._pair(open_peer) as (source, target):
            most = source[1].most_blocks(0, source[0].layout.num_planes)
            slots = list(range(min(most, self.blocks)))
            for _ in range(50):
                assert self._read(source, target, slots, slots).outcome is ReadOutcome.OK
            assert source[1].stats().places_used == target[1].stats().places_used == 0

    def test_closing_twice_is_harmless(self, open_peer: OpenPeer) -> None:
        """Nothing is left in flight."""
        with self._pair(open_peer) as (_, target):
            target[1].close()
            target[1].close()
            assert target[1].stats().reads_in_flight == 0
