"""A service with a disk that tests can hold up, and its clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fdcache import _core
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings, WritePolicy
from fdcache.storage.connector import BatchResult, ConnectorContext, Outcome, RecordBatch
from fdcache.storage.slab import SlabStore
from tests.service_engine import BLOCK, PROMPT, Engine, assert_nothing_is_held
from tests.service_help import TIMEOUT, LocalService, local_service, until

BLOCKS = len(PROMPT) // BLOCK
OTHER = [token + 1000 for token in PROMPT]


class SlowStore(SlabStore):
    """A disk that reads once ``gate`` is set, or as many times as are allowed, and answers once ``answer`` is set.

    It fails the blocks of ``loses``, by their positions in a read.
    """

    opened: list[SlowStore]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.gate, self.answer = threading.Event(), threading.Event()
        self.answer.set()
        self._allowed = threading.Semaphore(0)
        self.reads: list[int] = []
        self.ended = 0
        self.cancels: list[_core.CancelFlag | None] = []
        self.loses: set[int] = set()
        super().__init__(*arguments, **options)
        self.opened.append(self)

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        self.cancels.append(cancel)
        self.reads.append(len(batch))
        self._wait()
        result = super().get(batch, timeout, cancel)
        self.ended += 1
        assert self.answer.wait(60)
        for position in self.loses:
            result.outcomes[position] = Outcome.ERROR
        return result

    def allow(self, reads: int) -> None:
        """Read as many times although the gate is closed."""
        self._allowed.release(reads)

    def _wait(self) -> None:
        for _ in range(60_000):
            if self.gate.is_set() or self._allowed.acquire(timeout=0.001):
                return
        raise AssertionError("the gate stays closed")


class Stage:
    """A service whose storage holds ``PROMPT`` and ``OTHER`` and whose host tier is empty, and clients of it."""

    def __init__(self, service: LocalService, store: SlowStore) -> None:
        self.service = service
        self.store = store
        self.per_read = BLOCKS
        self.engines: list[Engine] = []

    def engine(
        self,
        policy: PrefetchPolicy,
        timeout: float = 60.0,
        reuse_grid: int = 0,
        *,
        loads_ahead: bool = True,
        defer_timeout: float = 1.0,
    ) -> Engine:
        terms = StorageTierSettings(prefetch_policy=policy, prefetch_timeout=timeout)
        cache = CacheSettings(
            server=self.service.address,
            device_blocks=32,
            write_policy=WritePolicy.WRITE_THROUGH,
            rpc_timeout=TIMEOUT,
            reuse_grid=reuse_grid,
            defer_timeout=defer_timeout,
        )
        self.engines.append(
            Engine(self.service.address, fetches=terms, settings=cache, loads_ahead=loads_ahead)
        )
        return self.engines[-1]

    def figures(self) -> dict[str, Any]:
        (found,) = self.service.ask("storage")["layouts"]
        assert isinstance(found, dict)
        return found

    def read_begins(self, count: int = 1) -> None:
        until(lambda: len(self.store.reads) == count, "the read has begun")

    def read_comes_late(self) -> None:
        """It is read to its end, so that it cannot be taken back, and is answered when the disk is told to."""
        self.store.answer.clear()
        self.store.gate.set()
        until(lambda: self.store.ended == 1, "the disk has read")

    def read(self, reads: int) -> None:
        """Let the disk serve as many reads, and wait until their blocks are on the host."""
        stop = self.store.ended + reads
        left = self.figures()["reading_blocks"] - self.per_read * reads
        self.store.allow(reads)
        until(lambda: self.store.ended >= stop, "the disk has read")
        until(lambda: self.figures()["reading_blocks"] <= left, "the reads have ended")

    def read_ends(self) -> None:
        self.store.gate.set()
        self.store.answer.set()
        until(lambda: self.figures()["reading_blocks"] == 0, "the read has ended")


@contextmanager
def prefetch_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage; its clients end with it, and nothing may be held then."""
    stores: list[SlowStore] = []
    SlowStore.opened = stores

    def open_slow(context: ConnectorContext) -> SlowStore:
        settings = context.settings
        return SlowStore(
            settings.directory,
            context.layout,
            rank=context.rank or 0,
            size=settings.size,
            threads=2,
            retry_after=0.0,
        )

    monkeypatch.setattr("fdcache.service.server.storage_opening.open_storage", open_slow)
    with local_service(
        tmp_path,
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(tmp_path / "storage"),
        FDCACHE_STORAGE_SIZE="1MiB",
    ) as service:
        first = Engine(service.address)
        first.serve(PROMPT)
        first.serve(OTHER)
        until(lambda: service.ask("storage")["layouts"], "the storage is open")
        stage = Stage(service, stores[0])
        until(lambda: stage.figures()["blocks"] == 2 * BLOCKS, "the blocks are stored")
        first.close()
        service.ask("reset", tier="host")
        yield stage
        stage.store.gate.set()
        stage.store.answer.set()
        for engine in stage.engines:
            engine.close()
        assert_nothing_is_held(service)
