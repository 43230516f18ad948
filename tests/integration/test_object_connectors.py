"""Connectors to buckets and shared folders: the suite that every connector passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.testing.storage import ConnectorConformance, OpenConnector
from tests.object_help import Bucket, PlainS3Server, open_bucket, open_folder


class TestSharedFolder(ConnectorConformance):
    @pytest.fixture
    def open_connector(self, tmp_path: Path) -> OpenConnector:
        return lambda layout, rank: open_folder(tmp_path, layout, rank)


class TestLocalBucket(ConnectorConformance):
    @pytest.fixture
    def open_connector(self, tmp_path: Path) -> OpenConnector:
        return lambda layout, rank: open_bucket(Bucket(f"file://{tmp_path}"), layout, rank)


class TestS3(ConnectorConformance):
    @pytest.fixture
    def open_connector(self, s3: Bucket) -> OpenConnector:
        return lambda layout, rank: open_bucket(s3, layout, rank)


@pytest.fixture(scope="module")
def plain_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainS3Server]:
    server = PlainS3Server(tmp_path_factory.mktemp("buckets"))
    yield server
    server.kill()


class TestPlainS3(ConnectorConformance):
    """A server that removes one object at a time."""

    @pytest.fixture
    def open_connector(self, plain_s3: PlainS3Server, tmp_path: Path) -> OpenConnector:
        bucket = plain_s3.bucket(tmp_path.name)
        return lambda layout, rank: open_bucket(bucket, layout, rank)
