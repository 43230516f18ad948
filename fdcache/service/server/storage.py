"""ServiceStorage: the storage tier of a service, with one ``LayoutStorage`` for each layout."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from fdcache.errors import StorageError
from fdcache.layout import KVLayout
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.router_feed import RouterFeeds
from fdcache.service.server.storage_opening import (
    OpenedStorage,
    Progress,
    Scanned,
    open_layout,
    require_folder,
    stored_layouts,
)
from fdcache.settings import Settings
from fdcache.settings.cache import Verify
from fdcache.storage.factory import require_connector

log = logging.getLogger(__name__)

_OPENERS = 2


@dataclass(slots=True, eq=False)
class _Opening:
    """A layout whose storage is being opened, or failed to open and is tried again at ``retry_at``."""

    layout: KVLayout
    future: Future[OpenedStorage]
    first: bool
    error: str | None = None
    retry_at: float = 0.0


class ServiceStorage:
    """Opens, drives and closes the storage of every layout, in the service's thread.

    ``wake_fd`` becomes readable when something has ended and ``work`` is due. Raises ``StorageError`` for settings
    that no storage can be opened with.
    """

    def __init__(self, settings: Settings, *, make_room: Callable[[Namespace, int], None]) -> None:
        self.settings = settings.storage_tier
        self._cache = settings.cache
        self._options = settings.connector_options
        self._verify = settings.transfer.verify is not Verify.OFF
        self._make_room = make_room
        self.feeds: RouterFeeds | None = None
        check_settings(settings)
        if self.settings.connector == "local":
            require_folder(self.settings.directory)
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.layouts: dict[bytes, LayoutStorage] = {}
        self._openings: dict[bytes, _Opening] = {}
        self._opener = ThreadPoolExecutor(_OPENERS, thread_name_prefix="fdcache-open")
        self._scanned = Scanned(lambda done, total: None)
        self._flushed: dict[str, bool] = {}  # by layout id: True if its clients were gone then

    # --- opening --------------------------------------------------------------------------------------------

    def start(self, namespaces: Iterable[Namespace], progress: Progress) -> None:
        """Begin to open the storage of recovered layouts, and of layouts that have files."""
        self._scanned = Scanned(progress)
        layouts = {each.layout.fingerprint: each.layout for each in namespaces}
        if self.settings.connector == "local":
            layouts |= {layout.fingerprint: layout for layout in stored_layouts(self.settings.directory)}
        for layout in layouts.values():
            self._open(layout, first=True)

    @property
    def is_loading(self) -> bool:
        """True until the storage that existed at the start is open."""
        return any(each.first for each in self._openings.values())

    @property
    def progress(self) -> tuple[int, int]:
        """Slots scanned, and slots in all, of the files being opened."""
        return self._scanned.figures

    def errors(self) -> dict[str, str]:
        """Return the errors of layouts whose storage cannot be opened, by layout id."""
        return {
            each.layout.fingerprint.hex()[:16]: each.error
            for each in self._openings.values()
            if each.error is not None
        }

    def _open(self, layout: KVLayout, *, first: bool = False) -> None:
        future = self._opener.submit(
            open_layout,
            layout,
            self.settings,
            self._options,
            verify=self._verify,
            scanned=self._scanned,
            eviction=self._cache.eviction,
        )
        future.add_done_callback(lambda _: self._wake())
        self._openings[layout.fingerprint] = _Opening(layout, future, first)

    def _wake(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def _collect(self, opening: _Opening) -> None:
        opening.first = False
        name = opening.layout.fingerprint.hex()[:16]
        try:
            opened = opening.future.result()
        except Exception as error:  # of this layout, which a client may have made up
            if opening.error is None:
                unforeseen = None if isinstance(error, (StorageError, OSError, MemoryError)) else error
                log.warning(
                    "namespace %s: the storage cannot be opened, it is tried again: %s",
                    name,
                    error,
                    exc_info=unforeseen,
                )
            opening.error = str(error)
            opening.retry_at = time.monotonic() + max(self.settings.retry_after, 1.0)
            return
        del self._openings[opening.layout.fingerprint]
        self.layouts[opening.layout.fingerprint] = LayoutStorage(
            opened,
            self._cache,
            self.settings,
            wake=self._wake,
            make_room=self._make_room,
            feed=self.feeds.of(opening.layout) if self.feeds is not None else None,
        )
        log.info("namespace %s: the storage is open with %d blocks", name, opened.restored)

    # --- work -----------------------------------------------------------------------------------------------

    def of(self, namespace: Namespace) -> LayoutStorage | None:
        """Return the storage of a layout, None until it is open."""
        return self.layouts.get(namespace.layout.fingerprint)

    def work(self, namespaces: dict[bytes, Namespace], *, may_read: bool, may_write: bool) -> None:
        """Open the storage of new layouts, and drive every storage that is open."""
        now = time.monotonic()
        for fingerprint, namespace in namespaces.items():
            opening = self._openings.get(fingerprint)
            if opening is None and fingerprint not in self.layouts:
                self._open(namespace.layout)
            elif opening is not None and opening.retry_at and now >= opening.retry_at:
                self._retry(opening)
        for opening in list(self._openings.values()):
            if opening.future.done() and not opening.retry_at:
                self._collect(opening)
        for fingerprint, storage in self.layouts.items():
            storage.attach(namespaces.get(fingerprint))
            storage.work(may_read=may_read, may_write=may_write)

    def _retry(self, opening: _Opening) -> None:
        error = opening.error
        self._open(opening.layout)
        self._openings[opening.layout.fingerprint].error = error

    # --- the end --------------------------------------------------------------------------------------------

    def flush(self, *, last: bool) -> bool:
        """Write blocks that are not stored; return True when done. ``last``: no client will bring more."""
        for storage in self.layouts.values():
            if not self._flushed.get(storage.id, False) and (last or storage.id not in self._flushed):
                self._flushed[storage.id] = last
                storage.flush()
        opening = any(not each.retry_at for each in self._openings.values())
        return not opening and all(storage.is_flushed for storage in self.layouts.values())

    def close(self) -> None:
        """Wait for transfers that have begun, drop the others, and close everything."""
        self._opener.shutdown(wait=True, cancel_futures=True)
        for opening in self._openings.values():
            if opening.future.done() and not opening.future.cancelled() and not opening.future.exception():
                opening.future.result().close()
        for storage in self.layouts.values():
            storage.close()
        self._openings.clear()
        self.layouts.clear()
        os.close(self.wake_fd)


def check_settings(settings: Settings) -> None:
    """Raise ``StorageError`` for a storage that these settings can never open; nothing is opened."""
    require_connector(settings.storage_tier, settings.connector_options)
