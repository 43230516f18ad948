"""Connectors by the name in FDCACHE_STORAGE: local, or of the entry point of a package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from fdcache.errors import ConnectorNotFoundError, StorageError
from fdcache.settings.cache import StorageTierSettings
from fdcache.settings.variable import Group

if TYPE_CHECKING:
    from fdcache.storage.connector import BlockStorage, ConnectorContext, StorageConnector

ENTRY_POINTS = "fdcache.storage_connectors"
"""Entry-point group in which a package names its connectors, each a ``ConnectorFactory``."""

ConnectorFactory = Callable[["ConnectorContext"], "StorageConnector"]


def open_storage(context: ConnectorContext) -> BlockStorage | None:
    """Open a worker's storage; None when storage is off. Raises ``StorageError`` when it cannot be opened."""
    settings = context.settings
    if not settings.is_on:
        return None
    if settings.connector != "local":
        return _connect(context)
    from fdcache.storage.slab import SlabStore

    return SlabStore(
        settings.directory,
        context.layout,
        rank=context.rank or 0,
        size=settings.size,
        fsync=settings.fsync,
        fsync_interval=settings.fsync_interval,
        verify=context.verify,
        threads=settings.threads,
        retry_after=settings.retry_after,
        on_progress=context.on_progress,
    )


def open_lookup(context: ConnectorContext) -> StorageConnector | None:
    """Open the connector that the scheduler asks; None for local storage, whose index it keeps itself, or none.

    Raises ``StorageError`` when it cannot be opened.
    """
    if not context.settings.is_on or context.settings.connector == "local":
        return None
    return _connect(context)


def require_connector(settings: StorageTierSettings, options: Group | None) -> None:
    """Raise ``StorageError`` early for a storage that these settings can never open.

    A factory may have a function ``require(options)``, which does so for its own.
    """
    if settings.is_on and settings.connector != "local":
        require = getattr(_factory(_find(settings.connector)), "require", None)
        if require is not None:
            require(options)


def _connect(context: ConnectorContext) -> StorageConnector:
    return _load(_find(context.settings.connector), context)


def _find(name: str) -> EntryPoint:
    found = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
    if found is not None:
        return found
    if name == "attnstore":
        raise ConnectorNotFoundError(
            "FDCACHE_STORAGE=attnstore: the AttentionStore SDK is not a public package; install the vendor's "
            f"connector, a package with the entry point 'attnstore' in the group {ENTRY_POINTS!r}"
        )
    known = ", ".join(sorted({"none", "local", *entry_points(group=ENTRY_POINTS).names}))
    raise ConnectorNotFoundError(
        f"FDCACHE_STORAGE={name}: no such connector; use one of {known}, or install the package that has the entry "
        f"point {name!r} in the group {ENTRY_POINTS!r}"
    )


def _factory(found: EntryPoint) -> ConnectorFactory:
    try:
        factory: ConnectorFactory = found.load()
    except ImportError as error:
        raise ConnectorNotFoundError(
            f"FDCACHE_STORAGE={found.name}: {found.value} cannot be loaded: {error}"
        ) from error
    return factory


def _load(found: EntryPoint, context: ConnectorContext) -> StorageConnector:
    from fdcache.storage.connector import StorageConnector

    factory = _factory(found)
    try:
        connector = factory(context)
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(
            f"FDCACHE_STORAGE={found.name}: {found.value} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(connector, StorageConnector):
        raise ConnectorNotFoundError(
            f"FDCACHE_STORAGE={found.name}: {found.value} returned a {type(connector).__name__}, which is not a "
            "StorageConnector; see fdcache.storage.connector"
        )
    return connector
