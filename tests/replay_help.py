"""Small replays, an exact leaf-first LRU simulation, and the recorded trace."""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fdcache.replay.config import LayoutName, ReplayConfig, Shape
from fdcache.replay.engine import replay
from fdcache.replay.report import Report
from fdcache.replay.workloads import WorkItem, WorkloadName, generate
from fdcache.settings.cache import CacheSettings


def rank_processes() -> list[BaseProcess]:
    """Return the processes of the ranks of replays that run."""
    return [each for each in multiprocessing.active_children() if each.name.startswith("fdcache-rank")]


def kills_rank_one() -> Callable[[], bool]:
    """Return a ``should_stop`` that kills rank 1 after 50 steps and stops nothing."""
    steps = iter(range(50))

    def kill() -> bool:
        if next(steps, None) is None:
            for process in rank_processes():
                if process.name == "fdcache-rank1" and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
        return False

    return kill


def recorded_trace() -> Path | None:
    """Return the path of the recorded conversation trace, or None."""
    for folder in Path(__file__).resolve().parents:
        trace = folder / "shared" / "traces" / "conversation_trace.jsonl"
        if trace.exists():
            return trace
    return None


def small_config(
    *,
    device_blocks: int = 200,
    block_size: int = 64,
    ranks: int = 1,
    layout: LayoutName = LayoutName.UNIFORM,
    layers: int = 2,
    draft_layers: int = 0,
    groups: str | None = None,
    host_memory: int = 16 << 20,
    cache: dict[str, Any] | None = None,
    **options: Any,
) -> ReplayConfig:
    """Return a short replay that runs out of device blocks."""
    shape = Shape(layout=layout, layers=layers, draft_layers=draft_layers, groups=groups)
    return ReplayConfig(
        layout=shape.build(block_size, ranks),
        cache=CacheSettings(device_blocks=device_blocks, host_memory=host_memory, **(cache or {})),
        **options,
    )


def run_chat(config: ReplayConfig, requests: int = 100, workload: WorkloadName = WorkloadName.CHAT) -> Report:
    """Replay a generated workload to its end."""
    return replay(generate(workload, requests, config.seed), config)


def assert_clean(report: Report) -> None:
    """Assert that nothing is corrupt, leaked or unfinished."""
    tally = report.tally
    found = (tally.corrupt_blocks, report.leaked_slots, report.leaked_pins, report.integrity_error)
    assert found == (0, 0, 0, None)
    assert tally.finished + tally.rejected == tally.requests
    assert not report.interrupted


class LeafFirstLru:
    """Prefix cache of ``capacity`` blocks that drops the leaf released longest ago; one request at a time."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.child: dict[tuple[int, bytes], int] = {}
        self.key: dict[int, tuple[int, bytes]] = {}
        self.children: dict[int, int] = {0: 0}
        self.used: dict[int, int] = {}
        self.leaves: list[tuple[int, int, int]] = []
        self.depth: dict[int, int] = {0: 0}
        self.clock = 0
        self.fresh = 0

    def hit_rate(self, items: Iterable[WorkItem], seed: int) -> float:
        """Return the share of prompt tokens found, over all requests that fit."""
        hits = prompts = 0
        for item in items:
            if -(-item.computed_length // self.block_size) > self.capacity:
                continue
            prompts += item.prompt_length
            hits += self.serve(item, seed)
        return hits / prompts

    def serve(self, item: WorkItem, seed: int) -> int:
        """Find the prompt's prefix, hold all blocks of the request, cache its full ones; return the tokens found."""
        size = self.block_size
        tokens = item.tokens(seed)[: item.computed_length]
        blocks = [tokens[i : i + size].tobytes() for i in range(0, len(tokens) - size + 1, size)]
        path = [0]
        for block in blocks[: (item.prompt_length - 1) // size]:
            if (node := self.child.get((path[-1], block))) is None:
                break
            path.append(node)
        found = len(path) - 1
        needed = -(-item.computed_length // size) - found
        held = set(path)
        while len(self.key) + needed > self.capacity:
            self.drop_oldest_leaf(held)
        for block in blocks[found:]:
            path.append(self.child.get((path[-1], block)) or self.insert(path[-1], block))
        self.clock += 1
        for node in path[1:]:
            self.used[node] = self.clock
            self.offer(node)
        return found * size

    def insert(self, parent: int, block: bytes) -> int:
        self.fresh += 1
        node = self.fresh
        self.child[parent, block] = node
        self.key[node] = (parent, block)
        self.children[node] = 0
        self.children[parent] += 1
        self.depth[node] = self.depth[parent] + 1
        return node

    def offer(self, node: int) -> None:
        if node and self.children[node] == 0:
            heapq.heappush(self.leaves, (self.used[node], -self.depth[node], node))

    def drop_oldest_leaf(self, held: set[int]) -> None:
        kept = []
        while True:
            used, depth, node = heapq.heappop(self.leaves)
            if node not in self.key or self.children[node] or self.used[node] != used:
                continue
            if node not in held:
                break
            kept.append((used, depth, node))
        for entry in kept:
            heapq.heappush(self.leaves, entry)
        parent, block = self.key.pop(node)
        del self.child[parent, block], self.children[node], self.used[node], self.depth[node]
        self.children[parent] -= 1
        self.offer(parent)
