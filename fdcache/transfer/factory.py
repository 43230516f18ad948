"""Transfer connectors by the name in FDCACHE_TRANSFER: built in, or from an installed package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from fdcache.errors import TransferError, TransferNotFoundError
from fdcache.settings.peers import PeerSettings
from fdcache.transfer.connector import TransferConnector, TransferContext

ENTRY_POINTS = "fdcache.transfer_connectors"
"""Entry-point group in which a package names its connectors, each a ``TransferFactory``."""

TransferFactory = Callable[[TransferContext], TransferConnector]


def open_connector(context: TransferContext) -> TransferConnector:
    """Open the connector of the settings. Raises ``TransferError`` when it cannot be opened."""
    name = context.settings.connector
    if name == "ipc":
        from fdcache.transfer.ipc import IpcConnector

        return IpcConnector(context)
    if name == "rdma":
        from fdcache.transfer.rdma import RdmaConnector

        return RdmaConnector(context)
    return _load(_find(name), context)


def require_connector(settings: PeerSettings) -> None:
    """Raise ``TransferNotFoundError`` early for a connector that does not exist."""
    if settings.connector == "rdma":
        from fdcache.transfer.nixl import find_nixl

        find_nixl()
    elif settings.is_on and settings.connector != "ipc":
        _find(settings.connector)


def _find(name: str) -> EntryPoint:
    found = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is not None:
        return found
    known = ", ".join(sorted({"none", "ipc", "rdma", *entry_points(group=ENTRY_POINTS).names}))
    raise TransferNotFoundError(
        f"FDCACHE_TRANSFER={name}: no such connector; use one of {known}, or install the package that has the entry "
        f"point {name!r} in the group {ENTRY_POINTS!r}"
    )


def _load(found: EntryPoint, context: TransferContext) -> TransferConnector:
    where = f"FDCACHE_TRANSFER={found.name}: {found.value}"
    try:
        factory = found.load()
    except ImportError as error:
        raise TransferNotFoundError(f"{where} cannot be loaded: {error}") from error
    try:
        connector = factory(context)
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"{where} failed: {type(error).__name__}: {error}") from error
    if not isinstance(connector, TransferConnector):
        raise TransferNotFoundError(
            f"{where} returned a {type(connector).__name__}, which is not a TransferConnector; see "
            "fdcache.transfer.connector"
        )
    return connector
