"""Services of two nodes with a bucket or a folder between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_serve_storage import chat, storage_of
from tests.object_help import Bucket
from tests.service_help import ServiceProcess, service_process, until


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables that a node has."""
    common = {"FDCACHE_HOST_MEMORY": "4MiB", "FDCACHE_WRITE_POLICY": "write_through"}
    if request.param == "folder":
        folder = tmp_path / "blocks"
        folder.mkdir()
        return {**common, "FDCACHE_STORAGE": "shared", "FDCACHE_STORAGE_DIR": str(folder)}
    bucket: Bucket = request.getfixturevalue("s3")
    return {**common, **bucket.environment}


def is_stored(service: ServiceProcess) -> bool:
    storage = storage_of(service)
    return not storage["queued_blocks"] and not storage["writing_blocks"]


def test_a_second_service_finds_what_one_that_was_killed_had_stored(
    store: dict[str, str], tmp_path: Path
) -> None:
    with (
        service_process(tmp_path / "a", **store) as first,
        service_process(tmp_path / "b", **store) as second,
    ):
        chat(first, requests=40)
        until(lambda: is_stored(first), "what it has is stored")
        first.kill()
        report = chat(second, requests=40)
        assert report.tally.hit_tokens["storage"] > 0
        (found,) = storage_of(second)["layouts"]
        assert (found["state"], found["error"]) == ("ready", None)
        assert found["totals"]["corrupt_blocks"] == found["totals"]["misses"] == 0
        assert second.ask("integrity") == []
