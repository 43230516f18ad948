"""A service whose disk is full: engines go on, the state is told, and its end is not held up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_serve_storage import BLOCKS, storage_of, storage_settings
from tests.mounts import file_system, fill_up
from tests.service_engine import PROMPT, Engine
from tests.service_help import LocalService, local_service, until

OTHER = [token + 1000 for token in PROMPT]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    yield from file_system(tmp_path / "disk", "1m")


def stored_blocks(service: LocalService) -> int:
    (layout,) = storage_of(service)["layouts"]
    return int(layout["totals"]["stored_blocks"])


def has_no_slot(service: LocalService) -> bool:
    """Return True when the service has taken in that none of its slots has room."""
    (layout,) = storage_of(service)["layouts"]
    return bool(layout["withheld"] == layout["capacity_blocks"])


def test_engines_go_on_and_room_is_used_when_it_comes(tmp_path: Path, disk: Path) -> None:
    with local_service(tmp_path / "s", {"retry_after": 0.0}, **storage_settings(disk)) as service:
        engine = Engine(service.address)
        until(lambda: storage_of(service)["layouts"], "the storage is open")
        ballast = fill_up(disk)
        engine.serve(PROMPT)
        until(lambda: has_no_slot(service), "no slot has room")
        assert storage_of(service)["state"] == "full"
        (layout,) = storage_of(service)["layouts"]
        assert "StorageFullError" in layout["error"]
        assert layout["totals"]["no_room"] > 0
        other = Engine(service.address)
        assert other.serve(PROMPT)[0] == BLOCKS, "the host tier has them all the same"
        ballast.unlink()
        engine.serve(OTHER)
        until(lambda: storage_of(service)["blocks"] == BLOCKS, "what came then is stored")
        assert storage_of(service)["state"] == "ready"
        engine.close()
        other.close()
        assert service.drain()


def test_the_end_does_not_wait_for_a_disk_that_takes_nothing(tmp_path: Path, disk: Path) -> None:
    settings = storage_settings(
        disk,
        FDCACHE_WRITE_POLICY="write_back",
        FDCACHE_DRAIN_TIMEOUT="1h",
    )
    with local_service(tmp_path / "s", {"retry_after": 3600.0, "write_blocks": 3}, **settings) as service:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("stats")["tiers"]["host"]["ready"] == BLOCKS, "the blocks are there")
        until(lambda: storage_of(service)["layouts"], "the storage is open")
        fill_up(disk)
        engine.close()
        assert service.drain()


def test_a_service_on_a_full_disk_stores_new_blocks_in_place_of_the_coldest(
    tmp_path: Path, disk: Path
) -> None:
    settings = storage_settings(disk, FDCACHE_STORAGE_SIZE="8MiB")
    with local_service(tmp_path / "s", {"retry_after": 0.0}, **settings) as service:
        engine = Engine(service.address)
        until(lambda: storage_of(service)["layouts"], "the storage is open")
        held = fill_up(disk)
        with held.open("r+b") as ballast:
            ballast.truncate(held.stat().st_size - 20 * 4096)
        stored = 0
        while storage_of(service)["evictions"] < 3 * BLOCKS:
            engine.await_stock(BLOCKS)
            engine.serve([token + 1000 * stored for token in PROMPT])
            stored += 1
            until(lambda: stored_blocks(service) >= stored * BLOCKS, "stored")  # noqa: B023
        (layout,) = storage_of(service)["layouts"]
        assert layout["state"] == "full"
        assert layout["withheld"] > 0
        assert layout["blocks"] + layout["withheld"] <= layout["capacity_blocks"]
        assert layout["totals"]["dropped_blocks"] == 0
        held.unlink()
        grown = layout["blocks"] + BLOCKS
        numbers = itertools.count(stored)

        def has_grown() -> bool:
            number = next(numbers)
            engine.serve([token + 1000 * number for token in PROMPT])
            return bool(storage_of(service)["blocks"] >= grown)

        until(has_grown, "it stores more than before")
        engine.close()
        assert service.drain()
