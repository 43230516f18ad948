"""A connector over a slab file: eviction when the file is full."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fdcache.storage.connector import Outcome
from fdcache.testing.storage import KnownRecords, conformance_layout, path_of
from tests.local_connector import LocalConnector
from tests.storage_help import open_store


def test_a_full_file_evicts_the_oldest_leaves_first(tmp_path: Path) -> None:
    layout = conformance_layout()
    connector = LocalConnector(open_store(tmp_path, layout, size=100 * 1024))
    capacity = connector.stats().capacity_blocks
    assert capacity is not None
    assert 4 <= capacity < 20
    records = KnownRecords(layout, 16)
    old, new = path_of(capacity, "old"), path_of(2, "new")
    assert connector.put(records.fill(old[:8]), 10).ok.all() or capacity < 8
    connector.clear(10)
    assert connector.put(records.fill(old[: min(capacity, 16)]), 10).ok.all()
    assert connector.put(records.fill(new), 10).ok.all()
    assert connector.exists(old, 10).length == min(capacity, 16) - (2 if capacity <= 16 else 0)
    assert connector.exists(new, 10).length == 2
    connector.close()


def test_a_corrupt_block_is_removed_with_its_descendants(tmp_path: Path) -> None:
    layout = conformance_layout()
    connector = LocalConnector(open_store(tmp_path, layout))
    records = KnownRecords(layout, 8)
    hashes = path_of(5, "chain")
    connector.put(records.fill(hashes), 10)
    slot = int(connector.pool.find(hashes[2:3]).slots[0])
    store = connector.store
    with store.path.open("r+b") as file:
        file.seek(store.file.superblock.record_offset + slot * layout.record_bytes + 100)
        file.write(b"\xff" * 50)
    records.wipe()
    read = connector.get(records.batch(hashes), 10)
    assert read.outcomes.tolist() == [Outcome.OK, Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.OK]
    assert connector.exists(hashes, 10).length == 2
    again = connector.put(records.fill(hashes), 10)
    assert again.ok.all()
    assert slot not in connector.pool.find(hashes).slots.tolist(), "a bad slot is not used again"
    assert np.array_equal(connector.pool.check_integrity(), [])
    connector.close()
