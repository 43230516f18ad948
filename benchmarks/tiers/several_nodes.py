"""What several nodes find by rules of who keeps a block, beside one node with the sum of their memory.

A model, not a measurement: requests come one after the other, and every copy is there at once. Each goes to a random
node, or, in the last row, to the one that has its prefix, as with ``fdcache replay --route prefix``. A tier evicts what
was used longest ago, the end of a path first. Host tiers keep what was computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from statistics import fmean

import numpy as np

from benchmarks.harness import Report, Row
from fdcache.replay.nodes.routing import PrefixRule, Route
from fdcache.replay.workloads import WorkItem, WorkloadName, generate

BLOCK = 64
NODES = 3


class Rule(StrEnum):
    """What becomes of a block that a node reads from another one."""

    KEEP = "the reader keeps it too (as built)"
    TELL = "it keeps it too, and its source counts that as use"
    GIVE = "the source drops the end of the path that the reader has now"
    PASS = "the reader passes it on to its device, and its source counts that as use"
    WHOLE = "so, but a host tier that has a block has its whole path"
    COLDEST = "it passes it on, and what leaves a host tier replaces the coldest block of all"


@dataclass(frozen=True)
class RequestBlocks:
    """The full blocks of a request, prompt and output, and how many of them a look-up may find."""

    blocks: Sequence[int]
    findable: int
    prompt_length: int


class TierModel:
    """Blocks by their last use."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.used: dict[int, float] = {}

    def use(self, block: int, now: float) -> tuple[int, float] | None:
        """Make a block the youngest, whether or not it was there; return what had to leave and its last use."""
        self.used.pop(block, None)
        self.used[block] = now
        return self.evict() if len(self.used) > self.slots else None

    def evict(self) -> tuple[int, float]:
        """Take the oldest block out."""
        oldest = next(iter(self.used))
        return oldest, self.used.pop(oldest)

    def receive(self, block: int, used: float) -> None:
        """Put a block of another tier in the place of its age; the oldest one makes room."""
        if len(self.used) == self.slots:
            self.evict()
        self.used[block] = used
        self.used = dict(sorted(self.used.items(), key=lambda each: each[1]))

    @property
    def oldest_use(self) -> float:
        """Last use of what would leave next; before everything while there is room."""
        return next(iter(self.used.values())) if len(self.used) == self.slots else 0.0


def paths_of(items: Sequence[WorkItem]) -> list[RequestBlocks]:
    """Return the blocks of requests; equal beginnings have equal numbers."""
    numbers: dict[tuple[int, bytes], int] = {}
    paths = []
    for item in items:
        tokens = item.tokens(0)[: item.computed_length // BLOCK * BLOCK].reshape(-1, BLOCK)
        blocks, parent = [], 0
        for row in tokens:
            parent = numbers.setdefault((parent, row.tobytes()), len(numbers) + 1)
            blocks.append(parent)
        paths.append(RequestBlocks(blocks, max(item.prompt_length - 1, 0) // BLOCK, item.prompt_length))
    return paths


class NodesModel:
    """Device and host tiers of some nodes under a rule."""

    def __init__(self, count: int, device_blocks: int, host_blocks: int, rule: Rule) -> None:
        self.devices = [TierModel(device_blocks) for _ in range(count)]
        self.hosts = [TierModel(host_blocks) for _ in range(count)]
        self.rule = rule
        self.read_blocks = 0
        self._children: dict[int, set[int]] = {}

    def request(self, path: RequestBlocks, node: int, turn: int) -> int:
        """Run a request on a node; return how many blocks of its prompt were found."""
        found = 0
        for block in path.blocks[: path.findable]:
            if block not in self.devices[node].used and not self._holders(block):
                break
            found += 1
        keeps = self.rule in (Rule.KEEP, Rule.TELL, Rule.GIVE)
        if self.rule is Rule.WHOLE:
            keeps = not all(map(self._holders, path.blocks))
        for at in range(len(path.blocks) - 1, -1, -1):
            now = turn + (1 - at / len(path.blocks)) / 2
            self._use(path.blocks[at], node, now, keeps=keeps)
        if self.rule is Rule.GIVE:
            self._give(path, node)
        return found

    def _holders(self, block: int) -> list[TierModel]:
        return [host for host in self.hosts if block in host.used]

    def _use(self, block: int, node: int, now: float, *, keeps: bool) -> None:
        own, holders = self.hosts[node], self._holders(block)
        is_read = block not in self.devices[node].used and own not in holders and bool(holders)
        self.read_blocks += is_read
        self.devices[node].use(block, now)
        if own not in holders and (not keeps or self.rule is Rule.TELL):
            for host in holders:
                host.use(block, now)
        if own in holders or keeps or not holders:
            self._store(own, block, now)

    def _store(self, own: TierModel, block: int, now: float) -> None:
        left = own.use(block, now)
        if left is None or self.rule is not Rule.COLDEST:
            return
        coldest = min(self.hosts, key=lambda host: host.oldest_use)
        if coldest is not own and coldest.oldest_use < left[1] and not self._holders(left[0]):
            coldest.receive(*left)

    def _give(self, path: RequestBlocks, reader: int) -> None:
        """Drop the path's end from the other nodes, up to a block below which they have another path."""
        for host in self.hosts:
            if host is self.hosts[reader]:
                continue
            for block in reversed(path.blocks):
                if block in host.used and any(child in host.used for child in self._children.get(block, ())):
                    break
                host.used.pop(block, None)

    def replay(self, paths: Sequence[RequestBlocks], route: Route, seed: int) -> float:
        """Return the share of the prompt tokens that was found, in percent."""
        for path in paths:
            for parent, child in zip(path.blocks, path.blocks[1:], strict=False):
                self._children.setdefault(parent, set()).add(child)
        places = np.random.default_rng(seed).integers(0, len(self.hosts), len(paths)).tolist()
        rule = PrefixRule(len(self.hosts))
        found = 0
        for turn, path in enumerate(paths):
            node = places[turn] if route is Route.RANDOM else self._best_node(path, rule)
            found += self.request(path, node, turn)
        return 100 * BLOCK * found / sum(path.prompt_length for path in paths)

    def _best_node(self, path: RequestBlocks, rule: PrefixRule) -> int:
        """Return the node for a request by what each one has."""
        return rule.choose([self._leading(path, node) for node in range(len(self.hosts))], path.findable)

    def _leading(self, path: RequestBlocks, node: int) -> int:
        """Return how many of the first blocks of a prompt a node has."""
        device, host = self.devices[node].used, self.hosts[node].used
        blocks = path.blocks[: path.findable]
        return sum(1 for _ in takewhile(lambda block: block in device or block in host, blocks))

    @property
    def different_blocks(self) -> int:
        """Number of blocks that some host tier has."""
        return len(set().union(*(host.used for host in self.hosts)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", nargs="+", type=WorkloadName, default=["chat", "rag", "pauses"])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device-blocks", type=int, default=100, help="of each node")
    parser.add_argument("--host-blocks", type=int, default=433, help="of each node")


def measure(options: argparse.Namespace, report: Report) -> None:
    report.note(
        f"{NODES} nodes, blocks of {BLOCK} tokens; {options.device_blocks} and {options.host_blocks} each"
    )
    for name in options.workloads:
        report.table(f"{name}, {options.requests} requests", rows(WorkloadName(name), options))


def rows(name: WorkloadName, options: argparse.Namespace) -> Iterator[Row]:
    """Run every rule on the same requests and places."""
    device, host = options.device_blocks, options.host_blocks
    seeds = range(1, options.seeds + 1)
    traffic = [paths_of(list(generate(name, options.requests, seed))) for seed in seeds]
    alone = [NodesModel(1, NODES * device, NODES * host, Rule.KEEP) for _ in seeds]
    one = [
        model.replay(paths, Route.RANDOM, seed)
        for model, paths, seed in zip(alone, traffic, seeds, strict=True)
    ]
    for rule, route in [*((rule, Route.RANDOM) for rule in Rule), (Rule.KEEP, Route.PREFIX)]:
        models = [NodesModel(NODES, device, host, rule) for _ in seeds]
        found = [
            model.replay(paths, route, seed)
            for model, paths, seed in zip(models, traffic, seeds, strict=True)
        ]
        less = [several - single for several, single in zip(found, one, strict=True)]
        yield {
            "rule": rule.value,
            "route": route.value,
            "found %": fmean(found),
            "one node %": fmean(one),
            "difference": fmean(less),
            "lowest": min(less),
            "different blocks": round(fmean(model.different_blocks for model in models)),
            "blocks read a request": fmean(model.read_blocks for model in models) / options.requests,
        }
