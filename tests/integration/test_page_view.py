"""What the page asks of a service: totals over time that match the traffic, and clients whose figures make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service_engine import PROMPT, Engine, ready_blocks
from tests.service_help import LocalService, local_service, until

OTHER = list(range(900, 953))
"""A prompt that takes a device of 14 blocks whole."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as own:
        yield own


def last(service: LocalService) -> dict[str, Any]:
    """Return the newest row of totals by column."""
    shown = service.ask("page")
    return dict(zip(shown["columns"], shown["rows"][-1], strict=True)) if shown["rows"] else {}


def test_the_totals_are_those_of_the_engine(service: LocalService) -> None:
    engine = Engine(service.address, device_blocks=14)
    for prompt in (PROMPT, OTHER, PROMPT):
        engine.serve(prompt)
        until(lambda: ready_blocks(service) >= 10, "the blocks are stored")
    counters = engine.manager.get_stats().counters
    assert counters.host_hit_tokens > 0

    def is_told() -> bool:
        engine.manager.take_plans()  # it offers its figures for the next heartbeat
        row = last(service)
        names = ("device_hit_tokens", "host_hit_tokens", "storage_hit_tokens")
        told = [row.get(name) for name in names]
        return row.get("prompt_tokens") == counters.lookup_tokens and told == [
            getattr(counters, name) for name in names
        ]

    until(is_told, "the totals are those of the engine")
    engine.close()


def test_blocks_that_were_lost_count_as_known_misses(service: LocalService) -> None:
    engine = Engine(service.address, device_blocks=14)
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    engine.serve(OTHER)
    service.ask("reset", tier="host")
    engine.serve([*PROMPT, *range(800, 804)])
    expected = (10 + 13 + 11, 10)
    until(
        lambda: (last(service).get("missed_sample"), last(service).get("missed_known")) == expected,
        "they are known",
    )
    engine.close()


def test_rows_after_a_number_are_those_that_are_new(service: LocalService) -> None:
    until(lambda: service.ask("page")["row"] >= 3, "there are rows")
    shown = service.ask("page")
    later = service.ask("page", row=shown["row"] - 2)
    assert len(later["rows"]) == later["row"] - shown["row"] + 2
    assert service.ask("page", row=10**6)["rows"][0] == shown["rows"][0]
