"""OffloadManager whose streaming loads are cut off, revoked and overdue, for requests that come back meanwhile.

The engine gives back at once the device blocks that no plan loads. From then on no plan may load into them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.service.server import storage_opening
from fdcache.settings.cache import PrefetchPolicy, WritePolicy
from fdcache.storage.connector import ConnectorContext
from fdcache.tiers import storage_reads
from tests.offload_engine import OffloadEngine, prompt
from tests.property.test_offload_streams import LAYOUT, Streaming, stored
from tests.property.test_offload_troubles import Troubled
from tests.seeds import budget
from tests.service_help import TIMEOUT, LocalService, local_service, until
from tests.storage_engine import SlowStore

stored_paths = stored
ACTIONS = (
    *("arrive",) * 3,
    *("step",) * 8,
    *("report",) * 3,
    *("abort",) * 3,
    *("read",) * 2,
    *("open", "fail", "overdue", "lose", "reset"),
)
RARE = {"overdue": 0.5, "lose": 0.2, "reset": 0.02}


@pytest.fixture(autouse=True)
def blocks_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", LAYOUT.record_bytes)


def play(engine: Troubled, steps: int) -> None:
    """Let the engine step, with troubles between the calls of a step."""
    engine.troubles = 0.5
    for _ in range(steps):
        action = engine.random.choice(ACTIONS)
        if engine.random.random() >= RARE.get(action, 1.0):
            continue
        if action == "arrive":
            if len(engine.waiting) < 4:
                engine.arrive(
                    [engine.random.choice((1, 1, 2, 2, 3)) for _ in range(engine.random.randint(2, 5))]
                )
        elif action == "step":
            engine.offload.now += engine.random.choice([0.0, 0.5])
            engine.step()
        elif action == "fail":
            engine.failures = engine.random.choice([0.0, 0.0, 0.3])
        else:
            getattr(engine, action)()
        engine.manager.check_integrity()


# --- storage of its own -----------------------------------------------------------------------------------


class Returning(Streaming, Troubled):
    """An engine with storage of its own, whose rank may begin anew with it. Plans that load are reported late."""

    def read(self) -> None:
        """Let the disk answer, and count the blocks that come."""
        self.disk.allow(1)
        for _ in range(10):
            if reports := [report for rank in self.offload.ranks for report in rank.poll()]:
                self.reports += reports
                break
            time.sleep(0.001)
        reads = [each for each in self.reports if not self.plans.is_known(each.plan_id)]
        self.reports = [each for each in self.reports if each not in reads]
        self.apply(reads)

    def overdue(self) -> None:
        self.read()
        super().overdue()

    def report(self) -> None:
        self.reports += [report for rank in self.offload.ranks for report in rank.poll()]
        late = [each for each in self.reports if self.manager.loads_of(each.plan_id) and self.chance(1.2)]
        self.reports = [each for each in self.reports if each not in late]
        super().report()
        self.reports += late

    def step(self) -> None:
        self.cached.clear()  # what has left the device is loaded
        super().step()

    def trouble(self) -> None:
        """Let something happen between two calls of a step. A reset, which empties the storage, is rare."""
        if self.chance(0.002):
            self.manager.reset_cache()
        elif self.chance(0.1):
            self.report()
        elif self.chance(0.1):
            self.disk.allow(1)

    def change_weights(self) -> None:
        raise NotImplementedError

    def lose(self) -> None:
        self.disk.gate.set()
        super().lose()

    def begun(self, rank: int) -> None:
        (self.offload.stores[rank],) = (self.disk,) = (self.offload.opened_store(rank),)  # type: ignore[assignment]
        self.offload.restore()
        self.disk.gate.clear()


@settings(max_examples=budget(60), deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(WritePolicy), host=st.sampled_from([9, 14, 30]))
def test_no_plan_loads_into_a_block_that_was_given_back(
    stored_paths: Path, seed: int, policy: WritePolicy, host: int
) -> None:
    engine = Returning(seed, policy, stored_paths, host_blocks=host)
    play(engine, 150)
    assert engine.close() == 0


# --- storage of a service ---------------------------------------------------------------------------------


@dataclass
class Stage:
    """A service, and its disk with every path that an engine may ask for."""

    service: LocalService
    disk: SlowStore


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder, disks = tmp_path_factory.mktemp("service"), list[SlowStore]()

    def opened(context: ConnectorContext) -> SlowStore:
        place, size = context.settings.directory, context.settings.size
        disks.append(SlowStore(place, context.layout, rank=0, size=size, threads=2, retry_after=0.0))
        return disks[-1]

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(storage_opening, "open_storage", opened)
        variables = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(folder / "storage")}
        service = stack.enter_context(local_service(folder, **variables, FDCACHE_STORAGE_SIZE="4MiB"))
        engine = OffloadEngine(layout=LAYOUT, server=service.address, rpc_timeout=TIMEOUT)
        for number, families in enumerate(product((1, 2), repeat=5)):
            until(lambda: engine.manager._host.index.room >= 5, "slots are granted")
            engine.stored(f"path {number}", prompt(*families), range(5))
        until(lambda: service.ask("storage")["blocks"] == 62, "all paths are in storage")
        engine.close()
        yield Stage(service, disks[0])
        disks[0].gate.set()


class Served(Troubled):
    """An engine of a service, which may lose its session or forget what it has in memory."""

    def __init__(self, seed: int, policy: WritePolicy, stage: Stage) -> None:
        self.stage = stage
        stage.service.ask("reset", tier="host")
        stage.disk.gate.clear()
        super().__init__(
            seed,
            policy,
            head_dim=16,
            server=stage.service.address,
            rpc_timeout=TIMEOUT,
            prefetch=PrefetchPolicy.WAIT_COMPLETE,
            streams=True,
        )

    def step(self) -> None:
        self.cached.clear()
        if self.random.random() < 0.4:
            self.stage.disk.allow(1)
        super().step()

    def trouble(self) -> None:
        if self.chance(0.1):
            self.report()
        elif self.chance(0.1):
            self.read()
        elif self.chance(0.005):
            self.leave()

    def read(self) -> None:
        """Let the disk answer, and give the service time to tell of it."""
        self.stage.disk.allow(1)
        time.sleep(0.002)

    def overdue(self) -> None:
        self.read()
        super().overdue()

    def reset(self) -> None:
        self.stage.service.ask("reset", tier="host")

    def leave(self) -> None:
        sessions: Any = self.manager._host
        if (session := sessions.sessions.session) is not None:
            sessions.sessions.lose(session, "the test")

    def drain(self) -> None:
        self.stage.disk.gate.set()
        super().drain()

    def close(self) -> int:
        self.drain()
        assert self.outcomes == self.planned_loads
        assert not self.late and not self.strays
        self.offload.close()
        assert self.stage.service.ask("integrity") == []
        return self.wrong


@settings(max_examples=budget(60), deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(WritePolicy))
def test_no_plan_loads_from_a_service_into_a_block_that_was_given_back(
    stage: Stage, seed: int, policy: WritePolicy
) -> None:
    engine = Served(seed, policy, stage)
    try:
        play(engine, 150)
        assert engine.close() == 0
    finally:
        engine.manager.close()
