"""Engines whose blocks are loaded to the device while later ones are read from storage: their own, or a service's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from fdcache.manager import LoadOutcome, MatchStatus, OffloadMatch, Request
from fdcache.metadata import CacheSwapMetadata
from fdcache.service.server import storage_opening
from fdcache.settings.cache import PrefetchPolicy, WritePolicy
from fdcache.storage.connector import ConnectorContext
from fdcache.tiers import storage_reads
from fdcache.tiers.statistics import Counters
from tests.offload_engine import BLOCK, GatedDevice, OffloadEngine, ids, prompt
from tests.service_help import TIMEOUT, LocalService, local_service, until
from tests.storage_engine import SlowStore
from tests.storage_help import storage_layout

LAYOUT = storage_layout(block_size=BLOCK, num_layers=2, tp_size=2)
BLOCKS = 8
PROMPT = prompt(*range(1, BLOCKS + 1))
INTO = [8, 1, 6, 3, 4, 5, 2, 7]


class Streaming(OffloadEngine):
    """An engine of two ranks with a path of eight blocks in storage. Each read brings two of them, when it may."""

    def __init__(
        self,
        folder: Path,
        policy: WritePolicy = WritePolicy.WRITE_BACK,
        prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
    ) -> None:
        self.bad_position: int | None = None
        super().__init__(
            layout=LAYOUT,
            folder=folder,
            store=SlowStore,
            streams=True,
            prefetch=prefetch,
            policy=policy,
            device=lambda: GatedDevice(self._choose),
        )
        self.outcomes: list[LoadOutcome] = []
        for disk in self.disks:
            disk.gate.clear()

    def _choose(self, swap: CacheSwapMetadata) -> list[int]:
        return [] if self.bad_position is None else [self.bad_position]

    @property
    def disks(self) -> list[SlowStore]:
        return [cast(SlowStore, store) for store in self.stores]

    def turn(self) -> None:
        self.step()
        self.collect_only()

    def turns(self) -> bool:
        """Step, for conditions that are waited for."""
        self.turn()
        return True

    def collect_only(self) -> None:
        self.outcomes += self.manager.apply([report for rank in self.ranks for report in rank.poll()])
        self.outcomes += self.manager.expire()

    def loads(self, blocks: int) -> None:
        """Step until so many blocks have been loaded."""

        def loaded() -> bool:
            self.turn()
            return self.manager.get_stats().counters.blocks_loaded >= blocks

        until(loaded, f"{blocks} blocks are loaded")

    def read(self) -> None:
        """Let the disks answer one read, and wait until the host has its blocks."""
        before = self.manager.get_stats().counters.blocks_prefetched
        for disk in self.disks:
            disk.allow(1)

        def arrived() -> bool:
            self.collect_only()
            return self.manager.get_stats().counters.blocks_prefetched == before + 2

        until(arrived, "the blocks are on the host")

    def promised(self, request: Request) -> OffloadMatch:
        """Begin a request, of which the first two blocks have been read, and return what it is promised."""
        self.manager.begin([request])
        self.turn()
        assert self.manager.match(request, 0).status is MatchStatus.DEFERRED
        self.read()
        return self.manager.match(request, 0)

    def loading(self, request: Request) -> None:
        """Begin a request whose first two blocks are loaded, while the others are read."""
        self.promised(request)
        assert self.manager.load(request, ids(*INTO)) == BLOCKS
        self.loads(2)

    def open_disks(self) -> None:
        for disk in self.disks:
            disk.gate.set()

    def ended(self) -> LoadOutcome:
        """Step until the load has ended; return how."""

        def has_ended() -> bool:
            self.turn()
            return bool(self.outcomes)

        until(has_ended, "the load ends")
        (outcome,) = self.outcomes
        return outcome

    def close(self) -> None:
        self.open_disks()
        super().close()


@pytest.fixture
def streams_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Storage with a path of eight blocks; each read brings two. A module that needs it names it ``folder``."""
    writer = OffloadEngine(layout=LAYOUT, folder=tmp_path)
    writer.stored("first", PROMPT, list(range(BLOCKS)))
    writer.settle()
    assert writer.manager.get_stats().counters.blocks_stored == BLOCKS
    writer.close()
    monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * 2 * LAYOUT.record_bytes)
    return tmp_path


@dataclass
class Served:
    """An engine of a service, and the service's disk."""

    service: LocalService
    disk: SlowStore
    engine: OffloadEngine

    def match(self, request: Request, device_tokens: int = 0) -> OffloadMatch:
        self.engine.step()
        return self.engine.manager.match(request, device_tokens)

    def loading(self, request: Request) -> list[LoadOutcome]:
        """Begin a request whose first two blocks are loaded, while the others are read."""
        self.engine.manager.begin([request])
        assert self.match(request).status is MatchStatus.DEFERRED
        self.disk.allow(1)
        until(lambda: self.match(request).status is MatchStatus.MATCHED, "two blocks are there")
        match = self.match(request)
        assert (match.num_tokens, match.from_storage) == (BLOCKS * BLOCK, BLOCKS * BLOCK)
        assert self.engine.manager.load(request, ids(*INTO)) == BLOCKS
        outcomes: list[LoadOutcome] = []
        until(lambda: self.turns(outcomes) and self.counters.blocks_loaded == 2, "they are loaded")
        assert not outcomes
        return outcomes

    def turns(self, outcomes: list[LoadOutcome]) -> bool:
        self.engine.step()
        outcomes += self.engine.manager.apply([each for rank in self.engine.ranks for each in rank.poll()])
        outcomes += self.engine.manager.expire()
        return True

    @property
    def counters(self) -> Counters:
        return self.engine.manager.get_stats().counters


@pytest.fixture
def streams_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A service with the same in its storage. A module that needs it names it ``served``."""
    layout, disks = storage_layout(block_size=BLOCK, num_layers=2), list[SlowStore]()

    def opened(context: ConnectorContext) -> SlowStore:
        settings = context.settings
        disks.append(
            SlowStore(
                settings.directory, context.layout, rank=0, size=settings.size, threads=2, retry_after=0.0
            )
        )
        return disks[-1]

    monkeypatch.setattr(storage_opening, "open_storage", opened)
    monkeypatch.setattr(storage_reads, "MOST_GROUP_BYTES", 2 * layout.record_bytes)
    settings = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": str(tmp_path / "storage")}
    with local_service(tmp_path, **settings, FDCACHE_STORAGE_SIZE="4MiB") as service:
        engine = OffloadEngine(
            layout=layout,
            server=service.address,
            rpc_timeout=TIMEOUT,
            streams=True,
            prefetch=PrefetchPolicy.WAIT_COMPLETE,
        )
        until(lambda: engine.manager._host.index.room, "slots are granted")
        engine.stored("first", PROMPT, list(range(BLOCKS)))
        until(lambda: service.ask("storage")["blocks"] == BLOCKS, "they are in storage")
        engine.manager.forget(ids(*range(BLOCKS)))  # they are not copied to the host again
        service.ask("reset", tier="host")
        disks[0].gate.clear()
        yield Served(service, disks[0], engine)
        disks[0].gate.set()
        engine.close()
        until(lambda: not service.ask("clients"), "it has left")
        assert service.ask("integrity") == []
