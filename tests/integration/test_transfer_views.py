"""What ``fdcache inspect transfers`` and the metrics say about hand-overs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from fdcache.manager import Request
from fdcache.service.server.http import make_app
from fdcache.service.wire.client_views import ClientFigures
from tests.commands import fdcache
from tests.service_help import LocalService, local_service
from tests.transfer_help import LAYOUT, Instance, prompt_of

BYTES = LAYOUT.payload_bytes


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    """A service of two prefill instances: a send of 6 blocks done, one declined, and one that no peer asked for."""
    folder = tmp_path_factory.mktemp("service")
    with (
        local_service(folder) as running,
        Instance("decode", folder, "d") as decode,
        Instance("prefill", folder, "p", server=running.address) as prefill,
        Instance("prefill", folder, "q", server=running.address, wait=0.0) as unasked,
    ):
        for sender, name in ((prefill, "done"), (prefill, "declined"), (unasked, "expired")):
            mine = Request(name, prompt_of(len(name), 6))
            sender.start(mine)
            sender.handovers.send([(mine, name)])
            sender.step()
            sender.manager.finish([mine])
            if name == "done":
                sender.compute(mine, name)
                decode.fetch(Request(name, mine.tokens), sender.source(name))
                decode.until(lambda: decode.outcomes, sender)
            elif name == "declined":
                decode.handovers.decline([sender.source(name)])
                decode.step()

        def told() -> bool:
            clients = running.ask("transfers")
            ended = [each["result"] for client in clients for each in client["handovers"]]
            return len(ended) == 3 and not any(client["sending_blocks"] for client in clients)

        prefill.until(told, unasked)
        yield running


def by_result(service: LocalService) -> dict[str, dict[str, Any]]:
    found = fdcache("inspect", "transfers", "--json", "--server", service.address)
    return {each.pop("result"): each for client in json.loads(found.stdout) for each in client["handovers"]}


def test_json_counts_hand_overs_by_peer_and_result(service: LocalService) -> None:
    counts = by_result(service)
    assert set(counts) == {"done", "not_wanted", "expired"}
    assert [each["transfers"] for each in counts.values()] == [1, 1, 1]
    assert (counts["done"]["blocks"], counts["done"]["bytes"]) == (6, 6 * BYTES)
    assert (counts["expired"]["blocks"], counts["expired"]["peer"]) == (0, "")
    assert str(counts["done"]["peer"]).endswith("/d.0")
    assert counts["expired"]["waited_seconds"] > counts["expired"]["moved_seconds"] == 0
    assert counts["done"]["waited_seconds"] > 0 and counts["done"]["moved_seconds"] > 0


def test_the_table_has_a_line_for_each_peer_and_result(service: LocalService) -> None:
    shown = fdcache("inspect", "transfers", "--server", service.address).stdout
    assert "hand-overs" in shown
    lines = [line.split() for line in shown.splitlines() if " send " in f" {line} "]
    assert len(lines) == 3
    assert any("none" in line and "expired" in line for line in lines)
    assert "not wanted" in shown


def test_metrics_count_the_same(service: LocalService) -> None:
    with TestClient(make_app(service.address, ())) as web:
        families = text_string_to_metric_families(web.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
    found: defaultdict[tuple[str, str | None], float] = defaultdict(float)
    for each in samples:
        found[each.name, each.labels.get("result")] += each.value
    prefix = "fdcache_client_handover"
    for result, count in by_result(service).items():
        assert found[f"{prefix}s_total", result] == count["transfers"]
        assert found[f"{prefix}_blocks_total", result] == count["blocks"]
        assert found[f"{prefix}_bytes_total", result] == count["bytes"]
        assert found[f"{prefix}_wait_seconds_total", result] == count["waited_seconds"]
        assert found[f"{prefix}_move_seconds_total", result] == count["moved_seconds"]
    assert found["fdcache_client_expired_leases_total", None] == 1
    for gauge in ("sending_blocks", "fetching_blocks", "held_blocks"):
        assert found[f"fdcache_client_{gauge}", None] == 0


@pytest.mark.parametrize(
    "given",
    [7, [1], [{"direction": "send"}], [{"direction": "send", "peer": "a", "result": "b", "bytes": -1}]],
)
def test_invalid_counts_of_a_client_are_left_out(given: object) -> None:
    assert ClientFigures(handovers=given).handover_counts() == []  # type: ignore[arg-type]


def test_a_count_that_comes_twice_is_shown_once() -> None:
    count = {"direction": "send", "peer": "a", "result": "done", "transfers": 2}
    assert [each.transfers for each in ClientFigures(handovers=[count, count]).handover_counts()] == [2]
