"""Control of prefixes of models with groups of layers: blocks are pages, and states go and stay with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from fdcache.errors import RefusedError
from fdcache.groups import CacheGroup, Reach, pages_of, record_keys, state_keys
from fdcache.hashing import tenant_key
from fdcache.layout import KVLayout
from fdcache.manager import NO_BLOCK, MatchStatus, Request
from fdcache.service.client.control import Control, Prefix
from fdcache.settings.cache import PrefetchPolicy
from tests.offload_engine import BLOCK, OffloadEngine, ids, prompt
from tests.service_help import TIMEOUT, LocalService, local_service, until
from tests.storage_help import path_hashes, storage_layout

STATE = CacheGroup(BLOCK, Reach.STATE)
STATES_ALONE = storage_layout(block_size=BLOCK, num_layers=2, groups=(STATE, STATE))
HYBRID = storage_layout(block_size=BLOCK, num_layers=2, groups=(STATE, STATE, CacheGroup(BLOCK)))
WINDOWS = storage_layout(
    block_size=BLOCK, num_layers=2, groups=(CacheGroup(BLOCK), CacheGroup(BLOCK, Reach.LAST, 64))
)
PROMPT = prompt(1, 2, 3, 4)
PREFIX = Prefix(PROMPT)


@contextmanager
def served(tmp_path: Path, shape: KVLayout, **more: str) -> Iterator[tuple[LocalService, OffloadEngine]]:
    variables = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path / "disk"),
        "FDCACHE_STORAGE_SIZE": "4MiB",
        "FDCACHE_HOST_MEMORY": "1MiB",
        **more,
    }
    with local_service(tmp_path, **variables) as service:
        engine = OffloadEngine(
            layout=shape,
            server=service.address,
            rpc_timeout=TIMEOUT,
            prefetch=PrefetchPolicy.BEST_EFFORT,
            device_blocks=32,
        )
        until(lambda: engine.manager._host.index.room, "slots are granted")
        yield service, engine
        for pin in Control(service.client).pins():
            Control(service.client).unpin(pin.pin or 0)
        engine.close()
        until(lambda: not service.ask("clients"), "it has left")
        assert service.ask("integrity") == []


def store(
    engine: OffloadEngine,
    name: str,
    tokens: list[int],
    table: list[int],
    states: dict[int, list[int]],
    tenant: str | None = None,
) -> None:
    """Store the pages of a prompt, and the states after some of them."""
    request = Request(name, tokens, tenant=tenant)
    engine.manager.begin([request])
    engine.manager.prepare([request])
    engine.compute(request, table)
    engine.manager.offer(request, len(tokens), ids(*table))
    for pages, blocks in states.items():
        for block, key in zip(blocks, engine.state_keys(request, pages), strict=True):
            engine.fill(block, key.tobytes())
        engine.manager.offer_states(request, pages * BLOCK, ids(*blocks), table[pages - 1])
    engine.settle()
    engine.manager.finish([request])


def found(engine: OffloadEngine, tokens: list[int]) -> int:
    """Return how many pages a request of another engine's would load."""
    engine.manager.forget(ids(*range(32)))
    request = Request("asks", tokens)
    match = engine.manager.match(request, 0)
    engine.manager.finish([request])
    assert match.status is MatchStatus.MATCHED
    return match.num_tokens // BLOCK


def evictable(service: LocalService) -> int:
    return int(service.ask("stats")["tiers"]["host"]["evictable"])


def stored_blocks(service: LocalService, count: int) -> None:
    until(lambda: service.ask("stats")["tiers"]["host"]["ready"] == count, "they are on the host")
    until(lambda: service.ask("storage")["blocks"] == count, "they are stored")


HYBRID_RECORDS = 4 + 2 * 2


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[tuple[LocalService, OffloadEngine, Control]]:
    """A service whose host tier and storage have PROMPT with the states after its first and third page."""
    with served(tmp_path, HYBRID) as (service, engine):
        store(engine, "first", PROMPT, [0, 1, 2, 3], {1: [4, 5], 3: [6, 7]})
        stored_blocks(service, HYBRID_RECORDS)
        yield service, engine, Control(service.client)


def test_a_pin_holds_the_last_states_with_the_pages(
    hybrid: tuple[LocalService, OffloadEngine, Control],
) -> None:
    service, engine, control = hybrid
    pin = control.pin(PREFIX, 600)
    assert (pin.blocks, pin.host, pin.pinned, pin.usable) == (4, 4, 4, 3)
    assert evictable(service) == 2, "the states after the first page alone"
    prompts, first = count(100, 8), Prefix(PROMPT[: BLOCK + 1])

    def states_have_left() -> bool:
        begin = next(prompts)
        store(engine, "flood", prompt(*range(begin, begin + 8)), [*range(8, 16)], {})
        return not control.explain(first).blocks[0].states

    until(states_have_left, "the states that nothing pins have left")
    assert found(engine, PROMPT) == 3, "the pinned prefix is as usable as it was"
    assert [(each.pinned, each.usable) for each in control.pins()] == [(4, 3)]


def test_a_budget_counts_states_too(hybrid: tuple[LocalService, OffloadEngine, Control]) -> None:
    service, engine, control = hybrid
    (now,) = control.quotas()
    store(engine, "t", PROMPT, [8, 9, 10, 11], {1: [12, 13], 3: [14, 15]}, "small")
    stored_blocks(service, 2 * HYBRID_RECORDS)
    control.set_quota("small", HYBRID_RECORDS / now.most_blocks)
    pin = control.pin(Prefix(PROMPT, tenant="small"), 600)
    assert (pin.pinned, pin.over_budget) == (2, 2), "two pages, and two states after the first"
    assert evictable(service) == 2 * HYBRID_RECORDS - 4
    control.set_quota("small", 1.0)
    assert control.pin(Prefix(PROMPT, tenant="small"), 600).pinned == 4


def test_a_move_takes_pages_and_states_and_a_prefetch_brings_them_back(
    hybrid: tuple[LocalService, OffloadEngine, Control],
) -> None:
    service, engine, control = hybrid
    until(lambda: (moved := control.move(PREFIX)).done and moved.freed, "they have moved")
    assert service.ask("stats")["tiers"]["host"]["ready"] == 0
    explained = control.explain(PREFIX)
    assert [(each.tier, each.states) for each in explained.blocks] == [
        ("storage", True),
        ("storage", False),
        ("storage", True),
        ("storage", False),
    ]
    assert found(engine, PROMPT) == 0, "this engine waits for no storage"
    until(lambda: control.prefetch(PREFIX).done, "it is read")
    read = control.prefetch(PREFIX)
    assert (read.host, read.usable, read.done) == (4, 3, True)
    assert found(engine, PROMPT) == 3


def test_a_move_leaves_pages_that_others_continue(
    hybrid: tuple[LocalService, OffloadEngine, Control],
) -> None:
    service, engine, control = hybrid
    store(engine, "other", prompt(1, 2, 8), [8, 9, 10], {})
    stored_blocks(service, HYBRID_RECORDS + 1)
    until(lambda: (moved := control.move(PREFIX)).done and moved.kept == 2, "they have moved")
    assert [each.tier for each in control.explain(PREFIX).blocks] == ["host", "host", "storage", "storage"]


def test_a_deletion_counts_pages_and_says_deleted(
    hybrid: tuple[LocalService, OffloadEngine, Control],
) -> None:
    service, _, control = hybrid
    planned = control.delete(PREFIX, start=1, dry_run=True)
    assert (planned.deleted_host, planned.deleted_storage) == (3, 3)
    done = control.delete(PREFIX, start=1)
    assert (done.host, done.usable, done.deleted_host, done.deleted_storage) == (1, 1, 3, 3)
    assert service.ask("stats")["tiers"]["host"]["ready"] == 3, "a page and its states"
    assert [each.reason for each in control.explain(PREFIX).blocks[1:]] == ["deleted"] * 3


def test_blocks_of_a_model_with_windows_are_pages(tmp_path: Path) -> None:
    with served(tmp_path, WINDOWS) as (service, engine):
        table = [[i, 4 + i] for i in range(4)]
        store(engine, "first", PROMPT, [block for page in table for block in page], {})
        stored_blocks(service, 8)
        control = Control(service.client)
        assert control.pin(PREFIX, 600, most_blocks=3).pinned == 3
        assert evictable(service) == 2
        assert control.unpin(PREFIX).blocks == 3
        moved = control.move(PREFIX)
        assert (moved.blocks, moved.stored, moved.freed, moved.done) == (4, 4, 4, True)
        until(lambda: control.prefetch(PREFIX).done, "it is read")
        assert control.prefetch(PREFIX).host == 4
        deleted = control.delete(PREFIX, start=2)
        assert (deleted.deleted_host, deleted.deleted_storage, deleted.host) == (2, 2, 2)


def test_records_are_counted_by_page() -> None:
    hashes = path_hashes(50)
    keys = [*record_keys(hashes, 3), *state_keys(hashes[::2], 3, 2)]
    assert pages_of(np.array(keys), 5) == 50
    assert pages_of(np.array(keys[:4]), 5) == 2
    assert pages_of(hashes, 1) == 50
    assert pages_of(hashes[:0], 5) == 0


def test_a_tenant_s_states_of_a_model_without_pages_are_deleted(tmp_path: Path) -> None:
    with served(tmp_path, STATES_ALONE) as (service, engine):
        for number, tenant in enumerate(("a", "b")):
            first = 8 * number
            states = {1: [first, first + 1], 3: [first + 2, first + 3]}
            store(engine, tenant, PROMPT, [NO_BLOCK] * 4, states, tenant)
        stored_blocks(service, 8)
        service.ask("reset", tenant=tenant_key("a").hex())
        stored_blocks(service, 4)
        engine.manager.evicted(ids(*range(16)))  # the device has them all: a's are not copied out again
        engine.settle()
        stored_blocks(service, 4)
        (left,) = (each for each in Control(service.client).quotas() if each.blocks)
        assert left.blocks == 4
        assert left.tenant == tenant_key("b").hex()[:12]
        with pytest.raises(RefusedError, match="its model keeps states alone"):
            Control(service.client).delete(PREFIX)
