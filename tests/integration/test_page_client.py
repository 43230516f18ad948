"""Pages of an engine's own host memory: looked up, loaded and stored by calls that wait for their end."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.devices.cpu import CpuDevice
from fdcache.integrations.sglang.client import PageClient
from fdcache.layout import KVLayout
from fdcache.layout_planes import PlaneKind, PlaneSpec
from fdcache.metadata import HashArray, Int32Array
from fdcache.service.client import session_keeper
from fdcache.settings import Settings
from tests.offload_engine import GatedDevice
from tests.service_help import TIMEOUT, local_service, service_process, until

BYTES = 4096
PAGES = 64
TOKENS = 16


def layout(revision: str = "1") -> KVLayout:
    specs = [PlaneSpec(PlaneKind.KEY, "uint8", (BYTES,)), PlaneSpec(PlaneKind.VALUE, "uint8", (BYTES,))]
    return KVLayout.build(specs, model="m", revision=revision, block_size=TOKENS, num_layers=1)


def chain(length: int, seed: int = 0) -> HashArray:
    """Return the keys of a prompt's pages."""
    keys = [hashlib.sha256(f"{seed} {page}".encode()).digest() for page in range(length)]
    return np.frombuffer(b"".join(keys), np.uint8).reshape(length, 32)


def slots(*pages: int) -> Int32Array:
    return np.array(pages, np.int32)


class Pool:
    """Host pages of an engine, and its client. Bytes of a page follow from its key."""

    ranks = 1

    def __init__(self, revision: str = "1", **settings: Any) -> None:
        self.planes = [np.zeros((PAGES, BYTES), np.uint8) for _ in range(2)]
        own = {} if "FDCACHE_SERVER" in settings else {"FDCACHE_HOST_MEMORY": "1MiB"}
        given = {
            "FDCACHE_BLOCK_SIZE": TOKENS,
            "FDCACHE_WRITE_POLICY": "write_through",
            "FDCACHE_LOAD_OR_RECOMPUTE": "always",
            "FDCACHE_PREFETCH_POLICY": "wait_complete",
            "FDCACHE_VERIFY": "all",
            "FDCACHE_PLAN_TIMEOUT": TIMEOUT,
            "FDCACHE_RPC_TIMEOUT": TIMEOUT,
            **own,
            **settings,
        }
        self.client = PageClient(
            layout(revision), Settings.load(environ={}, arguments=given), self.planes, self.ranks
        )
        if "FDCACHE_SERVER" in settings:
            until(lambda: self.client.room, "the service grants room")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def fill(self, keys: HashArray, where: Int32Array) -> None:
        for key, page in zip(keys, where, strict=True):
            for kind, plane in enumerate(self.planes):
                plane[page] = np.resize(key, BYTES) ^ np.uint8(37 * kind)

    def wipe(self) -> None:
        for plane in self.planes:
            plane[:] = 0xEE

    def holds(self, keys: HashArray, where: Int32Array) -> bool:
        return all(
            (plane[page] == np.resize(key, BYTES) ^ np.uint8(37 * kind)).all()
            for key, page in zip(keys, where, strict=False)
            for kind, plane in enumerate(self.planes)
        )

    def stored(self, keys: HashArray, first: int = 0) -> int:
        """Store the pages of a prompt from ``first`` on."""
        where = np.arange(len(keys) - first, dtype=np.int32)
        self.fill(keys[first:], where)
        count = self.client.store(keys[first:], where, keys[:first])
        self.wipe()
        return count

    def loaded(self, keys: HashArray) -> int:
        """Load pages into the last slots; return how many leading ones are right."""
        where = np.arange(PAGES - len(keys), PAGES, dtype=np.int32)
        self.wipe()
        count = self.client.load(keys, where)
        assert self.holds(keys[:count], where)
        return count


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.mark.parametrize(("ranks", "threads"), [(1, 6), (2, 3), (4, 1), (16, 1)])
def test_half_of_the_cpus_copy_the_loads_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int
) -> None:
    def with_cpus(count: int) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))
        with Pool() as pool:
            assert pool.stored(chain(24)) == pool.loaded(chain(24)) == 24
            return sum(1 for _ in Path("/proc/self/task").iterdir())

    monkeypatch.setattr(Pool, "ranks", ranks)
    assert with_cpus(12) - with_cpus(1) in (threads - 1, 2 * (threads - 1))  # loads, and evictions with them


def test_pages_are_stored_found_and_loaded_from_anywhere_on(pool: Pool) -> None:
    keys = chain(20)
    assert pool.client.lookup(keys) == 0
    assert pool.stored(keys[:12]) == 12
    assert pool.stored(keys, 12) == 8
    assert [pool.client.lookup(keys), pool.client.lookup(keys[7:]), pool.client.lookup(chain(3, 1))] == [
        20,
        13,
        0,
    ]
    assert pool.loaded(keys[5:15]) == 10
    assert pool.loaded(np.concatenate((keys[15:], chain(4, 1)))) == 5


def test_a_store_tells_how_many_leading_pages_are_there_whoever_stored_them(pool: Pool) -> None:
    keys = chain(12)
    assert pool.stored(keys[:8]) == 8
    copied = pool.client.stats.counters.blocks_backed_up
    assert pool.stored(keys[:8]) == 8
    assert pool.client.stats.counters.blocks_backed_up == copied
    assert pool.stored(keys, 10) == 2  # nothing is known of pages 8 and 9
    assert (pool.client.lookup(keys), pool.client.lookup(keys[10:])) == (8, 2)
    assert pool.stored(keys[:10], 8) == 2
    assert pool.client.lookup(keys) == 12
    assert pool.loaded(keys) == 12


def test_a_store_into_a_small_tier_tells_what_is_there() -> None:
    with Pool(FDCACHE_HOST_MEMORY=f"{8 * (2 * BYTES + 128)}B") as pool:
        keys = chain(20)
        count = pool.stored(keys)
        assert count == pool.client.lookup(keys) <= 8
        assert pool.loaded(keys[:8]) == count
        assert pool.stored(chain(6, 1)) == 6  # the older ones make room
        assert pool.loaded(chain(6, 1)) == 6


def test_keys_that_contradict_those_stored_are_a_miss_and_are_counted(pool: Pool) -> None:
    keys = chain(6)
    assert pool.client.store(keys[3:], slots(0, 1, 2), keys[:0]) == 3  # a tail that claims to be a beginning
    pool.stored(keys[:3])
    assert pool.client.lookup(keys) == 0
    assert pool.client.load(keys, slots(*range(6))) == 0
    assert pool.client.stats.host is not None and pool.client.stats.host.contradictions > 0
    assert pool.stored(chain(3, 1)) == 3


def test_pages_are_read_from_storage_from_anywhere_on(tmp_path: Path) -> None:
    settings = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path),
        "FDCACHE_STORAGE_SIZE": "4MiB",
    }
    keys = chain(20)
    with Pool(**settings) as pool:
        pool.stored(keys)
        until(lambda: pool.client.stats.storage.ready == 20, "all is in storage")  # type: ignore[union-attr]
    with Pool(**settings) as pool:
        assert pool.client.lookup(keys[6:]) == 14
        assert pool.loaded(keys[6:16]) == 10
        assert pool.client.lookup(chain(3, 1)) == 0
    with Pool(**settings) as pool:
        assert pool.stored(chain(20)[:20], 20) == 0
        where = slots(0, 1)
        longer = np.concatenate((keys, chain(2, 1)))
        pool.fill(longer[20:], where)
        assert pool.client.store(longer[20:], where, keys) == 2  # the pages above come from storage first
        assert pool.loaded(longer) == 22


def test_a_corrupt_page_is_not_loaded_and_not_found_again(pool: Pool) -> None:
    keys = chain(10)
    pool.stored(keys)
    host = pool.client._manager._host.pool
    assert host is not None
    (slot,) = host.find(keys[4:5]).slots
    pool.client._controller.host_arena.table.record(int(slot))[100] ^= 1  # type: ignore[union-attr]
    assert pool.loaded(keys) == 4
    assert pool.client.lookup(keys) == 4
    assert pool.stored(keys) == 10
    assert pool.loaded(keys) == 10


def test_a_service_shares_pages_and_clear_forgets_those_of_one_layout_alone(tmp_path: Path) -> None:
    with local_service(tmp_path / "service") as service:
        address = service.address
        with (
            Pool(FDCACHE_SERVER=address) as first,
            Pool(FDCACHE_SERVER=address) as second,
            Pool("2", FDCACHE_SERVER=address) as other,
        ):
            keys = chain(10)
            assert first.stored(keys) == other.stored(keys) == 10
            assert second.client.lookup(keys) == 10, "what a store has told, all engines find"
            assert second.loaded(keys[3:]) == 7
            first.client.clear()
            until(lambda: second.client.lookup(keys) == 0, "they are forgotten")
            assert other.loaded(keys) == 10
        until(lambda: service.ask("integrity") == [], "nothing is left behind")


def test_a_service_reads_pages_from_its_storage(tmp_path: Path) -> None:
    settings = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path / "disk"),
        "FDCACHE_STORAGE_SIZE": "8MiB",
    }
    keys = chain(20)
    with (
        local_service(tmp_path / "service", **settings) as service,
        Pool(FDCACHE_SERVER=service.address) as pool,
    ):
        pool.stored(keys)
        until(lambda: service.ask("storage")["blocks"] == 20, "all is in storage")
        service.ask("reset", tier="host")
        until(lambda: pool.client.lookup(keys[8:]) == 12, "the tail is found in storage")
        assert pool.loaded(keys[8:]) == 12
        assert pool.client.lookup(chain(2, 1)) == 0


def test_calls_end_without_the_service_and_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_keeper, "_HEARTBEAT_SECONDS", 0.2)
    keys = chain(10)
    with (
        service_process(tmp_path / "service", FDCACHE_DISCARD="0") as service,
        Pool(FDCACHE_SERVER=service.address, FDCACHE_RPC_TIMEOUT=0.2, FDCACHE_PLAN_TIMEOUT=2.0) as pool,
    ):
        pool.stored(keys)
        service.kill()
        for number in range(1, 30):  # in slots that were granted before, as long as there are some
            pool.stored(chain(10, number))
            assert pool.loaded(keys) in (0, 10)
        service.start()
        until(lambda: pool.client.lookup(keys) == 10, "the memory outlived the service")
        assert pool.loaded(keys) == 10
        assert service.process is not None
        service.process.send_signal(signal.SIGSTOP)
        pool.client.lookup(chain(10, 2))
        pool.stored(chain(10, 2))
        service.process.send_signal(signal.SIGCONT)
        until(lambda: pool.stored(keys) == 10, "it goes on")


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[tuple[Pool, GatedDevice]]:
    """A pool whose stores are held."""
    device = GatedDevice()
    monkeypatch.setattr(CpuDevice, "of", lambda settings: device)
    with Pool(**settings) as pool:
        pool.stored(chain(10))
        device.is_gated = True
        try:
            yield pool, device
        finally:
            device.is_gated = False
            device.open()


def test_look_ups_and_loads_do_not_wait_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(monkeypatch) as (pool, device), ThreadPoolExecutor(1) as threads:
        other = chain(5, 1)
        pool.fill(other, slots(0, 1, 2, 3, 4))
        store = threads.submit(pool.client.store, other, slots(0, 1, 2, 3, 4), other[:0])
        until(lambda: device.gates, "the store's copy has begun")
        where = slots(*range(20, 30))
        assert pool.client.lookup(chain(10)) == 10
        assert pool.client.load(chain(10), where) == 10
        assert pool.holds(chain(10), where)
        assert not store.done()
        device.is_gated = False
        device.open()
        assert store.result(TIMEOUT) == 5
        assert pool.loaded(other) == 5


def test_a_store_whose_copy_has_not_begun_is_taken_back_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with gated(monkeypatch, FDCACHE_PLAN_TIMEOUT=0.2) as (pool, device):
        other = chain(5, 1)
        where = slots(0, 1, 2, 3, 4)
        pool.fill(other, where)
        assert pool.client.store(other, where, other[:0]) == 0
        pool.wipe()
        device.is_gated = False
        device.open()
        assert pool.client.lookup(other) == 0
        assert pool.stored(other) == 5
        assert pool.loaded(other) == 5


@pytest.mark.parametrize("deadline", [TIMEOUT, 0.004])
def test_slots_are_the_callers_again_when_its_call_has_ended(tmp_path: Path, deadline: float) -> None:
    with local_service(tmp_path / "service", FDCACHE_HOST_MEMORY="2MiB") as service:
        with Pool(FDCACHE_SERVER=service.address, FDCACHE_PLAN_TIMEOUT=deadline) as pool:
            wrong: list[str] = []

            def work(number: int) -> None:
                chosen, first = random.Random(number), 16 * number
                for turn in range(40):
                    keys = chain(16, chosen.randrange(12))
                    where = np.arange(first, first + 16, dtype=np.int32)
                    if chosen.random() < 0.5:
                        pool.fill(keys, where)
                        pool.client.store(keys, where, keys[:0])
                    else:
                        start = chosen.randrange(16)
                        count = pool.client.load(keys[start:], where[start:])
                        if not pool.holds(keys[start : start + count], where[start:]):
                            wrong.append(f"thread {number}: loaded {count} pages")
                    mine = chain(16, 100 + turn)
                    pool.fill(mine, where)  # a copy that still goes on would store or overwrite this
                    time.sleep(0.001)
                    if not pool.holds(mine, where):
                        wrong.append(f"thread {number}: its slots were written")

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT)
            assert not any(thread.is_alive() for thread in threads)
            assert not wrong
            until(lambda: not pool.client.stats.plans_in_flight, "all plans end")
        until(lambda: service.ask("integrity") == [], "nothing is left behind")
