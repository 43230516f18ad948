"""Reads from a node that is named: by a command, HTTP and the command line; and what is shown of other nodes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fdcache.errors import RefusedError
from fdcache.hints import read_hints
from fdcache.manager import CacheManager, Request
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from fdcache.service.server.http import make_app
from fdcache.service.wire.control_views import PrefetchView
from fdcache.settings.cache import CacheSettings, PrefetchPolicy, StorageTierSettings
from tests.integration.test_serve_nodes import COMMON
from tests.nodes_help import fetching, free_address, node, open_node
from tests.service_engine import BLOCK, PROMPT, Engine, ready_blocks
from tests.service_engine import layout as service_layout
from tests.service_help import TIMEOUT, ServiceProcess, run, until

BLOCKS = len(PROMPT) // BLOCK
BEST_EFFORT = StorageTierSettings(prefetch_policy=PrefetchPolicy.BEST_EFFORT)
HTTP_KEY = "k" * 32


class Nodes:
    """Two services that know each other, one of another key, and an address where nobody listens."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.first_at, self.second_at, self.stranger_at, self.nowhere = (free_address() for _ in range(4))
        listed = ",".join((self.first_at, self.second_at, self.stranger_at, self.nowhere))
        common = COMMON | {"FDCACHE_NODES": listed}

        def started(name: str, address: str, **more: str) -> ServiceProcess:
            variables = common | {"FDCACHE_NODES_ADDRESS": address} | more
            service = stack.enter_context(ServiceProcess(folder / name, **variables))
            service.start()
            return service

        self.first = started("a", self.first_at)
        self.second = started("b", self.second_at)
        self.stranger = started("c", self.stranger_at, FDCACHE_NODES_KEY="a-key-that-nobody-else-has")
        self.logs = [folder / f"{name}.log" for name in "abc"]
        self.engine, self.other = (
            Engine(each.address, device_blocks=64, fetches=BEST_EFFORT) for each in (self.first, self.second)
        )
        stack.callback(self.engine.close)
        stack.callback(self.other.close)
        self.control = Control(stack.enter_context(Client(self.second.address, timeout=TIMEOUT)))
        services = (self.first, self.second)
        until(lambda: all(each.ask("namespaces")[0]["storage"] for each in services), "the storages are open")

        self._prompts = count(1)

    def prompt(self) -> list[int]:
        """Return one that no node has."""
        number = next(self._prompts)
        return [each + 1000 * number for each in PROMPT]

    def hold(self, tokens: list[int]) -> None:
        """Compute a prompt on the first node; it is served to others."""
        before = ready_blocks(self.first)
        self.engine.serve(tokens)
        until(lambda: ready_blocks(self.first) == before + BLOCKS, "the blocks are on the host")

    def fetched(self, source: str | None, tokens: list[int]) -> PrefetchView:
        prefix = Prefix(tokens=tokens)
        until(lambda: self.control.prefetch(prefix, source).done, "the read has ended")
        return self.control.prefetch(prefix, source)

    def comes(self, tokens: list[int]) -> PrefetchView:
        """Fetch from the first node until it has served the blocks that were put a moment ago."""
        until(lambda: self.fetched(self.first_at, tokens).host == BLOCKS, "they have come")
        return self.fetched(self.first_at, tokens)

    def told(self, address: str) -> dict[str, Any]:
        (layout,) = self.second.ask("storage")["layouts"]
        return next(each for each in layout["nodes"] if each["address"] == address)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path_factory.mktemp("nodes"), stack)


def test_a_named_node_gives_its_blocks(nodes: Nodes) -> None:
    prompt, before = nodes.prompt(), nodes.told(nodes.first_at)
    nodes.hold(prompt)
    found = nodes.comes(prompt)
    assert (found.host, found.blocks, found.source, found.refused) == (BLOCKS, BLOCKS, nodes.first_at, None)
    blocks, _ = nodes.other.serve(prompt)  # compares the bytes that it loads
    assert blocks == BLOCKS
    told = nodes.told(nodes.first_at)
    assert (told["well"], told["hits"]) == (True, before["hits"] + BLOCKS)
    assert told["read_bytes"] > before["read_bytes"]
    assert told["answers"] > before["answers"]
    assert told["latency"] > 0
    assert nodes.second.ask("integrity") == nodes.first.ask("integrity") == []


def test_what_cannot_be_read_is_refused_with_the_reason(nodes: Nodes) -> None:
    held, lacking = nodes.prompt(), nodes.prompt()
    nodes.hold(held)
    nodes.comes(held)
    unknown = nodes.fetched(nodes.first_at, lacking)
    assert (unknown.host, unknown.done) == (0, True)
    assert unknown.refused == f"{nodes.first_at}: does not have the next of these blocks"
    for address in (nodes.stranger_at, nodes.nowhere):
        refused = nodes.fetched(address, lacking)
        assert (refused.host, refused.done) == (0, True)
        assert refused.refused == f"{address}: no connection"
        told = nodes.told(address)
        assert (told["well"], told["hits"], told["last_error"]) == (False, 0, refused.refused)
        assert told["failures"] >= 1
    with pytest.raises(
        RefusedError, match=r"source: 'tcp://10.0.0.9:1' is not the address of another node: the"
    ):
        nodes.control.prefetch(Prefix(tokens=lacking), "tcp://10.0.0.9:1")
    with pytest.raises(RefusedError, match=r"source: give the address of a node, tcp://host:port"):
        nodes.second.ask("prefetch", source=7, **Prefix(tokens=lacking).arguments(nodes.second.ask))
    with pytest.raises(RefusedError, match="keeps blocks in host tiers alone"):
        nodes.control.move(Prefix(tokens=held))
    assert all("a-key-that-nobody-else-has" not in each.read_text() for each in nodes.logs)


def test_blocks_that_a_named_node_lacks_come_from_the_others(nodes: Nodes) -> None:
    prompt, before = nodes.prompt(), nodes.told(nodes.first_at)["hits"]
    nodes.hold(prompt)
    until(lambda: nodes.fetched(nodes.nowhere, prompt).host == BLOCKS, "they have come from another node")
    assert nodes.fetched(nodes.nowhere, prompt).refused is None
    assert nodes.told(nodes.first_at)["hits"] == before + BLOCKS


def test_a_node_that_says_nothing_is_given_up_at_its_deadline(nodes: Nodes) -> None:
    held, prompt = nodes.prompt(), nodes.prompt()
    nodes.hold(held)
    nodes.comes(held)
    nodes.hold(prompt)
    assert nodes.first.process is not None
    os.kill(nodes.first.process.pid, signal.SIGSTOP)
    try:
        late = nodes.fetched(nodes.first_at, prompt)
        assert (late.host, late.done) == (0, True)
        assert late.refused == f"{nodes.first_at}: no answer within 2 s"
    finally:
        os.kill(nodes.first.process.pid, signal.SIGCONT)
    nodes.comes(prompt)
    told = nodes.told(nodes.first_at)
    assert (told["well"], told["last_error"]) == (True, late.refused)


def test_tools_name_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """The command line, HTTP, ``inspect`` and the metrics."""
    tokens, lacking = nodes.prompt(), nodes.prompt()
    nodes.hold(tokens)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(json.dumps(tokens))
    server = ("--server", nodes.second.address)

    def explained() -> str:
        done = run("inspect", "explain", "--tokens", prompt, *server)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    until(lambda: explained().count(f"on {nodes.first_at}'s host") == BLOCKS, "the blocks are seen elsewhere")
    refused = run("prefetch", "--tokens", prompt, "--from", "tcp://10.0.0.9:1", *server)
    assert refused.returncode != 0
    assert "is not the address of another node" in refused.stderr
    done = run("prefetch", "--tokens", prompt, "--from", nodes.first_at, "--wait", "30s", *server)
    assert (done.returncode, done.stdout) == (0, f"{BLOCKS} of {BLOCKS} blocks are in the host tier\n")
    assert "'s host" not in explained()
    with TestClient(make_app(nodes.second.address, (), own_key=HTTP_KEY)) as web:
        web.headers["Authorization"] = f"Bearer {HTTP_KEY}"
        asked = {"tokens": lacking, "source": nodes.first_at}
        until(lambda: web.post("/v1/prefetch", json=asked).json()["done"], "the read has ended")
        assert "does not have" in web.post("/v1/prefetch", json=asked).json()["refused"]
        elsewhere = {"tokens": lacking, "source": nodes.nowhere}
        until(lambda: web.post("/v1/prefetch", json=elsewhere).json()["done"], "the read has ended")
        metrics = web.get("/metrics").text
    (hits,) = [
        line
        for line in metrics.splitlines()
        if line.startswith("fdcache_storage_node_hit_blocks_total") and nodes.first_at in line
    ]
    guide = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    named = set(re.findall(r"fdcache_storage_node_\w+", guide))
    assert len(named) == 6
    assert named <= set(re.findall(r"^(fdcache_storage_node_\w+)", metrics, re.MULTILINE))
    assert float(hits.rsplit(" ", 1)[1]) == nodes.told(nodes.first_at)["hits"] >= BLOCKS
    shown = run("inspect", "storage", *server, COLUMNS="300").stdout
    assert nodes.first_at in shown
    assert f"{nodes.nowhere}: no connection" in shown


def test_a_hint_of_a_request_names_a_node(nodes: Nodes) -> None:
    """As the schedulers of vLLM and FastDeploy take ``kv.fetch``: before the request is looked up."""
    manager, tokens = nodes.other.manager, nodes.prompt()
    nodes.hold(tokens)

    def outcome(source: str) -> tuple[str, str]:
        request = Request("fetched", tokens)
        hints, (found,) = read_hints(
            "fetched", {"kv_hints": fetching(source, blocks=BLOCKS)}, partial(manager.fetch_from, request)
        )
        assert (hints, found.blocks) == ([], BLOCKS)
        return found.status.value, found.reason

    assert outcome("tcp://10.0.0.9:1")[0] == "refused"
    assert "is not the address of another node" in outcome("tcp://10.0.0.9:1")[1]
    assert "source: 'b' is not" in outcome("b")[1]
    until(lambda: outcome(nodes.first_at) and ready_blocks_of(nodes, tokens) == BLOCKS, "they have come")
    assert outcome(nodes.first_at) == ("taken", "")
    blocks, _ = nodes.other.serve(tokens)
    assert blocks == BLOCKS
    lacking = nodes.prompt()
    tokens = lacking
    until(lambda: outcome(nodes.nowhere)[0] == "refused", "the failure is known")
    assert outcome(nodes.nowhere) == ("refused", f"kv.fetch: {nodes.nowhere}: no connection")


def ready_blocks_of(nodes: Nodes, tokens: list[int]) -> int:
    return sum(each.tier == "host" for each in nodes.control.explain(Prefix(tokens=tokens)).blocks)


def test_an_engine_alone_reads_from_a_named_node() -> None:
    """Without a service the hint goes to the engine's own connector; without ``nodes`` it is refused."""
    layout = service_layout()
    addresses = [free_address() for _ in range(2)]
    with node(layout, address=addresses[0], listed=addresses) as first:
        cache = CacheSettings(device_blocks=64, host_memory=64 * layout.record_bytes)
        request = Request("r", PROMPT)
        lookup = open_node(layout, None, listed=tuple(addresses))
        tier = StorageTierSettings(connector="nodes")
        manager = CacheManager(cache, layout, storage=tier, lookup=lookup)
        assert manager.fetch_from(request, addresses[0]) == ""
        assert "not the address of another node" in manager.fetch_from(request, "tcp://10.0.0.9:1")
        first.hold(request.block_hashes)
        assert lookup.exists(request.block_hashes, TIMEOUT).length == BLOCKS
        manager.close()
    alone = CacheManager(CacheSettings(device_blocks=64), layout)
    assert alone.fetch_from(Request("r", PROMPT), addresses[0]).startswith("there is no storage tier")
    alone.close()
