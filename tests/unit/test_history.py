"""The eviction log of a namespace."""

from __future__ import annotations

from fdcache.service.server.history import EvictionLog
from fdcache.service.wire.views import MissReason


def test_the_oldest_entries_are_forgotten_first() -> None:
    log = EvictionLog(2)
    log.add([b"1", b"2"], MissReason.EVICTED)
    log.add([b"1", b"3"], MissReason.RESET)
    reasons = [log.find(key)[1] for key in (b"1", b"2", b"3")]
    assert reasons == [MissReason.RESET, MissReason.NOT_STORED, MissReason.RESET]


def test_a_block_that_is_stored_again_has_no_entry() -> None:
    log = EvictionLog(2)
    log.add([b"1"], MissReason.EVICTED)
    log.forget([b"1", b"2"])
    assert log.find(b"1") == (None, MissReason.NOT_STORED)
