"""Connectors to buckets and shared folders for tests, and a server with the interface of S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fdcache.layout import KVLayout
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import ConnectorContext
from fdcache.storage.objects.bucket import Bucket as Client
from fdcache.storage.objects.catalogue import Catalogues
from fdcache.storage.objects.connector import BucketConnector, FolderConnector
from fdcache.storage.objects.variables import ObjectSettings

KEY_ID, KEY = "AKIAKEYFORTESTS", "a-secret-key-of-the-tests"

_SERVE = """
import sys
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app
import logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""

_SERVE_FILES = """
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from localbucket import S3Handler
S3Handler.data_root = Path(sys.argv[1])
server = ThreadingHTTPServer(("127.0.0.1", 0), S3Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class Bucket:
    """Where a bucket is."""

    url: str
    endpoint: str | None = None
    key: str = KEY

    @property
    def settings(self) -> ObjectSettings:
        if self.endpoint is None:
            return ObjectSettings(url=self.url)
        return ObjectSettings(
            url=self.url, endpoint=self.endpoint, region="us-east-1", key_id=KEY_ID, key=self.key
        )

    @property
    def environment(self) -> dict[str, str]:
        given = {"FDCACHE_STORAGE": "object", "FDCACHE_OBJECT_URL": self.url}
        if self.endpoint is not None:
            given |= {
                "FDCACHE_OBJECT_ENDPOINT": self.endpoint,
                "FDCACHE_OBJECT_REGION": "us-east-1",
                "FDCACHE_OBJECT_KEY_ID": KEY_ID,
                "FDCACHE_OBJECT_KEY": self.key,
            }
        return given


class S3Server:
    """A server of moto in a process of its own, with an empty bucket."""

    def __init__(self) -> None:
        self._process = self._begin()
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.make("blocks")

    def _begin(self) -> subprocess.Popen[str]:
        """Start a process that prints its port."""
        if find_spec("moto") is None or find_spec("flask_cors") is None:
            pytest.skip("needs moto: pip install moto flask flask-cors")
        return _python(_SERVE)

    def make(self, bucket: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def remove(self, bucket: str) -> None:
        """Remove a bucket with its objects."""
        client = Client(Bucket(f"s3://{bucket}", self.endpoint).settings, 60.0)
        client.delete([each.name for each in client.stored("")])
        client.close()
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="DELETE")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def bucket(self, folder: str) -> Bucket:
        return Bucket(f"s3://blocks/{folder}", self.endpoint)

    def stop(self) -> None:
        """Freeze the server: connections are accepted, and nothing is answered."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class PlainS3Server(S3Server):
    """Another server, of objects in files: it has conditional puts, and removes one object at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        super().__init__()

    def _begin(self) -> subprocess.Popen[str]:
        if find_spec("localbucket") is None:
            pytest.skip("needs localbucket: pip install localbucket")
        return _python(_SERVE_FILES, str(self._folder))


def _python(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def context(
    layout: KVLayout, rank: int | None, options: ObjectSettings | None = None, **tier: Any
) -> ConnectorContext:
    return ConnectorContext(layout, rank, StorageTierSettings(**{"retry_after": 0.2, **tier}), options)


def open_folder(folder: Path, layout: KVLayout, rank: int | None = 0, **tier: Any) -> FolderConnector:
    """Open a connector as a node of its own would."""
    given = context(layout, rank, connector="shared", directory=folder, **tier)
    return FolderConnector(given, catalogues=Catalogues())


def open_bucket(bucket: Bucket, layout: KVLayout, rank: int | None = 0, **tier: Any) -> BucketConnector:
    """Open a connector as a node of its own would."""
    given = context(layout, rank, bucket.settings, connector="object", **tier)
    return BucketConnector(given, catalogues=Catalogues())
