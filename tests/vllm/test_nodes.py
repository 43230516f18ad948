"""Two engines on two nodes: the second finds what the first has stored, and the parts of both are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from fdcache.replay.nodes.network import Network
from fdcache.replay.nodes.service_process import NodeService
from tests.nodes_help import KEY
from tests.object_help import PlainS3Server
from tests.service_help import until
from tests.vllm.engine import connector_config, running_engine
from tests.vllm.observed import Observed
from tests.vllm.places import NodePlace
from tests.vllm.test_tiers import MORTAL_ENGINE

Answers = list[list[int]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HERE = "127.0.0.1"


@pytest.fixture
def network() -> Iterator[Network]:
    """A network namespace for each of two nodes, where that is allowed."""
    made = Network(2)
    yield made
    made.close()


class Ways(NamedTuple):
    """The variables by which each node reaches what they share, and the end of what is not a part of a node."""

    variables: list[dict[str, str]]
    kill_store: Callable[[], None] = lambda: None


@pytest.fixture(params=["nodes", "shared", "object"])
def ways(request: pytest.FixtureRequest, network: Network, tmp_path: Path) -> Iterator[Ways]:
    """How nodes share."""
    stack, kill_store = ExitStack(), Ways._field_defaults["kill_store"]
    if request.param == "nodes":
        ports = [network.free_port(node) for node in range(2)]
        others = [network.relay(node, (HERE, ports[1 - node]), 1 - node).port for node in range(2)]
        found = [
            {
                "FDCACHE_STORAGE": "nodes",
                "FDCACHE_NODES_KEY": KEY,
                "FDCACHE_NODES_ADDRESS": f"tcp://{HERE}:{ports[node]}",
                "FDCACHE_NODES": f"tcp://{HERE}:{others[node]}",
            }
            for node in range(2)
        ]
    elif request.param == "shared":
        (tmp_path / "shared").mkdir()
        found = [{"FDCACHE_STORAGE": "shared", "FDCACHE_STORAGE_DIR": str(tmp_path / "shared")}] * 2
    else:
        if find_spec("obstore") is None:
            pytest.skip("needs obstore: pip install '.[object]'")
        server = PlainS3Server(tmp_path / "buckets")
        kill_store = server.kill
        stack.callback(kill_store)
        port = int(server.endpoint.rsplit(":", 1)[1])
        found = []
        for node in range(2):
            relay = network.relay(node, (HERE, port))
            endpoint = {"FDCACHE_OBJECT_ENDPOINT": f"http://{HERE}:{relay.port}"}
            found.append(server.bucket("vllm").environment | endpoint)
    yield Ways(found, kill_store)
    stack.close()


@pytest.fixture
def places(network: Network, tmp_path: Path) -> Iterator[list[NodePlace]]:
    """Both nodes; neither sees the folder of the other."""
    folders = [tmp_path / f"node {node}" for node in range(2)]
    for folder in folders:
        folder.mkdir()
    made = [NodePlace(network.path_of(node), [folders[1 - node]]) for node in range(2)]
    yield made
    for place in made:
        place.close()


def has_stored(service: NodeService) -> bool:
    (found,) = service.ask("stats")["storage"]["layouts"]
    return bool(found["totals"]["stored_blocks"]) and not (found["queued_blocks"] + found["writing_blocks"])


def test_a_second_engine_finds_what_the_first_has_stored_and_outlives_everything_else(
    model: Path,
    prompts: Answers,
    computed: Answers,
    ways: Ways,
    places: list[NodePlace],
    network: Network,
    tmp_path: Path,
) -> None:
    common = {"FDCACHE_HOST_MEMORY": "32MiB", "FDCACHE_WRITE_POLICY": "write_through"}
    services = []
    for node, way in enumerate(ways.variables):
        folder = tmp_path / f"node {node}"
        variables = common | way | {"FDCACHE_ARENA_DIR": str(folder)}
        services.append(NodeService(folder / "service", variables, network.path_of(node)))
    with ExitStack() as stack:
        for service, place in zip(services, places, strict=True):
            stack.callback(service.kill)
            place.call(service.start)
        for service in services:
            service.wait()
        first, second = services
        command = [sys.executable, "-c", MORTAL_ENGINE, str(model), first.address, repr(prompts)]
        killed = places[0].call(lambda: subprocess.run(command, env=os.environ, check=False))
        assert killed.returncode == -9
        until(lambda: has_stored(first), "the first node has stored its blocks")
        ends = (ways.kill_store, first.kill, second.kill)
        places[1].call(lambda: answers_whatever_ends(model, prompts, computed, second, ends))


def answers_whatever_ends(
    model: Path,
    prompts: Answers,
    computed: Answers,
    service: NodeService,
    ends: tuple[Callable[[], None], ...],
) -> None:
    """Run an engine that finds its prompts in what nodes share, and go on with it after each end of something else."""
    patient = {"FDCACHE_PREFETCH_POLICY": "wait_complete", "FDCACHE_RPC_TIMEOUT": "60"}
    with running_engine(model, connector_config(FDCACHE_SERVER=service.address, **patient)) as llm:
        engine = Observed(llm)
        service.wait_for_storage()
        assert engine.answers(prompts) == computed
        assert engine.counters.storage_hit_tokens > 0
        for end in ends:
            end()
            engine.forget_device()
            assert engine.answers(prompts) == computed
        assert engine.side.inconsistencies == 0
