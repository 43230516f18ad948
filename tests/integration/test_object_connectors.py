"""Connectors to buckets and shared folders: the suite that every connector passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.testing.storage import ConnectorConformance, OpenConnector
from tests.object_help import Bucket, open_bucket, open_folder


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
