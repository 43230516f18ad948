"""Look into a bucket or a shared folder, without a server or an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fdcache.errors import LayoutError, StorageError
from fdcache.layout import KVLayout
from fdcache.settings import Settings
from fdcache.storage.objects.backend import (
    LAYOUT,
    ROOT,
    DamagedObjectError,
    ObjectBackend,
    ObjectMissingError,
    Stored,
    StoreFailedError,
)
from fdcache.storage.objects.bucket import LOCAL, Bucket
from fdcache.storage.objects.folder import SharedFolder
from fdcache.storage.objects.pack import ObjectFormat
from fdcache.storage.objects.variables import ObjectSettings
from fdcache.storage.records import RecordCheck
from fdcache_cli.slab_files import Selection

_SECONDS = 60.0
_MOST_LAYOUT = 1 << 20


def is_object_store(place: str) -> bool:
    """Return True for the address of a bucket, and for a folder with objects."""
    return "://" in place or (Path(place) / ROOT).is_dir()


def open_store(place: str, settings: Settings) -> ObjectBackend:
    """Open a bucket with the keys of the settings, or a folder. Raises ``StorageError``."""
    if "://" not in place:
        return SharedFolder(Path(place))
    if place.startswith(LOCAL) and not Path(place.removeprefix(LOCAL)).is_dir():
        raise StorageError(f"{place}: there is no folder of this name")
    options = settings.group(ObjectSettings)
    return Bucket(options.model_copy(update={"url": place}), _SECONDS)


@dataclass(slots=True)
class StoredNamespace:
    """The objects of one layout; ``layout`` is None where that is not stored."""

    fingerprint: str
    layout: KVLayout | None
    ranks: set[str] = field(default_factory=set)
    objects: int = 0
    blocks: int = 0
    bytes: int = 0
    corrupt: int = 0
    oldest: float = float("inf")
    newest: float = 0.0

    def as_json(self, now: float) -> dict[str, Any]:
        """Return the figures as plain values."""
        layout = self.layout
        return {
            "namespace": self.fingerprint,
            "model": layout.model if layout else None,
            "revision": layout.revision if layout else None,
            "tp_size": layout.record_ranks if layout else None,
            "ranks": len(self.ranks),
            "objects": self.objects,
            "blocks": self.blocks if layout else None,
            "bytes": self.bytes,
            "corrupt_blocks": self.corrupt,
            "newest_seconds": max(now - self.newest, 0.0) if self.objects else None,
            "oldest_seconds": max(now - self.oldest, 0.0) if self.objects else None,
        }


@dataclass(slots=True)
class RemovedObjects:
    """The objects of one layout that were removed, or that a dry run would remove."""

    namespace: str
    model: str | None
    objects: int = 0
    blocks: int = 0
    bytes: int = 0


def read_store(
    backend: ObjectBackend,
    *,
    verify: bool,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the figures of a store. ``verify``: read and check every record. Raises ``StorageError``."""
    try:
        stored = list(backend.stored(f"{ROOT}/"))
        namespaces: dict[str, StoredNamespace] = {}
        corrupt: list[str] = []
        for number, each in enumerate(stored):
            parts = each.name.split("/")
            if len(parts) < 6 or parts[1] != "1":
                continue
            found = namespaces.get(parts[2]) or _namespace(backend, parts[2])
            namespaces[parts[2]] = found
            found.ranks.add(parts[3])
            found.objects += 1
            found.bytes += each.size
            found.oldest, found.newest = min(found.oldest, each.used_at), max(found.newest, each.used_at)
            if found.layout is not None:
                found.blocks += ObjectFormat(found.layout).count(each.size)
                if verify and (wrong := _num_corrupt(backend, each.name, each.size, found.layout)):
                    found.corrupt += wrong
                    corrupt.append(each.name)
            if on_progress is not None:
                on_progress("objects", number + 1, len(stored))
    except StoreFailedError as error:
        raise StorageError(str(error)) from None
    now = time.time()
    rows = [each.as_json(now) for each in namespaces.values()]
    return {
        "place": backend.place,
        "objects": sum(row["objects"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "corrupt_blocks": sum(row["corrupt_blocks"] for row in rows),
        "corrupt_objects": sorted(corrupt),
        "verified": verify,
        "namespaces": rows,
    }


def remove_objects(
    backend: ObjectBackend,
    selection: Selection,
    *,
    dry_run: bool,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[RemovedObjects]:
    """Remove objects as a whole, for every node; return the layouts from which some go. Raises ``StorageError``.

    An object that is corrupt in part goes as a whole, and so does one whose last use is longer ago: what continues its
    blocks is found no more, and goes when the store is bounded.
    """
    chosen: dict[str, list[str]] = {}
    found: dict[str, RemovedObjects] = {}
    layouts: dict[str, KVLayout | None] = {}
    now = time.time()
    try:
        stored = list(backend.stored(f"{ROOT}/"))
        for number, each in enumerate(stored):
            parts = each.name.split("/")
            if len(parts) < 6 or parts[1] != "1":
                continue
            if parts[2] not in layouts:
                layouts[parts[2]] = _namespace(backend, parts[2]).layout
            layout = layouts[parts[2]]
            if _is_chosen(backend, each, parts[2], layout, selection, now):
                row = found.setdefault(parts[2], RemovedObjects(parts[2], layout.model if layout else None))
                row.objects += 1
                row.bytes += each.size
                row.blocks += ObjectFormat(layout).count(each.size) if layout else 0
                chosen.setdefault(parts[2], []).append(each.name)
            if on_progress is not None:
                on_progress("objects", number + 1, len(stored))
        for names in chosen.values():
            if not dry_run:
                backend.delete(names)
    except StoreFailedError as error:
        raise StorageError(str(error)) from None
    return list(found.values())


def _is_chosen(
    backend: ObjectBackend,
    stored: Stored,
    fingerprint: str,
    layout: KVLayout | None,
    selection: Selection,
    now: float,
) -> bool:
    wanted = selection.namespace
    model = layout.model if layout else None
    if wanted is not None and not fingerprint.startswith(wanted) and model != wanted:
        return False
    if selection.older_than is not None and now - stored.used_at <= selection.older_than:
        return False
    if not selection.corrupt:
        return True
    return layout is not None and _num_corrupt(backend, stored.name, stored.size, layout) > 0


def _namespace(backend: ObjectBackend, fingerprint: str) -> StoredNamespace:
    try:
        text = bytes(backend.read(f"{ROOT}/1/{fingerprint}/{LAYOUT}", 0, _MOST_LAYOUT))
        return StoredNamespace(fingerprint, KVLayout.from_json(text))
    except (ObjectMissingError, DamagedObjectError, LayoutError):
        return StoredNamespace(fingerprint, None)


def _num_corrupt(backend: ObjectBackend, name: str, size: int, layout: KVLayout) -> int:
    """Return how many records of an object are not what its page says; all of them without a sound page."""
    objects, check = ObjectFormat(layout), RecordCheck(layout, verify=True)
    try:
        content = np.frombuffer(backend.read(name, 0, size), np.uint8)
        headers = objects.headers(content[: objects.offset(0)].data)
    except ObjectMissingError:
        return 0  # removed meanwhile
    except DamagedObjectError:
        return max(objects.count(size), 1)
    records = [content[objects.offset(at) : objects.offset(at + 1)] for at in range(len(headers))]
    return sum(
        len(record) < layout.record_bytes
        or not check.belongs(header, header.hash)
        or not check.has_bytes_of(header, record)
        for header, record in zip(headers, records, strict=True)
    )
