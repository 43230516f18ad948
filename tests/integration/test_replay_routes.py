"""How requests of ``fdcache replay --nodes --route prefix`` find a node: by the events that services publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from fdcache.metadata import CacheLevel, HashArray
from fdcache.replay.nodes import routing
from fdcache.replay.nodes.routing import BlockPaths, NodeBlocks, PrefixRouter, PrefixRule
from fdcache.replay.workloads import OUTPUT_STREAMS, WorkItem
from fdcache.service.server.event_publisher import EventPublisher
from fdcache.service.server.notes_file import NotesFile
from fdcache.service.server.router_feed import RouterFeed
from fdcache.service.wire.protocol import DescribedPath
from fdcache.service.wire.router_events import AllBlocksCleared, EventBatch, RouterBlockStored
from fdcache.tiers.pool import EVENT_REMOVED, EVENT_STORED
from tests.service_engine import BLOCK, layout
from tests.service_help import until
from tests.storage_help import path_hashes

# --- the rule -----------------------------------------------------------------------------------------------


def test_a_request_goes_where_most_of_it_is() -> None:
    rule = PrefixRule(3)
    assert rule.choose([0, 9, 6], 10) == 1
    assert rule.choose([9, 0, 6], 10) == 0


def test_a_prefix_that_everybody_uses_holds_no_request() -> None:
    rule = PrefixRule(3)
    assert {rule.choose([5, 0, 0], 10) for _ in range(3)} == {0, 1, 2}


def test_of_several_nodes_the_one_with_the_least_work_has_the_request() -> None:
    rule = PrefixRule(3)
    assert rule.choose([0, 0, 0], 40) == 0
    assert rule.choose([8, 0, 8], 10) == 2
    assert rule.choose([0, 0, 0], 10) == 1


def test_work_of_long_ago_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_LATELY", 1)
    rule = PrefixRule(2)
    assert rule.choose([0, 0], 1000) == 0
    assert [rule.choose([0, 0], 10) for _ in range(2)] == [1, 1]
    assert rule.choose([0, 0], 10) == 0


# --- what services publish ----------------------------------------------------------------------------------


class Told:
    """A service's part that tells routers, at an address."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        self.address = f"ipc://{folder}/events"
        publisher = EventPublisher(self.address, None)
        stack.callback(publisher.close)
        self.feed = RouterFeed(layout(), publisher, "kv@node@m", NotesFile(folder / "notes"))
        stack.callback(self.feed.close)
        until(self._is_loaded, "the notes are read")

    def _is_loaded(self) -> bool:
        self.feed.work()
        return self.feed.notes.is_loaded

    def has(self, item: WorkItem, blocks: int, kind: int = EVENT_STORED) -> None:
        """Tell that the first blocks of a prompt are in the host tier."""
        tokens = item.tokens(0)[: blocks * BLOCK]
        hashes: HashArray = path_hashes(blocks, seed=item.index)
        self.feed.describe([DescribedPath(hashes.tobytes(), tokens.tobytes())])
        self.feed.tier_events(CacheLevel.HOST, np.full(blocks, kind, np.uint8), hashes)


def prompt(number: int, blocks: int = 10) -> WorkItem:
    return WorkItem(
        number, 0.0, np.array([number], np.uint64), np.array([blocks * BLOCK]), OUTPUT_STREAMS + number, 8
    )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Told]]:
    with ExitStack() as stack:
        yield [Told(tmp_path / str(number), stack) for number in range(3)]


def knows(node: NodeBlocks, path: list[int], blocks: int) -> None:
    def is_told() -> bool:
        node.listen()
        return node.leading(path) == blocks

    until(is_told, f"{blocks} blocks are known")


def test_blocks_come_and_leave_as_services_tell(nodes: list[Told]) -> None:
    paths, item = BlockPaths(BLOCK), prompt(1)
    path = paths.number(item.tokens(0)[: item.prompt_length])
    known = [NodeBlocks(node.address, paths) for node in nodes]
    nodes[1].has(item, 8)
    nodes[2].has(item, 6)
    for node, blocks in zip(known, (0, 8, 6), strict=True):
        knows(node, path, blocks)
    nodes[1].has(item, 8, EVENT_REMOVED)
    knows(known[1], path, 0)
    knows(known[2], path, 6)
    for node in known:
        node.close()


def test_a_request_goes_to_the_service_that_tells_of_it_and_its_next_turn_after_it(
    nodes: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_EXPECTED_SECONDS", 600.0)
    router = PrefixRouter([node.address for node in nodes], BLOCK, 0, 12)
    nodes[2].has(prompt(1), 8)
    until(lambda: router.found(prompt(1)) == [0, 0, 8], "the blocks are known")
    assert router.choose(prompt(1)) == 2
    assert router.found(prompt(1)) == [0, 0, 10], "what was sent there is to be there"
    assert router.choose(prompt(2)) == 0, "a new prompt, for the node with the least to compute"
    assert router.choose(prompt(2, blocks=15)) == 0
    router.close()


def test_what_was_expected_and_never_told_is_forgotten(
    nodes: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_EXPECTED_SECONDS", 0.05)
    router = PrefixRouter([node.address for node in nodes], BLOCK, 0, 12)
    router.choose(prompt(1))
    until(lambda: router.found(prompt(1)) == [0, 0, 0], "the blocks are forgotten")
    router.close()


def test_after_a_missing_message_all_blocks_are_asked_for(tmp_path: Path) -> None:
    address, paths, item = f"ipc://{tmp_path}/events", BlockPaths(BLOCK), prompt(1)
    tokens = item.tokens(0)[: item.prompt_length]
    path = paths.number(tokens)

    def stored(first: int, count: int) -> RouterBlockStored:
        part = tokens[first * BLOCK : (first + count) * BLOCK].tolist()
        names = list(range(first + 1, first + count + 1))
        return RouterBlockStored(names, first or None, part, BLOCK, None, "CPU", None)

    publisher: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        publisher.bind(address)
        node = NodeBlocks(address, paths)
        assert publisher.recv() == b"\x01"

        def tell(number: int, *events: object) -> None:
            payload = msgspec.msgpack.encode(EventBatch(0.0, list(events), 0))
            publisher.send_multipart((b"kv@node@m", number.to_bytes(8, "big"), payload))

        tell(6, stored(7, 1))  # before all blocks are told, which the subscription asks for
        tell(7, AllBlocksCleared(), stored(0, 4))
        tell(8, stored(4, 2))
        knows(node, path, 6)
        tell(10, stored(7, 1))  # 9 told of its parent
        knows(node, path, 0)
        assert [publisher.recv(), publisher.recv()] == [b"\x00", b"\x01"]
        tell(11, AllBlocksCleared(), stored(0, 8))
        knows(node, path, 8)
        node.close()
