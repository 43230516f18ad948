"""Corrupt host records, found by a load or a write to storage: forgotten, and computed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache import _core
from fdcache.manager import LoadStatus, Request
from fdcache.settings.cache import Verify
from tests.storage_engine import BLOCK, HOST_BLOCKS, LAYOUT, Engine, counters, store_a_path, tokens_of


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with a path of 8 blocks that begins with token 1."""
    store_a_path(tmp_path)
    return tmp_path


def test_verify_all_refuses_and_drops_changed_host_records(stored: Path) -> None:
    engine = Engine(stored, verify=Verify.ALL)
    first = Request("first", tokens_of(1, 8))
    engine.manager.begin([first])
    engine.settle()
    arena = engine.controller.host_arena
    assert arena is not None
    changed = next(slot for slot in range(HOST_BLOCKS) if arena.table.header(slot).state == 2)
    arena.table.record(changed)[LAYOUT.planes[-1].offset] ^= 1
    assert engine.match(first).num_cached_tokens == 8 * BLOCK
    assert engine.allocate(first).ok
    engine.send()
    (outcome,) = engine.manager.apply(engine.controller.wait_reports(30))
    assert outcome.status is LoadStatus.FAILED
    assert "checksum" in str(outcome.error_message)
    assert counters(engine).blocks_corrupt_in_host == 1
    engine.settle()
    engine.compute(first, first.num_tokens)
    engine.manager.finish([first])
    engine.close()


def spoil_header(engine: Engine) -> None:
    """Overwrite the header of one READY host record; its bytes stay."""
    arena = engine.controller.host_arena
    assert arena is not None
    slot = next(slot for slot in range(HOST_BLOCKS) if arena.table.header(slot).state == 2)
    arena.table.set_header(slot, _core.SlotHeader.from_bytes(b"\x5a" * 128))


def test_a_host_record_that_cannot_be_loaded_is_dropped_and_computed_once(stored: Path) -> None:
    engine = Engine(stored)
    first = Request("first", tokens_of(1, 8))
    engine.manager.begin([first])
    engine.settle()
    spoil_header(engine)
    assert engine.match(first).num_cached_tokens == 8 * BLOCK
    assert engine.allocate(first).ok
    engine.send()
    (outcome,) = engine.manager.apply(engine.controller.wait_reports(30))
    assert outcome.status is LoadStatus.FAILED
    assert counters(engine).blocks_corrupt_in_host == 1
    engine.settle()
    engine.compute(first, first.num_tokens)
    engine.manager.finish([first])
    engine.settle()
    engine.manager._device.reset()
    engine.run("again", tokens_of(1, 8))
    assert counters(engine).blocks_corrupt_in_host == 1, "the bad record was met once"
    engine.close()


def test_a_host_record_that_cannot_be_stored_is_dropped(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    request = Request("first", tokens_of(1, 4))
    engine.match(request)
    assert engine.allocate(request).ok
    engine.compute(request, request.num_tokens)
    engine.send()
    # The copy to the host has been reported, the store is planned and not yet sent.
    engine.manager.apply(engine.controller.wait_reports(30))
    spoil_header(engine)
    engine.settle()
    assert counters(engine).blocks_corrupt_in_host == 1
    assert engine.manager.get_stats().host.ready < 4  # type: ignore[union-attr]
    engine.manager.finish([request])
    engine.manager._device.reset()
    assert engine.run("again", tokens_of(1, 4)).num_cached_tokens < 4 * BLOCK
    assert counters(engine).blocks_corrupt_in_host == 1
    engine.close()
