"""Calls that hang, and how many questions it takes to find a path."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from fdcache import _core
from fdcache.storage.objects.calls import CallPool, Gate, GivenUpError, HangingError
from fdcache.storage.objects.catalogue import Catalogues
from fdcache.storage.objects.connector import ObjectConnector
from fdcache.storage.objects.folder import SharedFolder
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.object_help import context
from tests.service_help import until

SOON = 60.0
LAYOUT = conformance_layout("calls")


def test_results_come_in_the_order_of_the_calls() -> None:
    pool = CallPool(4, "test")

    def fail() -> int:
        raise ValueError("wrong")

    calls = [lambda: 1, fail, lambda: 3]
    one, wrong, three = pool.results(calls, time.monotonic() + SOON)
    assert (one, str(wrong), three) == (1, "wrong", 3)
    pool.close()


def test_a_call_that_hangs_is_left_behind_and_those_behind_it_never_begin() -> None:
    pool, go_on = CallPool(1, "test"), threading.Event()
    begun: list[int] = []

    def hang() -> None:
        begun.append(1)
        go_on.wait(SOON)

    first, second = pool.results([hang, lambda: begun.append(2)], time.monotonic() + 0.2)
    assert isinstance(first, HangingError)
    assert isinstance(second, GivenUpError)
    assert pool.is_blocked
    go_on.set()
    until(lambda: not pool.is_blocked, "the call has ended")
    assert pool.results([lambda: 3], time.monotonic() + SOON) == [3]
    assert begun == [1]
    pool.close()


def test_nothing_begins_after_the_deadline_a_cancellation_or_the_end() -> None:
    pool, cancel = CallPool(2, "test"), _core.CancelFlag()
    begun: list[int] = []
    assert isinstance(pool.results([lambda: begun.append(1)], time.monotonic())[0], GivenUpError)
    cancel.set()
    assert isinstance(
        pool.results([lambda: begun.append(1)], time.monotonic() + SOON, cancel)[0], CancelledError
    )
    pool.close()
    assert isinstance(pool.results([lambda: begun.append(1)], time.monotonic() + SOON)[0], CancelledError)
    assert begun == []


def test_a_gate_closes_behind_those_inside() -> None:
    gate, leave, inside = Gate(), threading.Event(), threading.Event()

    def copy() -> None:
        with gate.passage():
            inside.set()
            leave.wait(SOON)

    copying = threading.Thread(target=copy)
    copying.start()
    assert inside.wait(SOON)
    closing = threading.Thread(target=gate.close)
    closing.start()
    assert closing.is_alive()
    leave.set()
    closing.join(SOON)
    copying.join(SOON)
    with pytest.raises(GivenUpError), gate.passage():
        raise AssertionError("the gate is open")


class CountingFolder(SharedFolder):
    """A folder that counts its calls."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.calls: Counter[str] = Counter()

    def read(self, name: str, offset: int, length: int) -> memoryview:
        self.calls["page" if offset == 0 else "records"] += 1
        return super().read(name, offset, length)


def test_a_path_is_found_by_a_question_for_each_object_and_a_miss_costs_two(tmp_path: Path) -> None:
    in_one, count = 8, 64
    records = KnownRecords(LAYOUT, count)
    hashes = path_of(count, "counted")

    def node() -> tuple[CountingFolder, ObjectConnector]:
        folder = CountingFolder(tmp_path)
        given = context(LAYOUT, None, connector="shared", object_bytes=in_one * LAYOUT.record_bytes)
        return folder, ObjectConnector("shared", folder, given, catalogues=Catalogues())

    _, writer = node()
    assert writer.put(records.fill(hashes), SOON).ok.all()
    folder, reader = node()
    assert reader.exists(hashes, SOON).length == count
    assert folder.calls == {"page": count // in_one}
    assert reader.exists(hashes, SOON).length == count
    assert reader.get(records.batch(hashes), SOON).ok.all()
    assert folder.calls == {"page": count // in_one, "records": count // in_one}
    assert reader.exists(path_of(count, "unknown"), SOON).length == 0
    assert folder.calls["page"] == count // in_one + 2
