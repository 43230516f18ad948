"""Waits for reads from storage, by this process or a service: which are worth it, and what is learnt from them."""

from __future__ import annotations

import pytest

from fdcache import _core
from fdcache.manager import Request
from fdcache.manager.cost import NO_PRIORS
from fdcache.manager.load_choices import LoadChoices
from fdcache.manager.matching import Waits
from fdcache.settings.cache import LoadOrRecompute, PrefetchPolicy
from fdcache.tiers.fetches import FetchTable, FetchTerms
from fdcache.tiers.host import Reading
from fdcache.tiers.waiting_fetches import Wait
from tests.storage_engine import LAYOUT, tokens_of
from tests.unit.test_storage_reads import Stage

BLOCK = LAYOUT.block_size
BLOCKS = 8


class Engine:
    """What an engine knows that computes and reads a block in so many seconds."""

    def __init__(self, *, compute: float, read: float) -> None:
        self.now = 0.0
        self.choices = LoadChoices(
            LoadOrRecompute.AUTO, LAYOUT, lambda: self.now, lambda: 0, NO_PRIORS, stages=LAYOUT.num_layers
        )
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


class OwnReads(Engine):
    """Reads of this process."""

    def __init__(self, request: Request, *, compute: float, read: float) -> None:
        super().__init__(compute=compute, read=read)
        self.request = request
        self.stage = Stage([request.block_hashes], host=64, clock=lambda: self.now)
        terms = FetchTerms(PrefetchPolicy.WAIT_COMPLETE)
        self.stage.host.fetch_table = self.table = FetchTable(lambda: self.stage.reads, terms)
        self.waits = Waits(self.choices, lambda: self.now, self.stage.host)
        self.number = self.table.number()

    def wait(self) -> Wait | None:
        path = self.request.block_hashes
        return self.waits.before_look_up(self.request, self.number, path, lambda _: 0)

    def all_arrive(self) -> None:
        self.stage.end(self.stage.send())


class ServiceReads(Engine):
    """Reads of a service, which tells with each look-up how far they have come."""

    def __init__(self, request: Request, *, compute: float, read: float) -> None:
        super().__init__(compute=compute, read=read)
        self.request = request
        self.waits = Waits(self.choices, lambda: self.now, None)
        self.has_arrived = False

    def wait(self, on_device: int = 0, arrived: int = 0, stop: int = BLOCKS) -> Wait | None:
        if self.has_arrived:
            self.waits.found(self.request, stop)
            return None
        return self.waits.answered(self.request, 1, on_device, Reading(arrived, stop))

    def all_arrive(self) -> None:
        self.has_arrived = True


@pytest.fixture
def request_() -> Request:
    request = Request("a", tokens_of(1, BLOCKS))
    _core.BlockManager(_core.Tier(1), BLOCK, LAYOUT.fingerprint, 0).prepare(request)
    return request


@pytest.mark.parametrize("owner", [OwnReads, ServiceReads])
class TestEitherReader:
    def test_a_request_waits_for_a_read_that_is_worth_it_until_it_has_come(
        self, owner: type[OwnReads | ServiceReads], request_: Request
    ) -> None:
        engine = owner(request_, compute=1.0, read=0.1)
        for _ in range(3):
            wait = engine.wait()
            assert wait is not None
            assert (wait.first, wait.arrived, wait.stop) == (0, 0, BLOCKS)
        engine.all_arrive()
        assert engine.wait() is None

    def test_a_read_that_is_not_worth_it_is_not_waited_for(
        self, owner: type[OwnReads | ServiceReads], request_: Request
    ) -> None:
        assert owner(request_, compute=1e-4, read=1.0).wait() is None

    def test_a_read_that_is_late_is_left_and_a_slow_one(
        self, owner: type[OwnReads | ServiceReads], request_: Request
    ) -> None:
        engine = owner(request_, compute=1.0, read=0.1)
        before = engine.seconds_of_read
        assert engine.wait() is not None
        engine.now += 20.0
        assert engine.wait() is None
        assert engine.seconds_of_read > 1.1 * before


def test_a_read_that_is_left_early_is_no_fast_one(request_: Request) -> None:
    engine = ServiceReads(request_, compute=1.0, read=0.1)
    before = engine.seconds_of_read
    assert engine.wait() is not None
    engine.computes(1e-3)  # which other requests have shown meanwhile
    engine.now += 1e-4
    assert engine.wait() is None
    assert engine.seconds_of_read == before


@pytest.mark.parametrize(("arrived", "change"), [(0, 1.0), (3, 1.0), (BLOCKS, 0.9)])
def test_a_read_that_the_service_gave_up_is_no_fast_one(
    request_: Request, arrived: int, change: float
) -> None:
    engine = ServiceReads(request_, compute=1.0, read=0.1)
    before = engine.seconds_of_read
    assert engine.wait() is not None
    engine.now += 1e-3
    engine.waits.found(request_, arrived)
    assert engine.seconds_of_read <= change * before
    assert (engine.seconds_of_read == before) is (arrived < BLOCKS)


def test_a_read_of_less_than_the_device_has_is_not_known_yet(request_: Request) -> None:
    engine = ServiceReads(request_, compute=1e-3, read=0.1)
    assert engine.wait(on_device=6, stop=4) is not None
    assert engine.wait(on_device=6) is None
