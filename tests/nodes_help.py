"""Nodes for tests: connectors with host records of their own, in this process, over loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fdcache._core import CancelFlag, RecordTable
from fdcache.layout import KVLayout
from fdcache.metadata import HashArray
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import BatchResult, ConnectorContext, RecordBatch, RunResult, StorageStats
from fdcache.testing.storage import KnownRecords
from fdcache.transfer.nodes.connector import NodesConnector
from fdcache.transfer.nodes.variables import NodesSettings
from tests.service_help import until

KEY = "a-key-of-the-tests-of-nodes"
BLOCKS = 40


def free_address(host: str = "127.0.0.1") -> str:
    """Return an address that nothing uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def fetching(source: str, *, blocks: int = 4) -> dict[str, Any]:
    """Return vLLM's envelope of hints with a ``kv.fetch`` from a node."""
    payload = {"source_control_endpoint": source, "block_hashes": list(range(blocks))}
    action = {"action_id": "f", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def open_node(
    layout: KVLayout, rank: int | None = 0, *, key: str = KEY, retry_after: float = 0.2, **options: Any
) -> NodesConnector:
    tier = StorageTierSettings(connector="nodes", retry_after=retry_after)
    return NodesConnector(ConnectorContext(layout, rank, tier, NodesSettings(key=key, **options)))


@dataclass
class Node:
    """A node with a host tier that has blocks."""

    layout: KVLayout
    options: dict[str, Any]
    rank: int = 0
    connector: NodesConnector = field(init=False)
    records: KnownRecords = field(init=False)

    def __post_init__(self) -> None:
        self.connector = open_node(self.layout, self.rank, **self.options)
        self.records = KnownRecords(self.layout, BLOCKS)

    def hold(self, hashes: HashArray) -> None:
        assert self.connector.put(self.records.fill(hashes), 30.0).ok.all()

    def read(self, hashes: HashArray, timeout: float = 30.0) -> BatchResult:
        """Read blocks into the first records, which are wiped before."""
        self.records.wipe()
        return self.connector.get(self.records.batch(hashes), timeout)

    def has_read(self, hashes: HashArray) -> bool:
        return all(self.records.holds(slot, row.tobytes()) for slot, row in enumerate(hashes))


@contextmanager
def node(layout: KVLayout, *, rank: int = 0, **options: Any) -> Iterator[Node]:
    made = Node(layout, options, rank)
    try:
        yield made
    finally:
        made.connector.close()


class TwoNodes:
    """A connector that writes on one node and reads on another, for the suite of all connectors.

    What is put is first copied to the host tier of the writing node, as the caller wipes its own records. ``blocks``:
    what that has room for. ``others``: nodes without blocks that the reading one asks, too. ``directory``: a Redis in
    which the nodes find each other.
    """

    name = "nodes"

    def __init__(
        self,
        layout: KVLayout,
        rank: int,
        address: str,
        *,
        blocks: int = 2 * BLOCKS,
        others: int = 0,
        directory: str | None = None,
    ) -> None:
        addresses = [free_address() for _ in range(others)]
        self._writer = open_node(layout, rank, address=address, directory=directory)
        self._others = [open_node(layout, rank, address=each) for each in addresses]
        listed = (address, *addresses) if directory is None else ()
        self._reader = open_node(layout, rank, listed=listed, directory=directory)
        until(lambda: self._reader_finds(address), "the reading node finds the one that writes")
        self._host = KnownRecords(layout, blocks)

    def _reader_finds(self, address: str) -> bool:
        members = self._reader._node.members
        members.renew()
        return address in members.addresses

    def register(self, records: RecordTable) -> None:
        self._reader.register(records)

    def unregister(self, records: RecordTable) -> None:
        self._reader.unregister(records)

    def exists(self, hashes: HashArray, timeout: float) -> RunResult:
        return self._reader.exists(hashes, timeout)

    def last(self, hashes: HashArray, width: int, timeout: float) -> RunResult:
        return self._reader.last(hashes, width, timeout)

    def get(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        self._reader.clear(0.0)
        return self._reader.get(batch, timeout, cancel)

    def put(self, batch: RecordBatch, timeout: float, cancel: CancelFlag | None = None) -> BatchResult:
        held = self._host.batch(batch.hashes)
        for source, target in zip(batch.host_slots.tolist(), held.host_slots.tolist(), strict=True):
            self._host.table.record(target)[:] = batch.records.record(source)
            self._host.table.set_header(target, batch.records.header(source))
        return self._writer.put(held, timeout, cancel)

    def delete(self, hashes: HashArray, timeout: float) -> BatchResult:
        self._reader.clear(0.0)
        return self._writer.delete(hashes, timeout)

    def clear(self, timeout: float) -> int:
        self._reader.clear(timeout)
        return self._writer.clear(timeout)

    def stats(self) -> StorageStats:
        return self._reader.stats()

    def close(self) -> None:
        for each in (self._reader, self._writer, *self._others):
            each.close()


class RedisServer:
    """A server of Redis in a process of its own, on loopback or at an address of this machine."""

    password = "a-password-of-the-tests"

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("needs redis-server: apt-get install redis-server")
        pytest.importorskip("redis", reason="needs the client of Redis: pip install '.[nodes]'")
        self.host, self.port = host, int(free_address(host).rsplit(":", 1)[1])
        self._command = [
            program,
            *("--bind", host, "--port", str(self.port), "--requirepass", self.password),
            *("--save", "", "--appendonly", "no", "--dir", str(folder), "--daemonize", "no"),
        ]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.host}:{self.port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until(self._answers, "Redis answers")

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), 1.0):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
