"""The place whose speed ``fdcache init`` measures: the folder of local or shared storage, or a bucket."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from fdcache.errors import StorageError
from fdcache.settings import Settings
from fdcache.storage.calibration import FORMAT, StorageSpeed, measure_storage
from fdcache.storage.objects.backend import ROOT, StoreFailedError
from fdcache.storage.objects.bucket import Bucket
from fdcache.storage.objects.calls import CallPool
from fdcache.storage.objects.variables import ObjectSettings, mask_bucket

T = TypeVar("T")

_SECONDS = 10.0
_OBJECTS = 16
_OBJECT_BYTES = 4 << 20
_PIECE = 4096


def measured_place(settings: Settings) -> Path | str | None:
    """Return the folder or the address of the bucket, without a secret; None for storage that is not measured."""
    tier = settings.storage_tier
    if tier.connector in ("local", "shared"):
        return tier.directory
    if tier.connector == "object":
        url = settings.group(ObjectSettings).url
        return None if url is None else mask_bucket(url)
    return None


def measure_place(settings: Settings) -> StorageSpeed:
    """Measure reads of the storage within some seconds. Raises ``StorageError`` if it cannot be read and written."""
    place, tier = measured_place(settings), settings.storage_tier
    if isinstance(place, Path):
        return measure_storage(place, threads=min(tier.threads, 16))
    return _measure_bucket(settings)


def _measure_bucket(settings: Settings) -> StorageSpeed:
    """Store some objects in a folder of their own, read them all at once, and small pieces one by one."""
    bucket = Bucket(settings.group(ObjectSettings), _SECONDS)
    pool = CallPool(min(settings.storage_tier.threads, 16), "fdcache-speed")
    content = np.random.default_rng().integers(0, 256, _OBJECT_BYTES, np.uint8)
    prefix = f"{ROOT}/speed/{uuid.uuid4().hex}/"
    names = [f"{prefix}{i}" for i in range(_OBJECTS)]
    try:
        with _removed(lambda: bucket.delete(names)):
            _all(pool, [partial(bucket.replace, name, content) for name in names])
            begin = time.perf_counter()
            read = _all(pool, [partial(bucket.read, name, 0, _OBJECT_BYTES) for name in names])
            seconds = time.perf_counter() - begin
            latency = statistics.median(_seconds(partial(bucket.read, name, 0, _PIECE)) for name in names)
    except StoreFailedError as error:
        raise StorageError(f"{error}; its speed cannot be measured") from None
    finally:
        pool.close()
        bucket.close()
    return StorageSpeed(
        format=FORMAT,
        folder=bucket.place,
        device=0,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        bytes_per_second=sum(map(len, read)) / seconds,
        latency_seconds=latency,
    )


def _all(pool: CallPool, calls: list[Callable[[], T]]) -> list[T]:
    results: list[T] = []
    for each in pool.results(calls, time.monotonic() + _SECONDS):
        if isinstance(each, Exception):
            raise StorageError(
                f"the bucket's speed cannot be measured: {each or 'no answer in time'}"
            ) from None
        results.append(each)
    return results


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def _removed(remove: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(StoreFailedError):
            remove()
