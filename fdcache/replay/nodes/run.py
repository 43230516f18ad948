"""Replay a workload on several nodes, let things happen to them, and compare every block that is reused."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from fdcache.errors import ReplayError, ServiceError
from fdcache.replay.faults import spread
from fdcache.replay.nodes.cluster import Cluster, NodeFault, NodesConfig, ReplayNode
from fdcache.replay.nodes.engine_process import EngineLeft, Totals
from fdcache.replay.nodes.routing import NodeRouter, PrefixRouter, RandomRouter, Route
from fdcache.replay.workloads import WorkItem
from fdcache.settings.cache import PrefetchPolicy

_STALL_SECONDS = 120.0
_SHORTEST_FAULT, _LONGEST_FAULT = 0.2, 3.0
_THINK_SECONDS = 1.0
"""Seconds between a turn and the next one: the blocks of a turn are stored meanwhile, as they are for people."""


@dataclass(slots=True)
class NodesReport:
    """Counts of a replay of several nodes.

    ``isolated``: each node had a network namespace of its own. ``totals``: of all engines, those that were killed
    included. ``planned``: faults that were to happen, ``faults`` those that did. ``again``: requests that an engine had
    when it was killed. ``left``: slots and pins that engines still held. ``broken``: invariants of engines and services
    that did not hold. ``wait_limit``: seconds for which a request may wait for blocks, whatever has become of them;
    None if it is to wait for all.
    """

    way: str
    nodes: int
    isolated: bool
    wait_limit: float | None
    requests: int = 0
    again: int = 0
    totals: Totals = field(default_factory=Totals)
    by_node: list[Totals] = field(default_factory=list)
    planned: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    left: int = 0
    broken: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wall_seconds: float = 0.0
    interrupted: bool = False
    route: str = Route.RANDOM

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in a tier of any node."""
        return self.totals.hit_tokens / self.totals.prompt_tokens if self.totals.prompt_tokens else 0.0

    @property
    def clean(self) -> bool:
        """True if no block was wrong, no request late, all faults happened, nothing is left, every invariant held."""
        if not self.interrupted and sum(self.faults.values()) != self.planned:
            return False
        is_late = self.wait_limit is not None and self.totals.longest_wait > self.wait_limit
        return not (self.totals.wrong_blocks or is_late or self.left or self.broken)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {**asdict(self), "faults": dict(self.faults), "hit_rate": self.hit_rate, "clean": self.clean}


def replay_nodes(
    items: Iterator[WorkItem], config: NodesConfig, *, should_stop: Callable[[], bool] = lambda: False
) -> NodesReport:
    """Run a workload on several nodes to its end, each request on the one of ``config.route``, and report on it.

    Raises ``ReplayError`` if a part ends by itself or no request makes progress.
    """
    with Cluster(config) as cluster:
        driver = _Driver(list(items), config, cluster)
        try:
            return driver.run(should_stop)
        finally:
            driver.router.close()


class _Driver:
    """The router, and the source of faults."""

    def __init__(self, items: list[WorkItem], config: NodesConfig, cluster: Cluster) -> None:
        self._items, self._config, self._cluster = items, config, cluster
        self._random = np.random.default_rng(config.engine.seed)
        places = self._random.integers(0, config.nodes, len(items))
        self._due = spread(config.faults, len(items), self._random)
        self._waiting: dict[int, list[WorkItem]] = {}
        self._thinking: deque[tuple[float, WorkItem]] = deque()
        self._ready: deque[WorkItem] = deque()
        self._unfinished: set[int] = set()
        self._admitted = 0
        engine = config.engine
        limit = None
        if engine.storage.prefetch_policy is not PrefetchPolicy.WAIT_COMPLETE:
            limit = engine.storage.timeout + engine.cache.defer_timeout
        self.router: NodeRouter = (
            RandomRouter(places)
            if config.route is Route.RANDOM
            else PrefixRouter(
                cluster.event_addresses,
                engine.layout.block_size,
                engine.seed,
                most_in_flight=2 * engine.concurrency * config.nodes,
            )
        )
        self._report = NodesReport(
            config.way, config.nodes, cluster.network.is_isolated, limit, route=config.route
        )
        self._report.planned = len(self._due)

    def run(self, should_stop: Callable[[], bool]) -> NodesReport:
        """Run to the end."""
        start = progress = time.monotonic()
        while self._admitted < len(self._items) or self._unfinished or self._due:
            if should_stop():
                self._report.interrupted = True
                break
            self._admit()
            self._give()
            self._inject()
            self._heal(time.monotonic())
            if self._receive():
                progress = time.monotonic()
            if time.monotonic() - progress > _STALL_SECONDS:
                raise ReplayError(f"no request has ended for {_STALL_SECONDS:g} s")
        self._heal(float("inf"))
        self._finish()
        self._report.wall_seconds = time.monotonic() - start
        return self._report

    # --- requests ---------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give out requests up to the next fault; one that follows another waits for its end."""
        while self._thinking and self._thinking[0][0] <= time.monotonic():
            self._ready.append(self._thinking.popleft()[1])
        most = 64 + self._config.engine.concurrency * self._config.nodes
        while self._admitted < len(self._items) and len(self._unfinished) < most:
            if self._due and self._due[0][0] <= self._admitted:
                return
            item = self._items[self._admitted]
            self._admitted += 1
            self._report.requests += 1
            self._unfinished.add(item.index)
            if item.after is not None and item.after in self._unfinished:
                self._waiting.setdefault(item.after, []).append(item)
            else:
                self._ready.append(item)

    def _give(self) -> None:
        """Give requests that are ready to engines, as many as the router lets wait there."""
        nodes = self._cluster.nodes
        while self._ready:
            if sum(len(node.engine.has) for node in nodes) >= self.router.most_in_flight:
                return
            item = self._ready.popleft()
            nodes[self.router.choose(item)].engine.give(item)

    def _receive(self) -> bool:
        """Take what the engines have answered; return True if a request has ended."""
        pipes = {node.engine.pipe: node for node in self._cluster.nodes}
        progress = False
        for pipe in wait(list(pipes), timeout=0.005):
            ended = pipes[pipe].engine.receive()  # type: ignore[index]
            if isinstance(ended, EngineLeft):
                raise ReplayError("an engine has ended by itself")
            for index in ended:
                progress = True
                self._unfinished.discard(index)
                for item in self._waiting.pop(index, ()):
                    self._thinking.append((time.monotonic() + _THINK_SECONDS, item))
        return progress

    # --- faults -----------------------------------------------------------------------------------------------

    def _inject(self) -> None:
        """Begin the fault that is due, at a node that has none."""
        if not self._due or self._due[0][0] > self._admitted:
            return
        well = [node for node in self._cluster.nodes if node.heal is None]
        if not well:
            return
        fault = self._due.popleft()[1]
        node = well[int(self._random.integers(len(well)))]
        if fault is NodeFault.ENGINE:
            self._report.again += len(node.engine.has)
        if self._cluster.break_node(node, fault):
            self._report.faults[fault.value] += 1
        node.heals_at = time.monotonic() + float(self._random.uniform(_SHORTEST_FAULT, _LONGEST_FAULT))

    def _heal(self, now: float) -> None:
        for node in self._cluster.nodes:
            if node.heal is not None and now >= node.heals_at:
                node.heal()
                node.heal = None

    # --- end --------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """End the engines, then the services, and look at what they leave."""
        report = self._report
        for number, node in enumerate(self._cluster.nodes):
            if not report.interrupted:
                self._end_engine(node)
            report.by_node.append(node.engine.totals)
            report.totals = report.totals.plus(node.engine.totals)
            node.service.wait()
            self._look(number, node)

    def _end_engine(self, node: ReplayNode) -> None:
        node.engine.end()
        deadline = time.monotonic() + _STALL_SECONDS
        while node.engine.pipe.poll(max(deadline - time.monotonic(), 0.0)):
            answer = node.engine.receive()
            if isinstance(answer, EngineLeft):
                self._report.left += answer.leaked
                if answer.integrity_error is not None:
                    self._report.broken.append(answer.integrity_error)
                return
        raise ReplayError("an engine does not end")

    def _look(self, number: int, node: ReplayNode) -> None:
        """Ask a service for broken invariants and errors, and end it."""
        try:
            self._report.broken += node.service.ask("integrity")
            found = node.service.ask("stats")["storage"]["layouts"]
        except ServiceError as error:
            self._report.broken.append(f"service of node {number}: {error}")
            return
        self._report.errors += [f"node {number}: {each['error']}" for each in found if each["error"]]
        status = node.service.end()
        if status != 0:
            self._report.broken.append(f"service of node {number}: ended with {status}")
