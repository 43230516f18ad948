"""Reads of a service: what an engine learns from those that it waits for."""

from __future__ import annotations

import pytest

from fdcache import _core
from fdcache.manager import Request
from fdcache.manager.cost import NO_PRIORS
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.service_reads import Wait
from fdcache.settings.cache import LoadOrRecompute
from tests.storage_engine import LAYOUT, tokens_of

BLOCK = LAYOUT.block_size
BLOCKS = 8


class Engine:
    """What an engine knows that computes and reads a block in so many seconds."""

    def __init__(self, *, compute: float, read: float) -> None:
        self.now = 0.0
        self.choices = LoadChoices(LoadOrRecompute.AUTO, LAYOUT, lambda: self.now, lambda: 0, NO_PRIORS)
        self.reads = self.choices.service_reads
        self.computes(compute)
        for _ in range(10):
            self.choices.model.link.observe(4 * LAYOUT.payload_bytes, 1e-6, self.now)
            self.choices.observe_read(4, 4 * read, has_ended=True)

    def computes(self, seconds: float) -> None:
        request = Request("observed", tokens_of(99, 4))
        for _ in range(40):
            chunks = [(request, 0, 4 * BLOCK)]
            self.choices.observe_prefill(chunks, 4 * seconds, waited=False, steps=1)

    @property
    def seconds_of_read(self) -> float:
        return self.choices.model.seconds_of_read(BLOCKS)


@pytest.fixture
def request_() -> Request:
    request = Request("a", tokens_of(1, BLOCKS))
    _core.BlockManager(_core.Tier(1), BLOCK, LAYOUT.fingerprint, 0).prepare(request)
    return request


def test_a_read_that_is_left_early_is_no_fast_one(request_: Request) -> None:
    engine = Engine(compute=1.0, read=0.1)
    before = engine.seconds_of_read
    assert engine.reads.judge(request_, 0, 0, BLOCKS) is Wait.WAIT
    engine.computes(1e-3)  # which other requests have shown meanwhile
    engine.now += 1e-4
    assert engine.reads.judge(request_, 0, 0, BLOCKS) is Wait.LEAVE
    assert engine.seconds_of_read == before


def test_a_read_that_is_late_is_a_slow_one(request_: Request) -> None:
    engine = Engine(compute=1.0, read=0.1)
    before = engine.seconds_of_read
    assert engine.reads.judge(request_, 0, 0, BLOCKS) is Wait.WAIT
    engine.now += 20.0
    assert engine.reads.judge(request_, 0, 0, BLOCKS) is Wait.LEAVE
    assert engine.seconds_of_read > 1.1 * before


@pytest.mark.parametrize(("arrived", "change"), [(0, 1.0), (3, 1.0), (BLOCKS, 0.9)])
def test_a_read_that_the_service_gave_up_is_no_fast_one(
    request_: Request, arrived: int, change: float
) -> None:
    engine = Engine(compute=1.0, read=0.1)
    before = engine.seconds_of_read
    assert engine.reads.judge(request_, 0, 0, BLOCKS) is Wait.WAIT
    engine.now += 1e-3
    engine.reads.found(request_, arrived)
    assert engine.seconds_of_read <= change * before
    assert (engine.seconds_of_read == before) is (arrived < BLOCKS)


def test_a_read_of_less_than_the_device_has_is_not_known_yet(request_: Request) -> None:
    engine = Engine(compute=1e-3, read=0.1)
    assert engine.reads.judge(request_, 6, 0, 4) is Wait.WAIT
    assert engine.reads.judge(request_, 6, 0, BLOCKS) is Wait.DROP
