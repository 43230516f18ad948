"""ThisNode: what a process serves of its host tier, and the other nodes that it knows."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from fdcache.errors import ConfigurationError, StorageError, TransferError
from fdcache.layout import KVLayout
from fdcache.storage.breaker import CircuitBreaker
from fdcache.storage.records import RecordCheck
from fdcache.transfer.access import LinkKeys, rank_address, require_long_key
from fdcache.transfer.nodes.holdings import Holdings
from fdcache.transfer.nodes.members import Members, RedisDirectory, require_node_address
from fdcache.transfer.nodes.server import Kept, NodeServer
from fdcache.transfer.nodes.variables import NodesSettings
from fdcache.transfer.nodes.whereabouts import Whereabouts

_ADDRESS = "FDCACHE_NODES_ADDRESS"


def require_nodes(settings: NodesSettings) -> LinkKeys:
    """Return the keys of links. Raises ``StorageError`` for settings with which no node can ever be made."""
    try:
        if settings.key is None:
            raise ConfigurationError(
                "FDCACHE_NODES_KEY: whoever reaches a node could read its blocks; set it, or FDCACHE_NODES_KEY_FILE, "
                "to the same secret on all nodes"
            )
        key = settings.key.get_secret_value()
        require_long_key(key, "FDCACHE_NODES_KEY")
        for each in settings.listed:
            require_node_address(each)
        if settings.address is not None:
            require_node_address(rank_address(settings.address, 0, _ADDRESS))
        return LinkKeys.derived(f"nodes {key}")
    except (ConfigurationError, TransferError) as error:
        raise StorageError(str(error)) from error


class ThisNode:
    """One for each address of a process, shared by its connectors. It serves once a rank has joined.

    A node that has failed one of the connectors is tried again after ``retry_after`` seconds by any of them.
    """

    def __init__(self, settings: NodesSettings, retry_after: float) -> None:
        self.keys = require_nodes(settings)
        self.users = 0
        self.whereabouts = Whereabouts()
        self.server: NodeServer | None = None
        self._settings = settings
        self._retry_after = retry_after
        self._lock = threading.Lock()
        self._breakers: dict[str, CircuitBreaker] = {}
        self._kept: dict[tuple[bytes, int], tuple[Kept, int]] = {}  # with the number of connectors to it
        directory = None
        if settings.directory is not None:
            directory = RedisDirectory(settings.directory.get_secret_value())
        self.members = Members(settings.listed, directory, lambda: self.addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which this process answers."""
        return () if self.server is None else (self.server.address,)

    def breaker(self, address: str) -> CircuitBreaker:
        """Return the breaker of another node."""
        with self._lock:
            return self._breakers.setdefault(address, CircuitBreaker(self._retry_after))

    @property
    def failures(self) -> dict[str, str]:
        """Why other nodes that have failed are not waited for, by address."""
        breakers = [(address, self.breaker(address)) for address in self.members.addresses]
        return {address: each.reason for address, each in breakers if each.reason is not None}

    def require_other(self, address: str) -> None:
        """Raise ``StorageError`` for an address that no other node has."""
        others = self.members.addresses
        if address not in others:
            known = f"the others are {', '.join(others)}" if others else "no other node is known"
            raise StorageError(f"{address[:200]!r} is not the address of another node: {known}")

    @property
    def kept(self) -> Mapping[tuple[bytes, int], Kept]:
        """The holdings by layout and rank."""
        with self._lock:
            return {key: kept for key, (kept, _) in self._kept.items()}

    def join(self, layout: KVLayout, rank: int) -> Holdings:
        """Return the holdings of a rank, and serve them from now on. Raises ``StorageError``."""
        if self.server is None and self._settings.address is not None:
            address = rank_address(self._settings.address, rank, _ADDRESS)
            self.server = NodeServer(address, self.keys, lambda: self.kept)
            self.members.renew()
        key = layout.fingerprint, rank
        with self._lock:
            kept, count = self._kept.get(key) or (
                (Holdings(RecordCheck(layout, verify=True)), layout.record_bytes),
                0,
            )
            self._kept[key] = kept, count + 1
        return kept[0]

    def part(self, layout: KVLayout, rank: int) -> None:
        """Serve the holdings of a rank no more, once its last connector has parted."""
        key = layout.fingerprint, rank
        with self._lock:
            kept, count = self._kept[key]
            if count > 1:
                self._kept[key] = kept, count - 1
            else:
                del self._kept[key]

    def close(self) -> None:
        """Leave the directory, then answer nobody any more."""
        self.members.close()
        if self.server is not None:
            self.server.close()


class _Nodes:
    """The nodes of this process that are in use, by their settings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, ThisNode] = {}

    def open(self, settings: NodesSettings, retry_after: float) -> ThisNode:
        """Return the node of these settings, made if there is none; ``close`` it once."""
        with self._lock:
            name = self._name(settings)
            found = self._open.get(name) or ThisNode(settings, retry_after)
            self._open[name] = found
            found.users += 1
            return found

    def close(self, settings: NodesSettings) -> None:
        """End the use of a node; the last one closes it."""
        with self._lock:
            name = self._name(settings)
            self._open[name].users -= 1
            if not self._open[name].users:
                self._open.pop(name).close()

    @staticmethod
    def _name(settings: NodesSettings) -> str:
        directory = settings.directory.get_secret_value() if settings.directory else None
        return repr((settings.address, settings.listed, directory))


NODES = _Nodes()
"""The nodes of this process."""
