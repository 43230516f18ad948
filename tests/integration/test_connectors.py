"""The suite that every connector passes, for each kind of storage there is: one run, one answer."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from fdcache.integrations.mooncake.client import load_client
from fdcache.layout import KVLayout
from fdcache.storage.factory import ENTRY_POINTS
from fdcache.testing.storage import ConnectorConformance, OpenConnector
from tests.local_connector import LocalConnector
from tests.mooncake_master import Master, SharedClient, find_master
from tests.nodes_help import RedisServer, TwoNodes, free_address
from tests.object_help import Bucket, PlainS3Server, open_bucket, open_folder
from tests.storage_help import open_store


@pytest.fixture(scope="module")
def plain_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainS3Server]:
    """A server that removes one object at a time."""
    server = PlainS3Server(tmp_path_factory.mktemp("buckets"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master, and one client that all connectors share."""
    master, client = Master(find_master(), tmp_path_factory.mktemp("mooncake")), SharedClient()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_client(), "MooncakeDistributedStore", lambda: client)
        yield master
    client.leave()
    master.kill()


def _local(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    return lambda layout, rank: LocalConnector(open_store(folder, layout, rank=rank))


def _shared(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    return lambda layout, rank: open_folder(folder, layout, rank)


def _folder_bucket(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    return lambda layout, rank: open_bucket(Bucket(f"file://{folder}"), layout, rank)


def _s3(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    bucket: Bucket = request.getfixturevalue("s3")
    return lambda layout, rank: open_bucket(bucket, layout, rank)


def _plain_s3(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    server: PlainS3Server = request.getfixturevalue("plain_s3")
    bucket = server.bucket(folder.name)
    return lambda layout, rank: open_bucket(bucket, layout, rank)


def _nodes(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    address = free_address()
    return lambda layout, rank: TwoNodes(layout, rank, address)


def _nodes_of_a_directory(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    redis: RedisServer = request.getfixturevalue("redis_server")
    address = free_address()

    def make(layout: KVLayout, rank: int) -> TwoNodes:
        return TwoNodes(layout, rank, address, directory=redis.url)

    return make


def _mooncake(folder: Path, request: pytest.FixtureRequest) -> OpenConnector:
    master: Master = request.getfixturevalue("mooncake")
    return master.connect


KINDS = {
    "local": _local,
    "shared": _shared,
    "object-file": _folder_bucket,
    "object-s3": _s3,
    "object-plain-s3": _plain_s3,
    "nodes": _nodes,
    "nodes-redis": _nodes_of_a_directory,
    "mooncake": _mooncake,
}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryConnector(ConnectorConformance):
    @pytest.fixture
    def open_connector(self, kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> OpenConnector:
        return KINDS[kind](tmp_path, request)


def test_no_connector_is_left_out() -> None:
    named = {each.name for each in entry_points(group=ENTRY_POINTS)}
    assert named >= {"mooncake", "nodes", "object", "shared"}
    assert named <= {kind.partition("-")[0] for kind in KINDS}
