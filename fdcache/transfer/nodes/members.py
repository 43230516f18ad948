"""Members: the addresses of the other nodes, as they are listed and as a directory has them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from fdcache.errors import ConnectorNotFoundError, StorageError, TransferError
from fdcache.transfer.access import require_peer_address

log = logging.getLogger(__name__)

_BEAT_SECONDS = 2.0
_ABSENT_AFTER = 10.0
"""Seconds after which a node that has not entered itself again is no more in a directory."""
_MOST_MEMBERS = 256
_NO_ANSWERS = (AttributeError, LookupError, TypeError, ValueError)
"""What the client of Redis and its callers raise for answers of another server."""


class Directory(Protocol):
    """Where nodes enter their addresses. Calls raise ``StorageError`` without an answer."""

    def enter(self, addresses: Iterable[str]) -> list[str]:
        """Enter the own addresses for a while; return those of every node that is there."""

    def leave(self, addresses: Iterable[str]) -> None:
        """Remove the own addresses."""


class RedisDirectory:
    """A sorted set of addresses by the time, on Redis' clock, until which each is there."""

    key = "fdcache:1:nodes"

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError as error:
            raise ConnectorNotFoundError(
                "FDCACHE_NODES_DIRECTORY: the client of Redis is missing; pip install 'redis>=5,<9'"
            ) from error
        self._errors = (redis.RedisError, OSError)
        try:
            self._redis = redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0)
        except ValueError as error:  # its text may have the password
            raise StorageError(
                "FDCACHE_NODES_DIRECTORY: not an address of Redis; write redis://host:6379/0"
            ) from error

    def enter(self, addresses: Iterable[str]) -> list[str]:
        """Enter the own addresses for a while; return those of every node that is there."""
        try:
            now = int(self._redis.time()[0])
            with self._redis.pipeline(transaction=False) as batch:
                if until := dict.fromkeys(addresses, now + _ABSENT_AFTER):
                    batch.zadd(self.key, until)
                batch.zremrangebyscore(self.key, "-inf", f"({now}")
                batch.zrange(self.key, 0, _MOST_MEMBERS - 1)
                found = batch.execute()[-1]
            return [each.decode(errors="replace") for each in found]
        except self._errors as error:
            raise StorageError(f"the directory of nodes: {type(error).__name__}: {error}") from error
        except _NO_ANSWERS as error:
            raise StorageError(
                "the directory of nodes: no Redis answers there; correct FDCACHE_NODES_DIRECTORY"
            ) from error

    def leave(self, addresses: Iterable[str]) -> None:
        """Remove the own addresses."""
        try:
            if own := list(addresses):
                self._redis.zrem(self.key, *own)
            self._redis.close()
        except self._errors as error:
            raise StorageError(f"the directory of nodes: {type(error).__name__}: {error}") from error


class Members:
    """The other nodes' addresses. A directory is read by a thread of its own; one that is lost is remembered as it was.

    ``own``: returns the addresses that this process answers at.
    """

    def __init__(
        self, listed: Iterable[str], directory: Directory | None, own: Callable[[], tuple[str, ...]]
    ) -> None:
        self._listed = tuple(listed)
        self._directory = directory
        self._own = own
        self._found: tuple[str, ...] = ()
        self._changed = threading.Event()
        self._has_looked = threading.Event()
        self._closed = False
        self.error: str | None = None
        """Why the directory does not answer."""
        self._thread: threading.Thread | None = None
        if directory is not None:
            self._thread = threading.Thread(
                target=self._follow, args=(directory,), name="fdcache-nodes-directory", daemon=True
            )
            self._thread.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The other nodes, each once."""
        own = self._own()
        return tuple(each for each in dict.fromkeys(self._listed + self._found) if each not in own)

    def known(self, timeout: float) -> tuple[str, ...]:
        """Return the other nodes; wait for the first answer of a directory that was just opened."""
        if self._thread is not None:
            self._has_looked.wait(timeout)
        return self.addresses

    def renew(self) -> None:
        """Enter the own addresses now: they have changed."""
        self._changed.set()

    def _follow(self, directory: Directory) -> None:
        while not self._closed:
            try:
                self._found = tuple(each for each in directory.enter(self._own()) if _is_address(each))
                self.error = None
            except StorageError as error:
                if self.error is None:
                    log.warning("%s; the nodes that it had are asked as before", error)
                self.error = str(error)
            self._has_looked.set()
            self._changed.wait(_BEAT_SECONDS)
            self._changed.clear()
        try:
            directory.leave(self._own())
        except StorageError as error:
            log.info("not removed from the directory, which forgets it in %g s: %s", _ABSENT_AFTER, error)

    def close(self) -> None:
        """Leave the directory."""
        self._closed = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(5.0)


def _is_address(address: str) -> bool:
    try:
        require_node_address(address)
    except TransferError:
        return False
    return True


def require_node_address(address: str) -> None:
    """Raise ``TransferError`` for an address that no node can have: only TCP reaches another one."""
    if not address.startswith("tcp://"):
        raise TransferError(f"address {address[:200]!r} of a node: write tcp://host:port")
    require_peer_address(address)
