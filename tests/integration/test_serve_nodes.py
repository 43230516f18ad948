"""Services of two nodes that read each other's host tiers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from tests.integration.test_serve_storage import chat, storage_of
from tests.nodes_help import KEY, free_address
from tests.service_help import ServiceProcess, service_process


def node(directory: Path, address: str, other: str) -> AbstractContextManager[ServiceProcess]:
    variables = {
        "FDCACHE_HOST_MEMORY": "64MiB",
        "FDCACHE_STORAGE": "nodes",
        "FDCACHE_NODES_KEY": KEY,
        "FDCACHE_NODES_ADDRESS": address,
        "FDCACHE_NODES": other,
        "FDCACHE_WRITE_POLICY": "write_through",
    }
    return service_process(directory, **variables)


def test_a_node_finds_what_another_holds_and_goes_on_without_it(tmp_path: Path) -> None:
    addresses = free_address(), free_address()
    with (
        node(tmp_path / "a", *addresses) as first,
        node(tmp_path / "b", *addresses[::-1]) as second,
    ):
        chat(first, requests=40)
        report = chat(second, requests=40)
        assert report.tally.hit_tokens["storage"] > 0
        (found,) = storage_of(second)["layouts"]
        assert (found["state"], found["error"]) == ("ready", None)
        assert found["totals"]["read_bytes"] > 0
        assert found["totals"]["corrupt_blocks"] == 0
        assert second.ask("integrity") == []

        first.kill()
        chat(second, requests=60)
        (found,) = storage_of(second)["layouts"]
        assert found["totals"]["corrupt_blocks"] == 0
        assert second.ask("integrity") == []
