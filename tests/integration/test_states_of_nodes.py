"""States of hybrid models that another node has stored, found by each of the ways to share a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from fdcache.groups import CacheGroup, Reach
from fdcache.layout import KVLayout
from fdcache.manager import LoadStatus, MatchStatus, Request
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from fdcache.settings.cache import PrefetchPolicy
from tests.integration.test_control_states import HYBRID, PROMPT, store
from tests.mooncake_master import Master, find_master
from tests.nodes_help import KEY, free_address
from tests.object_help import Bucket
from tests.offload_engine import BLOCK, OffloadEngine, ids, prompt
from tests.service_help import TIMEOUT, ServiceProcess, service_process, until
from tests.storage_help import storage_layout

ALONE = storage_layout(block_size=BLOCK, num_layers=2, groups=(CacheGroup(BLOCK, Reach.STATE),))


@dataclass
class Nodes:
    """Two services, the second of which has stored nothing."""

    first: ServiceProcess
    second: ServiceProcess
    stack: ExitStack

    def engine(
        self, service: ServiceProcess, layout: KVLayout = HYBRID, prefetch: str = "wait_complete"
    ) -> OffloadEngine:
        engine = OffloadEngine(
            layout=layout,
            server=service.address,
            rpc_timeout=TIMEOUT,
            prefetch=PrefetchPolicy(prefetch),
            device_blocks=32,
        )
        self.stack.callback(engine.close)
        until(lambda: engine.manager._host.index.room, "slots are granted")
        until(lambda: all(each["storage"] for each in service.ask("namespaces")), "the storage is open")
        return engine


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(find_master(), tmp_path)
    yield made
    made.kill()


@pytest.fixture(params=["nodes", "shared", "object", pytest.param("mooncake", marks=pytest.mark.nightly)])
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    common = {"FDCACHE_HOST_MEMORY": "4MiB", "FDCACHE_WRITE_POLICY": "write_through"}
    own: list[dict[str, str]] = [{}, {}]
    if request.param == "nodes":
        addresses = [free_address(), free_address()]
        common |= {
            "FDCACHE_STORAGE": "nodes",
            "FDCACHE_NODES_KEY": KEY,
            "FDCACHE_NODES": ",".join(addresses),
        }
        own = [{"FDCACHE_NODES_ADDRESS": each} for each in addresses]
    elif request.param == "shared":
        folder = tmp_path / "blocks"
        folder.mkdir()
        common |= {"FDCACHE_STORAGE": "shared", "FDCACHE_STORAGE_DIR": str(folder)}
    elif request.param == "mooncake":
        master: Master = request.getfixturevalue("master")
        common |= master.environment()
    else:
        bucket: Bucket = request.getfixturevalue("s3")
        common |= bucket.environment
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(service_process(tmp_path / name, **common, **more))
            for name, more in zip("ab", own, strict=True)
        )
        yield Nodes(first, second, stack)
        assert first.ask("integrity") == second.ask("integrity") == []


_numbers = count()


def matched(engine: OffloadEngine, tokens: list[int]) -> tuple[Request, int]:
    """Return a new request, and the pages that its match finds once it need not ask later."""
    request = Request(f"asks {next(_numbers)}", tokens)
    engine.manager.begin([request])

    pages: list[int] = []

    def answers() -> bool:
        engine.settle()
        match = engine.manager.match(request, 0)
        if is_matched := match.status is MatchStatus.MATCHED:
            pages.append(match.num_tokens // BLOCK)
        return is_matched

    until(answers, "it is matched")
    return request, pages[0]


def found(engine: OffloadEngine, tokens: list[int]) -> int:
    request, pages = matched(engine, tokens)
    engine.manager.finish([request])
    return pages


def test_states_that_another_node_has_stored_are_found_and_loaded(nodes: Nodes) -> None:
    first, second = nodes.engine(nodes.first), nodes.engine(nodes.second)
    store(first, "first", PROMPT, [0, 1, 2, 3], {1: [4, 5], 3: [6, 7]})
    until(lambda: found(second, PROMPT) == 3, "the pages up to the last states have come")
    request, pages = matched(second, PROMPT)
    assert pages == 3
    assert second.manager.load(request, ids(8, 9, 10, 11, 12)) == 5
    second.step()
    (outcome,) = second.collect()
    assert (outcome.status, outcome.recompute_from) == (LoadStatus.CONFIRMED, 3 * BLOCK)
    assert second.holds(request, [8, 9, 10])
    assert second.hold_keys([11, 12], second.state_keys(request, 3))
    second.manager.finish([request])


def test_the_last_states_before_the_end_of_the_stored_pages_are_found(nodes: Nodes) -> None:
    first, second = nodes.engine(nodes.first), nodes.engine(nodes.second)
    pages = 21
    tokens = prompt(*range(1, pages + 1))
    store(first, "first", tokens, [*range(pages)], {2: [22, 23]})
    until(lambda: found(second, tokens) == 2, "states are found that are far from the end")
    assert found(second, prompt(1, 2, 77, 78)) == 2
    assert found(second, prompt(1, 77)) == 0
    assert found(second, prompt(77, 78)) == 0


def test_states_alone_are_found(nodes: Nodes) -> None:
    first, second = nodes.engine(nodes.first, ALONE), nodes.engine(nodes.second, ALONE)
    request = Request("first", PROMPT)
    first.manager.begin([request])
    first.manager.prepare([request])
    for pages, block in ((2, 4), (4, 5)):
        (key,) = first.state_keys(request, pages)
        first.fill(block, key.tobytes())
        first.manager.offer_states(request, pages * BLOCK, ids(block), -1)
    first.settle()
    first.manager.finish([request])
    until(lambda: found(second, [*PROMPT, *prompt(5)]) == 4, "the last state has come")
    request, _ = matched(second, [*PROMPT, *prompt(5)])
    assert second.manager.load(request, ids(9)) == 1
    second.step()
    (outcome,) = second.collect()
    assert outcome.recompute_from == 4 * BLOCK
    assert second.hold_keys([9], second.state_keys(request, 4))
    second.manager.finish([request])


def test_a_prefetch_brings_the_last_states(nodes: Nodes) -> None:
    first, second = nodes.engine(nodes.first), nodes.engine(nodes.second)
    store(first, "first", PROMPT, [0, 1, 2, 3], {1: [4, 5], 3: [6, 7]})
    with Client(nodes.second.address, timeout=TIMEOUT) as client:
        control = Control(client)
        prefix = Prefix([*PROMPT, 0])
        until(lambda: control.prefetch(prefix).usable == 3, "pages and states have come")
        until(lambda: control.prefetch(prefix).done, "it is done")
    assert found(second, PROMPT) == 3


def test_with_best_effort_a_request_has_states_read_for_later_ones(nodes: Nodes) -> None:
    """Nobody asks again while the store answers: not the same request, and no later one."""
    first, second = nodes.engine(nodes.first), nodes.engine(nodes.second, prefetch="best_effort")
    store(first, "first", PROMPT, [0, 1, 2, 3], {1: [4, 5], 3: [6, 7]})
    until(lambda: stored(nodes.first) == 8, "four pages and the states after two of them are stored")
    assert found(second, PROMPT) == 0, "it waits for nothing"
    until(lambda: nodes.second.ask("stats")["tiers"]["host"]["ready"] == 5, "what it needs has come")
    assert found(second, PROMPT) == 3


def stored(service: ServiceProcess) -> int:
    (layout,) = service.ask("stats")["storage"]["layouts"]
    return int(layout["totals"]["stored_blocks"])
