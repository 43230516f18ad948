"""Streams and events of the CPU device."""

from __future__ import annotations

import gc
import signal
import threading
import weakref

import numpy as np
import psutil
import pytest

from fdcache import _core
from fdcache.devices.cpu import CpuDevice, CpuStream
from fdcache.metadata import SwapPurpose
from fdcache.tasks import CpuEvent
from tests.service_help import until
from tests.swaps import PATIENCE, swap


def threads() -> set[int]:
    """Those of this process, as the kernel sees them: one that was joined may be there a moment longer."""
    return {thread.id for thread in psutil.Process().threads()}


class Memory:
    """Two planes of two blocks and a host arena of two records."""

    def __init__(self) -> None:
        self.planes = [np.arange(2 * 64, dtype=np.uint8).reshape(2, 64) for _ in range(2)]
        self.records = np.zeros((2, 4096), np.uint8)
        self.headers = np.zeros((2, 128), np.uint8)

    def copy(self) -> _core.BlockCopy:
        planes = _core.PlaneTable([p.ctypes.data for p in self.planes], [64, 64], [64, 64], [0, 128], self)
        records = _core.RecordTable([self.records.ctypes.data], 2, 4096, [self.headers.ctypes.data], 2, self)
        made = _core.copy_blocks(
            swap(SwapPurpose.BACKUP, [(0, 0), (1, 1)]), True, planes, 2, records, bytes(32), False
        )
        assert made is not None
        return made


def test_operations_run_in_order() -> None:
    memory, stream, event = Memory(), _core.CopyStream(2), _core.Event()
    copy = memory.copy()
    stream.copy(copy, 0, 1)
    stream.copy(copy, 1, 2)
    stream.record(event)
    assert event.wait(PATIENCE)
    assert copy.done.query()
    assert copy.finish()[0] == b""
    assert np.array_equal(memory.records[1, 128:192], memory.planes[1][1])


def test_an_event_not_recorded_holds_the_stream() -> None:
    device = CpuDevice()
    stream, gate, passed = device.create_stream(), device.create_event(), device.create_event()
    stream.wait_event(gate)
    passed.record(stream)
    assert not passed.wait(0.01)
    assert not passed.query()
    gate.set()
    assert passed.wait(PATIENCE)


def test_one_stream_waits_for_another() -> None:
    device = CpuDevice()
    first, second, gate = device.create_stream(), device.create_stream(), device.create_event()
    first.wait_event(gate)
    between, passed = device.create_event(), device.create_event()
    second.wait_event(between)
    passed.record(second)
    between.record(first)
    assert not passed.wait(0.01)
    gate.set()
    assert passed.wait(PATIENCE)


def test_wait_any_returns_for_whichever_comes_first() -> None:
    device = CpuDevice()
    events = [device.create_event() for _ in range(3)]
    assert not device.wait_any(events, 0.01)
    timer = threading.Timer(0.02, events[1].set)
    timer.start()
    assert device.wait_any(events, PATIENCE)
    timer.join()
    assert [event.query() for event in events] == [False, True, False]
    assert device.wait_any(events, 0)


def test_a_signal_ends_a_wait() -> None:
    class InterruptError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise InterruptError

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(InterruptError):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            CpuEvent().wait(PATIENCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_closing_a_held_stream_fails_its_copies_and_reaches_its_events() -> None:
    memory, stream, passed = Memory(), _core.CopyStream(1), _core.Event()
    copy = memory.copy()
    stream.wait(_core.Event())
    stream.copy(copy, 0, 2)
    stream.record(passed)
    stream.close()
    assert passed.query()
    assert copy.done.query()
    faults = copy.finish()[0]
    assert faults and 0 not in faults
    assert not memory.records.any()
    with pytest.raises(RuntimeError, match="closed"):
        stream.record(_core.Event())


def test_a_cancelled_copy_touches_nothing() -> None:
    memory, stream, gate, passed = Memory(), _core.CopyStream(1), _core.Event(), _core.Event()
    copy = memory.copy()
    stream.wait(gate)
    stream.copy(copy, 0, 2)
    stream.record(passed)
    assert copy.cancel()
    assert not copy.cancel()
    gate.set()
    assert passed.wait(PATIENCE)
    assert not memory.records.any()
    assert not memory.headers.any()


def test_the_last_group_ends_with_the_copy() -> None:
    """A report says that all layers are done, so no event of a layer may come after the end of the copy."""
    memory, stream, gate = Memory(), _core.CopyStream(1), _core.Event()
    stream.wait(gate)
    copy = memory.copy()
    events = stream.copy_groups(copy, [(0, 1), (1, 2)])
    assert copy.cancel()
    assert copy.done.query() and events[-1].query() and not events[0].query()
    gate.set()
    assert events[0].wait(PATIENCE)


def test_a_slot_that_another_writer_took_is_not_stamped_ready() -> None:
    memory, stream, first, gate = Memory(), _core.CopyStream(1), _core.Event(), _core.Event()
    copy = memory.copy()
    stream.copy(copy, 0, 1)
    stream.record(first)
    stream.wait(gate)
    stream.copy(copy, 1, 2)
    assert first.wait(PATIENCE)
    other = _core.SlotHeader(1, 2, bytes(32), bytes(32), bytes(32), 128, 0).to_bytes()
    memory.headers[1] = np.frombuffer(other, np.uint8)
    gate.set()
    assert copy.done.wait(PATIENCE)
    assert [fault != 0 for fault in copy.finish()[0]] == [False, True]
    assert memory.headers[1].tobytes() == other


def test_a_finished_copy_cannot_be_cancelled() -> None:
    memory, stream = Memory(), _core.CopyStream(1)
    copy = memory.copy()
    stream.copy(copy, 0, 2)
    assert copy.done.wait(PATIENCE)
    assert not copy.cancel()
    assert copy.finish()[2] == 256


def test_a_copy_keeps_its_memory_until_it_is_done() -> None:
    memory, stream, gate = Memory(), _core.CopyStream(1), _core.Event()
    alive = weakref.ref(memory)
    copy = memory.copy()
    done = copy.done
    stream.wait(gate)
    stream.copy(copy, 0, 2)
    del memory, copy
    gc.collect()
    assert alive() is not None
    gate.set()
    assert done.wait(PATIENCE)
    stream.retire()
    gc.collect()
    assert alive() is None


def test_dropping_everything_under_a_held_copy_leaves_no_thread_and_no_memory() -> None:
    before = threads()
    memory = Memory()
    alive = weakref.ref(memory)
    stream = _core.CopyStream(3)
    stream.wait(_core.Event())
    stream.copy(memory.copy(), 0, 2)
    made = threads() - before
    assert len(made) == 3
    del memory, stream
    gc.collect()
    assert alive() is None
    until(lambda: not made & threads(), "its threads are gone")


def test_refuses_planes_that_are_not_there() -> None:
    stream, copy = _core.CopyStream(1), Memory().copy()
    for first, last in ((0, 3), (1, 1), (2, 1)):
        with pytest.raises(IndexError):
            stream.copy(copy, first, last)


def test_refuses_streams_and_events_of_another_device() -> None:
    class Foreign:
        pass

    with pytest.raises(TypeError, match="stream of the CPU device"):
        CpuEvent().record(Foreign())
    with pytest.raises(TypeError, match="event of the CPU device"):
        CpuStream(1).wait_event(Foreign())  # type: ignore[arg-type]
