"""The nodes of a replay: services, engines and the ways between them, and what can happen to these."""

from __future__ import annotations

import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from fdcache.errors import ReplayOptionError
from fdcache.replay.config import ReplayConfig
from fdcache.replay.nodes.engine_process import EngineProcess
from fdcache.replay.nodes.network import Network, Relay
from fdcache.replay.nodes.routing import Route
from fdcache.replay.nodes.service_process import NodeService
from fdcache.storage.objects.variables import ObjectSettings

WAYS = ("nodes", "object", "shared")
MOST_NODES = 16
_HERE = "127.0.0.1"


class NodeFault(StrEnum):
    """Something that happens to a node.

    KILL: its service dies, and is started again. ENGINE: its engine dies, and is started again. STOP: its service does
    nothing for a while. CUT: nothing comes to it or from it for a while. SLOW: everything that comes to it or from it
    takes longer. FULL: the bucket has no room for what it stores.
    """

    KILL = "kill"
    ENGINE = "engine"
    STOP = "stop"
    CUT = "cut"
    SLOW = "slow"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """A replay of several nodes.

    ``engine``: the options of each engine, without a service and storage. ``way``: how they share, of ``WAYS``.
    ``variables``: those of each service. ``folder``: the shared one, by default a new one. Raises
    ``ReplayOptionError``.
    """

    engine: ReplayConfig
    nodes: int
    way: str = "nodes"
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    bucket: ObjectSettings | None = None
    arena_folder: Path = Path("/dev/shm")
    faults: Mapping[NodeFault, int] = field(default_factory=dict)
    route: Route = Route.RANDOM

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ReplayOptionError("--nodes", f"{self.nodes} is not between 1 and {MOST_NODES}")
        if self.way not in WAYS:
            raise ReplayOptionError(
                "--nodes",
                f"FDCACHE_STORAGE={self.way} shares nothing; set it to {', '.join(WAYS)}, or leave it out",
            )
        if self.way == "object" and self.store is None and not self._is_in_a_folder:
            raise ReplayOptionError(
                "--nodes",
                "needs a bucket in a folder (file://), or an http:// address in FDCACHE_OBJECT_ENDPOINT",
            )
        for fault in (NodeFault.CUT, NodeFault.SLOW):
            if self.faults.get(fault) and self.way != "nodes" and self.store is None:
                raise ReplayOptionError("--faults", f"{fault.value}: nodes reach a folder without a network")
        if self.faults.get(NodeFault.FULL) and self.store is None:
            raise ReplayOptionError("--faults", "full: only a bucket behind FDCACHE_OBJECT_ENDPOINT can be")

    @property
    def _is_in_a_folder(self) -> bool:
        return self.bucket is not None and (self.bucket.url or "").startswith("file://")

    @property
    def store(self) -> tuple[str, int] | None:
        """Host and port of the bucket's server, if there is one."""
        if self.way != "object" or self.bucket is None or self._is_in_a_folder:
            return None
        address = urlsplit(self.bucket.endpoint or "")
        if address.scheme != "http" or address.hostname is None:
            return None
        return address.hostname, address.port or 80

    @property
    def random_faults(self) -> tuple[NodeFault, ...]:
        """The kinds that can happen this way."""
        if self.store is not None:
            return tuple(NodeFault)
        ends = (NodeFault.KILL, NodeFault.ENGINE, NodeFault.STOP)
        return (*ends, NodeFault.CUT, NodeFault.SLOW) if self.way == "nodes" else ends


@dataclass(slots=True)
class ReplayNode:
    """A service, its engine, and the ways to and from it."""

    service: NodeService
    engine: EngineProcess
    relays: list[Relay]
    heal: Callable[[], None] | None = None
    """End of the fault that it has."""

    heals_at: float = 0.0


class Cluster:
    """Nodes in folders of their own. They end with the context, and leave nothing."""

    def __init__(self, config: NodesConfig) -> None:
        self._config = config
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fdcache-nodes-")))
        self._memory = Path(tempfile.mkdtemp(prefix="fdcache-nodes-", dir=config.arena_folder))
        self._stack.callback(shutil.rmtree, self._memory, ignore_errors=True)
        self.network = Network(config.nodes)
        self._stack.callback(self.network.close)
        self.nodes: list[ReplayNode] = []
        self.event_addresses = [f"ipc://{self._folder}/{number}.events" for number in range(config.nodes)]
        """At which the services publish their blocks for routers, if these are to be asked."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        relays: list[list[Relay]] = [[] for _ in range(self._config.nodes)]
        ways = self._ways(relays)
        services = []
        for number, way in enumerate(ways):
            memory = self._memory / str(number)
            memory.mkdir(mode=0o700)
            variables = {"FDCACHE_ARENA_DIR": str(memory), **self._config.variables, **way}
            if self._config.route is Route.PREFIX:
                variables["FDCACHE_KV_EVENTS"] = self.event_addresses[number]
            path = self.network.path_of(number)
            service = NodeService(self._folder / str(number), variables, path)
            self._stack.callback(service.kill)
            service.start()
            services.append(service)
        for service in services:
            service.wait()
        for number, service in enumerate(services):
            engine = self._config.engine
            cache = engine.cache.model_copy(update={"server": service.address, "host_memory": 0})
            process = EngineProcess(replace(engine, cache=cache), self.network.path_of(number))
            self._stack.callback(process.close)
            self.nodes.append(ReplayNode(service, process, relays[number]))
        for service in services:
            service.wait_for_storage()

    def _ways(self, relays: list[list[Relay]]) -> list[dict[str, str]]:
        """Return the variables by which each service reaches the others, or the store."""
        config = self._config
        if config.way == "nodes":
            return self._ways_to_nodes(relays)
        if config.way == "shared":
            folder = config.folder or self._folder / "shared"
            if config.folder is None:
                folder.mkdir()
            return [{"FDCACHE_STORAGE": "shared", "FDCACHE_STORAGE_DIR": str(folder)}] * config.nodes
        ways = [{"FDCACHE_STORAGE": "object"} for _ in range(config.nodes)]
        if config.store is not None:
            for number, way in enumerate(ways):
                relay = self.network.relay(number, config.store)
                relays[number].append(relay)
                way["FDCACHE_OBJECT_ENDPOINT"] = f"http://{_HERE}:{relay.port}"
        return ways

    def _ways_to_nodes(self, relays: list[list[Relay]]) -> list[dict[str, str]]:
        numbers = range(self._config.nodes)
        ports = [self.network.free_port(number) for number in numbers]
        key = secrets.token_urlsafe(24)
        ways = []
        for source in numbers:
            others = []
            for target in numbers:
                if target != source:
                    relay = self.network.relay(source, (_HERE, ports[target]), target)
                    relays[source].append(relay)
                    relays[target].append(relay)
                    others.append(f"tcp://{_HERE}:{relay.port}")
            ways.append(
                {
                    "FDCACHE_STORAGE": "nodes",
                    "FDCACHE_NODES_ADDRESS": f"tcp://{_HERE}:{ports[source]}",
                    "FDCACHE_NODES_KEY": key,
                    "FDCACHE_NODES": ",".join(others),
                }
            )
        return ways

    # --- faults -----------------------------------------------------------------------------------------------

    def break_node(self, node: ReplayNode, fault: NodeFault) -> bool:
        """Begin a fault of a node, which ``node.heal`` ends; return True if it can be seen to have happened."""
        service, engine = node.service, node.engine.process
        if fault is NodeFault.KILL:
            service.kill()
            node.heal = service.start
            return service.state is None
        if fault is NodeFault.ENGINE:
            node.engine.kill()
            node.heal = _nothing
            return not engine.is_alive() and node.engine.process.is_alive()
        if fault is NodeFault.STOP:
            service.signal(signal.SIGSTOP)
            node.heal = lambda: service.signal(signal.SIGCONT)
            return service.is_stopped()
        self._change(node, fault, on=True)
        node.heal = lambda: self._change(node, fault, on=False)
        return bool(node.relays) and all(relay.has(fault.value) for relay in node.relays)

    def _change(self, node: ReplayNode, fault: NodeFault, *, on: bool) -> None:
        """Change what comes through to a node and from it; another one that is cut stays so."""

        def change() -> None:
            for relay in node.relays:
                relay.change(fault.value, id(node), on=on)

        self.network.change(change)


def _nothing() -> None:
    """Do nothing: a new engine is there already."""
