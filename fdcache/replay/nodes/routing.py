"""How requests find a node: at random, or by what the services publish of the blocks they have."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import takewhile
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from fdcache.replay.workloads import WorkItem
from fdcache.service.wire.router_events import EventBatch

_LATELY = 32
"""Requests for each node."""
_EXPECTED_SECONDS = 0.5
_decoder = msgspec.msgpack.Decoder(EventBatch)


class Route(StrEnum):
    """Where a request goes. PREFIX: by ``PrefixRule``."""

    RANDOM = "random"
    PREFIX = "prefix"


class PrefixRule:
    """Chooses a node for each request by what every node has of it.

    That is the node that has most of its blocks, if that is more than half: a prefix that everybody uses, such as a
    system prompt, holds no request at a node. Of several, and for a new prompt, it is the one that was given the fewest
    blocks to compute lately, so that all compute and keep as much.
    """

    def __init__(self, nodes: int) -> None:
        self._work = [0] * nodes
        self._lately: deque[tuple[int, int]] = deque()

    def choose(self, found: Sequence[int], wanted: int) -> int:
        """Return the node for a request of ``wanted`` blocks, of which each node has the first ``found``."""
        most = max(found)
        is_known = 2 * most > wanted
        nodes = [node for node, blocks in enumerate(found) if blocks == most or not is_known]
        node = min(nodes, key=lambda each: self._work[each])
        self._give(node, wanted - found[node])
        return node

    def _give(self, node: int, blocks: int) -> None:
        self._work[node] += blocks
        self._lately.append((node, blocks))
        if len(self._lately) > _LATELY * len(self._work):
            node, blocks = self._lately.popleft()
            self._work[node] -= blocks


class NodeRouter(Protocol):
    """Chooses nodes. ``most_in_flight``: requests that engines may have, all together; others wait at the router."""

    most_in_flight: float

    def choose(self, item: WorkItem) -> int:
        """Return the node for a request."""

    def close(self) -> None:
        """End it."""


class RandomRouter:
    """Every request has a place that its number and the seed decide. None waits here."""

    most_in_flight = math.inf

    def __init__(self, places: NDArray[np.int64]) -> None:
        self._places = places

    def choose(self, item: WorkItem) -> int:
        """Return the place of a request."""
        return int(self._places[item.index])

    def close(self) -> None:
        """There is nothing to end."""


class BlockPaths:
    """Numbers of blocks: equal tokens behind equal tokens have the same one, whoever tells of them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._named: dict[int | None, int] = {None: 0}

    def number(self, tokens: NDArray[np.int32], parent: int = 0) -> list[int]:
        """Return the numbers of the full blocks of some tokens behind a block."""
        path = []
        whole = len(tokens) // self._block_size * self._block_size
        for row in tokens[:whole].reshape(-1, self._block_size):
            parent = self._numbers.setdefault((parent, row.tobytes()), len(self._numbers) + 1)
            path.append(parent)
        return path

    def told(self, event: dict[str, Any]) -> list[int]:
        """Return the numbers of the blocks of a ``BlockStored``, and keep their names."""
        path = self.number(np.array(event["token_ids"], np.int32), self._named[event["parent_block_hash"]])
        self._named.update(zip(event["block_hashes"], path, strict=True))
        return path

    def named(self, names: Sequence[int]) -> list[int]:
        """Return the numbers of blocks by their names, those that were ever told."""
        return [self._named[name] for name in names if name in self._named]


class NodeBlocks:
    """The blocks of a node, as its service publishes them at an address, and those that it is about to have."""

    def __init__(self, address: str, paths: BlockPaths) -> None:
        self._paths = paths
        self._tiers: dict[int, set[tuple[str, int | None]]] = {}
        self._expected: dict[int, float] = {}
        self._number = 0
        self._is_behind = True
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def leading(self, path: Sequence[int]) -> int:
        """Return how many of the first blocks of a path some tier of the node has, or is to have soon."""
        now = time.monotonic()
        return sum(
            1
            for _ in takewhile(
                lambda each: self._tiers.get(each) or self._expected.get(each, 0.0) > now, path
            )
        )

    def expect(self, path: Sequence[int]) -> None:
        """Count blocks as there for a while: a request that leaves them was given to the node."""
        self._expected |= dict.fromkeys(path, time.monotonic() + _EXPECTED_SECONDS)

    def listen(self) -> None:
        """Take what has come."""
        with suppress(zmq.Again):
            while True:
                _, number, payload = self._socket.recv_multipart(zmq.NOBLOCK)
                self._take(int.from_bytes(number, "big"), _decoder.decode(payload).events)

    def _take(self, number: int, events: list[dict[str, Any]]) -> None:
        """Take a message; where one before it is missing, ask for all blocks, and take none until they come."""
        if events and events[0]["type"] == "AllBlocksCleared":
            self._is_behind = False
        elif number != self._number + 1 and not self._is_behind:
            self._is_behind = True
            self._tiers.clear()
            self._socket.setsockopt(zmq.UNSUBSCRIBE, b"")
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._number = number
        if self._is_behind:
            return
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self._tiers.clear()
                continue
            tier = (event["medium"], event.get("group_idx"))
            if event["type"] == "BlockStored":
                for block in self._paths.told(event):
                    self._tiers.setdefault(block, set()).add(tier)
            else:
                for block in self._paths.named(event["block_hashes"]):
                    self._tiers.get(block, set()).discard(tier)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


class PrefixRouter:
    """Knows the blocks of nodes by their events alone, and what it has sent where. ``seed``: of the requests' tokens.

    A request that waited long at an engine would find less than what was there when its node was chosen.
    """

    def __init__(self, addresses: Sequence[str], block_size: int, seed: int, most_in_flight: float) -> None:
        self.most_in_flight = most_in_flight
        self._seed = seed
        self._rule = PrefixRule(len(addresses))
        self._paths = BlockPaths(block_size)
        self._nodes = [NodeBlocks(address, self._paths) for address in addresses]

    def choose(self, item: WorkItem) -> int:
        """Return the node for a request, which is given to it now."""
        path = self._path_of(item)
        chosen = self._rule.choose(self._leading(path), len(path))
        self._nodes[chosen].expect(path)
        return chosen

    def found(self, item: WorkItem) -> list[int]:
        """Return how many of the first blocks of a request each node has, by what has been told so far."""
        return self._leading(self._path_of(item))

    def _path_of(self, item: WorkItem) -> list[int]:
        return self._paths.number(item.tokens(self._seed)[: item.prompt_length])

    def _leading(self, path: Sequence[int]) -> list[int]:
        for node in self._nodes:
            node.listen()
        return [node.leading(path) for node in self._nodes]

    def close(self) -> None:
        """Listen no more."""
        for node in self._nodes:
            node.close()
