"""Extents that cannot be recovered: their memory is given to others, and what was in it is never found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.service.client.connection import Connection
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Register, Registered
from tests.service_engine import Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service

PROMPT = list(range(41))
KEPT = {"FDCACHE_HOST_MEMORY": "2MiB", "FDCACHE_DISCARD": "0", "FDCACHE_NAMESPACE_QUOTA": "0.125"}


def test_extents_without_their_layout_are_empty_when_they_are_used_again(tmp_path: Path) -> None:
    shape = layout(ranks=2)
    service = LocalService(tmp_path, **KEPT)
    engine = Engine(service.address, shape)
    while ready_blocks(service) < 10:
        engine.serve(PROMPT)
        engine.await_stock()
    engine.close()
    service.stop()
    (lost,) = tmp_path.glob("*.layout")
    lost.unlink()
    service = LocalService(tmp_path, **KEPT)
    assert ready_blocks(service) == 0
    line, live = Connection(service.address), LiveFile(tmp_path)
    answer, _ = line.call(Register(shape.to_json().encode(), live.live, "stores nothing"), TIMEOUT)
    assert isinstance(answer, Registered)
    live.close()
    line.close()
    service.crash()
    with local_service(tmp_path, **KEPT) as service:
        assert ready_blocks(service) == 0
        engine = Engine(service.address, shape, stocked=False)
        engine.serve(PROMPT)  # it compares every byte that is loaded
        engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_extent_that_vanished_costs_its_own_blocks_alone(tmp_path: Path, ranks: int) -> None:
    kept = {"FDCACHE_HOST_MEMORY": "2MiB", "FDCACHE_DISCARD": "0"}
    prompts = [list(range(1000 * i, 1000 * i + 41)) for i in range(1, 13)]
    service = LocalService(tmp_path, **kept)
    engine = Engine(service.address, layout(ranks=ranks))
    while ready_blocks(service) < 120:
        for prompt in prompts:
            engine.serve(prompt)
            engine.await_stock()
    engine.close()
    service.stop()
    (lost,) = tmp_path.glob(f"*-r{ranks - 1}-00001")
    lost.unlink()
    with local_service(tmp_path, **kept) as service:
        assert ready_blocks(service) >= 60
        assert service.ask("integrity") == []
        engine = Engine(service.address, layout(ranks=ranks), stocked=False)
        for prompt in prompts:
            engine.serve(prompt)
        engine.close()
