"""Hints of an engine's requests reach the tiers of its service, and their outcomes come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fdcache.hints import Hint, HintKind, HintOutcome, HintStatus
from fdcache.manager import CacheManager, Request
from fdcache.manager.offload import OffloadManager
from fdcache.service.server.metrics import render
from fdcache.service.wire.views import ServiceView
from tests.service_engine import Engine
from tests.service_help import LocalService, local_service, until

PROMPT = list(range(33))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path, FDCACHE_EVICTION="learned") as running:
        yield running


@pytest.fixture
def engine(service: LocalService) -> Iterator[Engine]:
    running = Engine(service.address)
    try:
        running.serve(PROMPT)
        until(lambda: ready_blocks(service) == 8, "blocks are published")
        yield running
    finally:
        running.close()


def namespace_of(service: LocalService) -> Any:
    (namespace,) = service.service.namespaces.values()
    return namespace


def ready_blocks(service: LocalService) -> int:
    tier = namespace_of(service).tier
    return 0 if tier is None else int(tier.stats().ready)


def later(manager: CacheManager | OffloadManager, count: int) -> list[HintOutcome]:
    """Outcomes of the service, once there are so many."""
    found: list[HintOutcome] = []

    def are_there() -> bool:
        found.extend(each for each in manager.take_hint_outcomes() if each.by_service)
        return len(found) >= count

    until(are_there, "outcomes of hints")
    return found


def test_a_hint_is_taken_by_the_service_and_kept(service: LocalService, engine: Engine) -> None:
    hint = Hint(kind="retain", seconds=0.05, id="mine")  # type: ignore[arg-type]
    (own,) = engine.manager.hint(Request("over", PROMPT), [hint])
    assert (own.status, own.by_service) == (HintStatus.TAKEN, False)
    taken, kept = later(engine.manager, 2)
    assert (taken.request_id, taken.id, taken.status, taken.blocks) == ("over", "mine", HintStatus.TAKEN, 8)
    assert (kept.id, kept.status, kept.lost) == ("mine", HintStatus.KEPT, 0)
    assert engine.manager.get_stats().hints.outcomes == {"sent": 1, "taken": 2, "kept": 2}
    assert namespace_of(service).hints.figures.outcomes == {"taken": 1, "kept": 1}


def test_hints_of_a_request_go_behind_its_blocks(service: LocalService, engine: Engine) -> None:
    """They are sent in order, so that the blocks of a request are there when its hint comes."""
    for number in range(1, 4):
        tokens = [10_000 * number + token for token in range(33)]
        engine.serve(tokens)
        engine.manager.hint(Request(str(number), tokens), [Hint.release()])
        (taken,) = later(engine.manager, 1)
        assert (taken.status, taken.blocks) == (HintStatus.TAKEN, 8)


def test_blocks_that_a_reset_removed_are_told(service: LocalService, engine: Engine) -> None:
    engine.manager.hint(Request("r", PROMPT), [Hint.retain(0.3)])
    (taken,) = later(engine.manager, 1)
    assert taken.status is HintStatus.TAKEN
    service.ask("reset", tier="host", namespace=engine.layout.fingerprint.hex()[:16])
    (lost,) = later(engine.manager, 1)
    assert (lost.status, lost.lost, lost.reason) == (HintStatus.EVICTED_EARLY, 8, "removed")


def test_a_client_that_leaves_leaves_no_hint_behind(service: LocalService, engine: Engine) -> None:
    engine.manager.hint(Request("r", PROMPT), [Hint.retain(3600)])
    later(engine.manager, 1)
    book = namespace_of(service).hints._book
    assert len(book.open) == 1
    engine.manager.close()
    until(lambda: not service.service.clients, "the client has gone")
    assert not book.open


def test_a_hint_whose_session_ends_has_an_outcome(service: LocalService, engine: Engine) -> None:
    engine.manager.hint(Request("r", PROMPT), [Hint.retain(3600)])
    later(engine.manager, 1)
    host = engine.manager._host
    assert host is not None
    host.sessions.lose(host.sessions.session, "the test ends it")  # type: ignore[attr-defined]
    (ended,) = later(engine.manager, 1)
    assert (ended.status, ended.reason) == (HintStatus.IGNORED, "the session at the service ended")


def test_an_offload_manager_passes_hints_on(service: LocalService, engine: Engine) -> None:
    with OffloadManager(engine.manager.settings, engine.layout) as manager:
        link = manager._service
        assert link is not None
        until(lambda: link.arena != "none", "there is a session")
        request = Request("r", PROMPT, hints=[Hint.returns(30)])
        manager.begin([request])
        manager.finish([request])
        assert [(each.status, each.by_service) for each in request.hint_outcomes] == [(HintStatus.SENT, True)]
        (taken,) = later(manager, 1)
        assert (taken.status, taken.blocks) == (HintStatus.TAKEN, 8)


def metrics(service: LocalService) -> str:
    return render(msgspec.convert(service.ask("stats"), ServiceView, strict=False)).decode()


def test_metrics_count_hints_of_namespaces_and_clients(service: LocalService, engine: Engine) -> None:
    half = len(PROMPT) // 2
    hints = [
        Hint(kind=HintKind.RETAIN, seconds=0.05, end=half),
        Hint(kind=HintKind.RETAIN, seconds=3600, start=half),
    ]
    engine.manager.hint(Request("r", PROMPT), hints)
    later(engine.manager, 3)
    text = metrics(service)
    namespace = engine.layout.fingerprint.hex()[:16]
    assert f'fdcache_hints_given_total{{namespace="{namespace}"}} 2.0' in text
    assert f'fdcache_hints_total{{namespace="{namespace}",outcome="taken"}} 2.0' in text
    assert f'fdcache_hints_evicted_early_total{{namespace="{namespace}",reason="room"}} 0.0' in text

    def is_reported() -> bool:
        engine.carry_out(engine.manager.take_plans())
        return any(
            line.startswith("fdcache_client_hints_total")
            and 'outcome="sent"' in line
            and line.endswith(" 2.0")
            for line in metrics(service).splitlines()
        )

    until(is_reported, "the client has reported its figures")
