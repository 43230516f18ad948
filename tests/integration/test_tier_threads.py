"""Many threads run requests on one small tier at once."""

import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fdcache import _core
from fdcache.errors import StaleLeaseError
from tests.seeds import budget
from tests.service_help import until
from tests.tier_help import (
    ROOT_HASH,
    assert_all_given_back,
    assert_sound,
    chain,
    checksums,
    flags,
    hashes,
    slots,
)

SEED = 20261


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Crowd:
    """Requests of all threads; `owners` says which slots somebody was given for himself."""

    def __init__(self, size: int) -> None:
        self.tier = _core.Tier(size)
        self.owners: dict[int, int] = {}
        self.in_flight: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self.outcomes = {"deferred": 0, "refused": 0, "computed": 0, "copied": 0, "stale": 0}
        self.counting = threading.Lock()

    def live(self, thread: int, requests: int) -> None:
        rng = random.Random(SEED + thread)
        for _ in range(requests):
            outcome = self.one_request(rng)
            with self.counting:
                self.outcomes[outcome] += 1
            if rng.random() < 0.5:
                self.report_one(rng)

    def one_request(self, rng: random.Random) -> str:
        lease = self.tier.open_lease()
        path = chain(*(rng.randrange(3) for _ in range(rng.randint(1, 6))))
        mine: list[int] = []
        try:
            return self.use(lease, path, mine, rng)
        except StaleLeaseError:
            return "stale"
        finally:
            for slot in mine:
                del self.owners[slot]
            assert self.tier.release(lease)
            assert not self.tier.release(lease)

    def use(self, lease: int, path: list[bytes], mine: list[int], rng: random.Random) -> str:
        run = self.tier.match(lease, hashes(path))
        self.tier.hold(run.slots)
        self.tier.unhold(run.slots)
        if run.pending:
            return "deferred"
        found = len(run)
        parents = [ROOT_HASH, *path][found:-1]
        if rng.random() < 0.4:
            planned = self.tier.reserve_copies(lease, hashes(parents), hashes(path[found:]))
            if planned.missing:
                return "refused"
            self.own(planned.slots.tolist(), lease)
            self.in_flight.put(planned.slots.tolist())
            return "copied"
        taken = self.tier.reserve(lease, len(path) - found)
        if taken.missing:
            return "refused"
        self.own(taken.slots.tolist(), lease)
        mine.extend(taken.slots.tolist())
        done = rng.randint(0, len(mine))
        parent = path[found - 1] if found else ROOT_HASH
        self.tier.commit(lease, parent, hashes(path[found : found + done]), slots(mine[:done]))
        return "computed"

    def own(self, taken: list[int], lease: int) -> None:
        for slot in taken:
            assert self.owners.setdefault(slot, lease) == lease

    def report_one(self, rng: random.Random) -> bool:
        try:
            planned = self.in_flight.get_nowait()
        except queue.Empty:
            return False
        for slot in planned:
            del self.owners[slot]
        copied = [rng.random() < 0.9 for _ in planned]
        self.tier.complete(slots(planned), flags(copied), checksums())
        return True

    def disturb(self, stop: threading.Event, size: int) -> int:
        rng = random.Random(SEED)
        rounds = 0
        while not stop.wait(0.001):
            rounds += 1
            assert_sound(self.tier)
            self.tier.resize(size + rng.randint(-2, 4))
            self.tier.coldest(size)
            if rounds % 20 == 0:
                self.tier.reset()
        return rounds


def run_crowd(threads: int, requests: int, size: int) -> None:
    crowd, stop = Crowd(size), threading.Event()
    with ThreadPoolExecutor(threads + 1) as pool:
        disturbing = pool.submit(crowd.disturb, stop, size)
        living = [pool.submit(crowd.live, thread, requests) for thread in range(threads)]
        try:
            for future in living:
                future.result()
        finally:
            stop.set()
        assert disturbing.result() > 0
    assert_sound(crowd.tier)
    while crowd.report_one(random.Random(SEED)):
        assert_sound(crowd.tier)
    assert_all_given_back(crowd.tier)
    assert crowd.tier.stats().leases == 0
    assert crowd.owners == {}
    assert sum(crowd.outcomes.values()) == threads * requests
    assert crowd.outcomes["computed"] > 0
    assert crowd.outcomes["copied"] > 0


def test_threads_share_a_tier() -> None:
    run_crowd(threads=4, requests=4000, size=16)


@pytest.mark.slow
@pytest.mark.parametrize("size", [6, 16, 64])
def test_many_threads_share_a_tier_in_long_histories(size: int) -> None:
    run_crowd(threads=8, requests=budget(40000), size=size)


Found = tuple[Any, ...]
Walk = Callable[[_core.Tier, Found], object]
ENTRIES = 100_000
WALKS: dict[str, Walk] = {
    "hottest": lambda tier, found: tier.hottest(10),
    "idle": lambda tier, found: tier.idle(0.0),
    "starting_with": lambda tier, found: tier.starting_with(b"\x01"),
    "coldest": lambda tier, found: tier.coldest(ENTRIES),
    "drop": lambda tier, found: tier.drop(found[2][:1]),
    "discard": lambda tier, found: tier.discard(found[0][:1]),
    "restore": lambda tier, found: tier.restore(*found),
}


@pytest.fixture(scope="module")
def found() -> Found:
    """Paths of two blocks, as a scan finds them."""
    keys = np.random.default_rng(SEED).integers(1, 256, (ENTRIES, 32), np.uint8)
    parents = np.roll(keys, 1, axis=0)
    parents[::2] = 0
    slot = np.arange(ENTRIES)
    return slot.astype(np.int32), np.ones(ENTRIES, np.uint32), keys, parents, slot.astype(np.uint64)


@contextmanager
def turns_of_another_thread() -> Iterator[list[int]]:
    """Counts the turns of a thread that gets one only where a running thread lets go of the interpreter itself."""
    sys.setswitchinterval(1000)
    turns, ended = [0], threading.Event()

    def count() -> None:
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        yield turns
    finally:
        ended.set()
        counter.join()


@pytest.mark.parametrize("name", WALKS)
def test_other_threads_run_while_a_whole_tier_is_walked(name: str, found: Found) -> None:
    tier = _core.Tier(ENTRIES)
    with turns_of_another_thread() as turns:

        def lets_go() -> bool:
            tier.reset()
            if name != "restore":
                tier.restore(*found)
            before = turns[0]
            WALKS[name](tier, found)
            return turns[0] > before

        until(lets_go, f"{name} lets go of the interpreter")


def test_other_threads_run_while_one_waits_for_a_walk(found: Found) -> None:
    tier = _core.Tier(ENTRIES)
    ended = threading.Event()

    def walk() -> None:
        while not ended.is_set():
            tier.reset()
            tier.restore(*found)

    with turns_of_another_thread() as turns, ThreadPoolExecutor(1) as walker:
        walking = walker.submit(walk)

        def lets_go() -> bool:
            before = turns[0]
            assert tier.available <= ENTRIES
            return turns[0] > before

        try:
            until(lets_go, "a question that waits for a walk lets go of the interpreter")
        finally:
            ended.set()
            walking.result()
