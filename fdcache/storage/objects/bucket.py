"""Objects in a bucket of S3, Google or Azure, or in a local folder, through obstore."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.errors import ConnectorNotFoundError, StorageError
from fdcache.storage.objects.backend import (
    ROOT,
    DamagedObjectError,
    ObjectExistsError,
    ObjectMissingError,
    Stored,
    StoreFailedError,
)
from fdcache.storage.objects.files import NO_FILE, read_file
from fdcache.storage.objects.variables import ObjectSettings, bucket_faults

_MARK = ".used"
"""End of the name of an empty object whose time is when the object of the name before it was last used."""

LOCAL = "file://"
_NOTHING = np.empty(0, np.uint8)
_RETRIES = 2
_CONNECT_SECONDS = 5.0
_MOST_TEXT = 300
_BEYOND_THE_END = re.compile(r"\b416\b|InvalidRange|range was invalid", re.IGNORECASE)
_NOT_SUPPORTED = re.compile(r"\b501\b|NotImplemented")

_CONFIG = {
    "s3": ("access_key_id", "secret_access_key", "session_token"),
    "az": ("account_name", "account_key", "sas_token"),
    "gs": (None, "service_account_key", None),
}
"""Names that obstore gives to key id, key and session token."""


def load_obstore() -> Any:
    """Import obstore. Raises ``ConnectorNotFoundError`` with the remedy when that fails."""
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ConnectorNotFoundError(
            f"FDCACHE_STORAGE=object: obstore cannot be loaded ({error}); install it with `pip install fdcache[object]`"
        ) from error


def require_bucket(settings: ObjectSettings) -> str:
    """Return the address of the bucket. Raises ``StorageError`` without obstore, or for wrong settings."""
    load_obstore()
    for name, wrong, right in bucket_faults(settings):
        raise StorageError(f"{name}: {wrong}; {right}")
    assert settings.url is not None
    return settings.url


def reach_bucket(settings: ObjectSettings, timeout: float) -> None:
    """Ask for an object that is not there. Raises ``StorageError`` if the bucket does not answer, or refuses."""
    bucket = Bucket(settings, timeout)
    try:
        bucket.read(f"{ROOT}/none", 0, 1)
    except ObjectMissingError:
        pass
    except StoreFailedError as error:
        raise StorageError(str(error)) from None
    finally:
        bucket.close()


class Bucket:
    """Objects through one client of obstore. ``timeout``: seconds after which the client gives a request up.

    Raises ``ConnectorNotFoundError`` without obstore and ``StorageError`` for wrong settings.
    """

    def __init__(self, settings: ObjectSettings, timeout: float) -> None:
        self._obstore = load_obstore()
        self._secrets = [
            secret.get_secret_value()
            for secret in (settings.key_id, settings.key, settings.session_token)
            if secret is not None
        ]
        self._url = require_bucket(settings)
        self._folder = Path(self._url.removeprefix(LOCAL)) if self._url.startswith(LOCAL) else None
        self._can_create = True
        self._open_with = partial(self._open, settings, timeout)
        self._store = self._open_with({})

    def _open(self, settings: ObjectSettings, timeout: float, config: dict[str, Any]) -> Any:
        if self._folder is not None:
            return self._obstore.store.LocalStore(str(self._folder), mkdir=True)
        scheme = self._url.partition("://")[0]
        given = (settings.key_id, settings.key, settings.session_token)
        config = config | {
            name: secret.get_secret_value()
            for name, secret in zip(_CONFIG[scheme], given, strict=True)
            if name is not None and secret is not None
        }
        if settings.endpoint is not None and scheme != "gs":
            config["endpoint"] = settings.endpoint
        if settings.region is not None and scheme == "s3":
            config["region"] = settings.region
        limit = timedelta(seconds=timeout)
        try:
            return self._obstore.store.from_url(
                self._url,
                config=config,
                client_options={
                    "timeout": limit,
                    "connect_timeout": timedelta(seconds=min(timeout, _CONNECT_SECONDS)),
                    "allow_http": (settings.endpoint or "").startswith("http://"),
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": limit},
            )
        except Exception as error:  # noqa: BLE001 - of several kinds; the text may repeat a secret
            raise StorageError(f"FDCACHE_OBJECT_URL: {self._url}: {self._reason(error)}") from None

    @property
    def place(self) -> str:
        """The bucket's address."""
        return self._url

    def read(self, name: str, offset: int, length: int) -> memoryview:
        """Return bytes of an object. Files are read without obstore, which would take new memory for each."""
        try:
            with self._failures(name):
                if self._folder is not None:
                    return read_file(self._folder / name, offset, length)
                return memoryview(self._obstore.get_range(self._store, name, start=offset, length=length))
        except _BeyondTheEndError:
            return memoryview(b"")

    def create(self, name: str, content: NDArray[np.uint8]) -> None:
        """Store a new object. A store without conditional requests is asked first."""
        if self._can_create:
            try:
                return self._put(name, content, "create")
            except _NotSupportedError:
                self._can_create = False
        with suppress(ObjectMissingError), self._failures(name):
            self._obstore.head(self._store, name)
            raise ObjectExistsError(name)
        return self._put(name, content, "overwrite")

    def replace(self, name: str, content: NDArray[np.uint8]) -> None:
        """Store an object."""
        self._put(name, content, "overwrite")

    def _put(self, name: str, content: NDArray[np.uint8], mode: str) -> None:
        try:
            with self._failures(name):
                self._obstore.put(self._store, name, content.data, mode=mode, use_multipart=False)
        except ObjectMissingError:
            raise StoreFailedError(
                f"{self._url}: the bucket does not exist; make it, or correct the address"
            ) from None

    def mark_used(self, names: Iterable[str]) -> None:
        """Store the marks of objects."""
        for name in names:
            self._put(name + _MARK, _NOTHING, "overwrite")

    def stored(self, prefix: str) -> Iterator[Stored]:
        """Yield objects with the times of their marks, and remove marks without an object."""
        found: dict[str, tuple[int, float]] = {}
        marks: dict[str, float] = {}
        with self._failures(prefix):
            for chunk in self._obstore.list(self._store, prefix, chunk_size=1000):
                for each in chunk:
                    name, at = each["path"], each["last_modified"].timestamp()
                    if name.endswith(_MARK):
                        marks[name.removesuffix(_MARK)] = at
                    else:
                        found[name] = (each["size"], at)
        for name, (size, at) in found.items():
            yield Stored(name, size, max(at, marks.pop(name, at)))
        self._delete([name + _MARK for name in marks])

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; their marks go with the next listing."""
        self._delete(list(names))

    def _delete(self, names: list[str]) -> None:
        if not names:
            return
        try:
            with suppress(ObjectMissingError), self._failures(names[0]):
                self._obstore.delete(self._store, names)
                return
        except _NotSupportedError:  # a server of S3 that removes one object at a time
            if not self._url.startswith("s3://"):
                raise
            self._store = self._open_with({"disable_bulk_delete": True})
        for name in names:  # another node is removing them, too
            with suppress(ObjectMissingError), self._failures(name):
                self._obstore.delete(self._store, name)

    def close(self) -> None:
        """Release nothing: the client goes with the last reference to it."""

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        kinds = self._obstore.exceptions
        try:
            yield
        except (ObjectExistsError, ObjectMissingError):
            raise
        except (FileNotFoundError, kinds.NotFoundError):
            raise ObjectMissingError(name) from None
        except (kinds.AlreadyExistsError, kinds.PreconditionError):
            raise ObjectExistsError(name) from None
        except kinds.NotSupportedError:
            raise _NotSupportedError(f"{self._url}: put-if-absent is not supported") from None
        except (PermissionError, kinds.PermissionDeniedError, kinds.UnauthenticatedError) as error:
            raise StoreFailedError(f"{self._url}: {self._reason(error)}", read_only=True) from None
        except Exception as error:  # noqa: BLE001 - obstore's own; their text may repeat a secret
            if isinstance(error, OSError) and error.errno in NO_FILE:
                raise DamagedObjectError(f"{self._url}/{name}: {error.strerror}") from None
            text = str(error)
            if _BEYOND_THE_END.search(text):
                raise _BeyondTheEndError from None
            reason = f"{self._url}: {self._reason(error)}"
            if _NOT_SUPPORTED.search(text):
                raise _NotSupportedError(reason) from None
            raise StoreFailedError(reason, no_room="No space left" in text) from None

    def _reason(self, error: Exception) -> str:
        """Return the first line of an error, without users or queries of addresses, answers of servers and secrets."""
        text = str(error).partition("\n")[0].partition("<")[0]
        text = re.sub(r"(?<=://)\S*@", "", re.sub(r"\?\S*", "", text))
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text.strip(" :")[:_MOST_TEXT] or type(error).__name__


class _BeyondTheEndError(StoreFailedError):
    """A range begins behind the end of the object."""

    def __init__(self) -> None:
        super().__init__("the range begins behind the end of the object")


class _NotSupportedError(StoreFailedError):
    """The store does not know this kind of request."""
