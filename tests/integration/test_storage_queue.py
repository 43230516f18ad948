"""The storage queue of a rank with a connector that raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fdcache import _core
from fdcache.controller.arena import HostArena
from fdcache.devices.cpu import CpuDevice
from fdcache.metadata import CacheLevel, CacheSwapMetadata, HashArray, StorageTask, SwapPurpose
from fdcache.storage.connector import BatchResult, RecordBatch, StorageStats
from fdcache.storage.queue import StorageQueue
from tests.local_connector import LocalConnector
from tests.service_help import TIMEOUT, until
from tests.storage_help import open_store, path_hashes, storage_layout

LAYOUT = storage_layout()


class RaisingConnector(LocalConnector):
    """A connector that raises where it should not, as somebody else's may."""

    raises = True

    def _may_raise(self) -> None:
        if self.raises:
            raise RuntimeError("an error of its own")

    def register(self, records: _core.RecordTable) -> None:
        self._may_raise()

    def unregister(self, records: _core.RecordTable) -> None:
        self._may_raise()

    def clear(self, timeout: float) -> int:
        self._may_raise()
        return super().clear(timeout)

    def get(self, batch: RecordBatch, timeout: float, cancel: _core.CancelFlag | None = None) -> BatchResult:
        self._may_raise()
        return super().get(batch, timeout, cancel)

    def stats(self) -> StorageStats:
        if hasattr(self, "busy"):
            self._may_raise()
        return super().stats()


def read(hashes: HashArray) -> CacheSwapMetadata:
    count = len(hashes)
    return CacheSwapMetadata(
        purpose=SwapPurpose.PREFETCH,
        src_type=CacheLevel.STORAGE,
        dst_type=CacheLevel.HOST,
        src_block_ids=np.full(count, -1, np.int32),
        src_generations=np.zeros(count, np.uint32),
        dst_block_ids=np.arange(count, dtype=np.int32),
        dst_generations=np.ones(count, np.uint32),
        hash_values=hashes,
        parent_hashes=np.zeros((count, 32), np.uint8),
    )


def test_a_connector_that_raises_fails_its_batches_and_nothing_else(tmp_path: Path) -> None:
    connector: Any = RaisingConnector(open_store(tmp_path, LAYOUT))
    arena = HostArena(LAYOUT, 4, CpuDevice())
    queue = StorageQueue(connector, arena)
    connector.busy = True
    queue.register(arena.table)
    queue.submit([], clear=True)
    failing, missing = (
        queue.prepare(StorageTask(plan_id=plan_id, swap=read(path_hashes(2)), timeout=10.0))
        for plan_id in (2, 3)
    )
    queue.submit([failing])
    assert failing.done.wait(TIMEOUT)
    outcome = failing.result()
    assert outcome.failed.tolist() == [0, 1]
    assert "RuntimeError: an error of its own" in str(outcome.error_message)
    queue.unregister(arena.table)
    until(lambda: not queue.erasures_queued, "the other thread has tried to empty the storage")
    connector.raises = False
    queue.submit([missing])
    assert missing.done.wait(TIMEOUT)
    assert missing.result().lost.tolist() == [0, 1], "it is asked again, and answers"
    queue.close()
    assert queue.erasures_queued == 0
    assert queue.clear_error == "an error of its own"
    arena.close()
