"""Copies of blocks given away that are reported before those above them, in an own host tier and in a service's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fdcache.manager import MatchStatus, Request
from fdcache.metadata import TransferReport
from fdcache.settings.cache import WritePolicy
from tests.offload_engine import BLOCK, OffloadEngine, ids, prompt
from tests.service_engine import ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service, until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as service:
        yield service


@pytest.fixture(params=["own", "service"])
def engine(request: pytest.FixtureRequest) -> OffloadEngine:
    if request.param == "own":
        return OffloadEngine()
    engine = OffloadEngine(server=request.getfixturevalue("service").address, rpc_timeout=TIMEOUT)
    until(lambda: engine.manager._host.index.room, "slots are granted")
    return engine


def three_in_flight(engine: OffloadEngine) -> tuple[Request, list[list[TransferReport]]]:
    """Return a request of four blocks, copied by three plans, each below the one before, and the plans' reports."""
    request = Request("first", prompt(1, 2, 3, 4))
    engine.manager.begin([request])
    engine.compute(request, range(4))
    engine.manager.offer(request, BLOCK, ids(0))
    engine.step()
    reports = [engine.reports()]
    for given, blocks in ((ids(1, 2), 3), (ids(3), 4)):
        engine.manager.offer(request, blocks * BLOCK, ids(0, 1, 2, 3))
        engine.manager.evicted(given)
        engine.step()
        for block in given.tolist():
            engine.fill(block, None)
        reports.append(engine.reports())
    return request, reports


def found(engine: OffloadEngine, request: Request) -> int:
    match = engine.manager.match(request, 0)
    assert match.status is MatchStatus.MATCHED
    return match.num_tokens // BLOCK


def test_blocks_reported_before_those_above_them_are_kept(
    engine: OffloadEngine, request: pytest.FixtureRequest
) -> None:
    first, reports = three_in_flight(engine)
    for each in reversed(reports):
        engine.manager.apply(each)
    assert not engine.manager.has_pending_work
    engine.manager.finish([first])
    if "service" in request.fixturenames and engine.manager.settings.server is not None:
        until(lambda: ready_blocks(request.getfixturevalue("service")) == 4, "they are published")
    second = Request("second", prompt(1, 2, 3, 4))
    engine.manager.begin([second])
    assert found(engine, second) == 4
    assert engine.manager.load(second, ids(5, 6, 7, 8)) == 4
    engine.step()
    engine.collect()
    assert engine.holds(second, [5, 6, 7, 8])
    engine.manager.finish([second])
    assert engine.manager.get_stats().counters.blocks_evicted_to_host == 3
    engine.close()


def test_blocks_below_a_copy_that_fails_are_dropped(engine: OffloadEngine) -> None:
    first, (above, *below) = three_in_flight(engine)
    for each in below:
        engine.manager.apply(each)
    assert engine.manager.has_pending_work
    (report,) = above
    (result,) = report.results
    failed = replace(result, failed=np.zeros(1, np.int32), error_message="the test")
    engine.manager.apply([replace(report, results=(failed,))])
    engine.manager.finish([first])
    second = Request("second", prompt(1, 2, 3, 4))
    engine.manager.begin([second])
    assert found(engine, second) == 0
    engine.manager.finish([second])
    engine.close()


@pytest.mark.parametrize("trouble", ["reset", "lost"])
def test_no_slot_stays_held_after_a_reset_or_the_loss_of_a_rank(engine: OffloadEngine, trouble: str) -> None:
    first, (above, *below) = three_in_flight(engine)
    for each in below:
        engine.manager.apply(each)
    if trouble == "reset":
        engine.manager.reset_cache()
        engine.manager.apply(above)
    else:
        engine.manager.worker_lost(0)
        assert engine.manager._host.in_use == 0
    engine.manager.finish([first])
    engine.close()


def test_blocks_given_away_while_a_service_drains_are_kept(service: LocalService) -> None:
    engine = OffloadEngine(server=service.address, rpc_timeout=TIMEOUT, policy=WritePolicy.WRITE_BACK)
    sessions = engine.manager._host.sessions  # type: ignore[attr-defined]
    until(lambda: engine.manager._host.index.room, "slots are granted")
    request = Request("first", prompt(1, 2))
    engine.manager.begin([request])
    engine.compute(request, range(2))
    engine.manager.offer(request, 2 * BLOCK, ids(0, 1))
    engine.manager.evicted(ids(0, 1))
    sessions.leave(sessions.session)
    engine.step()
    engine.manager.apply(engine.reports())
    engine.manager.finish([request])
    assert engine.manager.get_stats().counters.copies_failed == 0
    until(lambda: ready_blocks(service) == 2, "they are published")
    engine.close()
