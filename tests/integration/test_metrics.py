"""/metrics, read with the parser of Prometheus: names, units, and figures that match the traffic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import Request
from fdcache.service.client.connection import Connection
from fdcache.service.server.http import make_app
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Heartbeat, Register
from fdcache.tiers.statistics import BOUNDS
from tests.service_engine import BLOCK, PROMPT, Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service, until

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
_UNITS = ("_bytes", "_seconds", "_blocks", "_slots", "_tokens", "_info")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as own:
        yield own


def scrape(service: LocalService) -> str:
    with TestClient(make_app(service.address, ())) as web:
        return str(web.get("/metrics").text)


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """Return the sum of the samples of a name that have these labels."""
    return sum(
        number
        for (its, given), number in found.items()
        if its == name and labels.items() <= dict(given).items()
    )


def test_names_types_and_units_follow_the_conventions(service: LocalService) -> None:
    engine = Engine(service.address)
    engine.serve(PROMPT)
    families = list(text_string_to_metric_families(scrape(service)))
    engine.close()
    assert len({family.name for family in families}) == len(families) > 40
    seen = set()
    for family in families:
        assert re.fullmatch(r"fdcache_[a-z0-9_]+", family.name)
        assert family.documentation.endswith(".")
        assert family.type in {"counter", "gauge", "histogram"}
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen, f"{key} stands there twice"
            seen.add(key)
        if family.type == "histogram":
            assert family.name.endswith("_duration_seconds")
    units = {family.name for family in families if family.name.endswith(_UNITS)}
    assert {"fdcache_copied_bytes", "fdcache_copy_duration_seconds", "fdcache_arena_bytes"} <= units


def test_bytes_and_seconds_of_copies_outlive_their_client(
    service: LocalService,
) -> None:
    first = Engine(service.address, layout(ranks=2), device_blocks=64)  # so that one plan backs all up
    first.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    first.close()
    second = Engine(service.address, layout(ranks=2), device_blocks=64)
    assert second.serve(PROMPT)[0] == 10
    second.close()
    until(lambda: not service.ask("clients"), "both have said goodbye")
    found = samples(scrape(service))
    payload = 2 * 10 * first.layout.payload_bytes
    for direction, copies in (("device_to_host", 2), ("host_to_device", 2)):
        assert value(found, "fdcache_copied_bytes_total", direction=direction) == payload
        assert value(found, "fdcache_copy_duration_seconds_count", direction=direction) == copies
        assert value(found, "fdcache_copy_duration_seconds_sum", direction=direction) > 0


def test_histogram_buckets_are_cumulated(service: LocalService) -> None:
    engine = Engine(service.address, device_blocks=64)
    engine.serve(PROMPT)
    engine.close()
    found = samples(scrape(service))
    name = "fdcache_request_duration_seconds"
    buckets = [value(found, f"{name}_bucket", kind="publish", le=str(bound)) for bound in (*BOUNDS, "+Inf")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(found, f"{name}_count", kind="publish") == 1


class TestMisses:
    def missed(self, service: LocalService) -> dict[str, float]:
        return {
            dict(labels)["reason"]: number
            for (name, labels), number in samples(scrape(service)).items()
            if name == "fdcache_missed_blocks_total" and number
        }

    def look_up(self, engine: Engine, tokens: list[int]) -> int:
        """Look up a path that is not on the device. Return the blocks found."""
        engine.manager._device.reset()
        request = Request(f"look{tokens[0]}", tokens)
        found = engine.manager.match_prefix([request])[0].num_host_blocks
        engine.manager.finish([request])
        return found

    def reasons(self, service: LocalService, engine: Engine) -> list[str | None]:
        """Return why each block of the prompt is absent, None for one that is there."""
        hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(engine.layout.fingerprint))
        answer = service.ask("explain", namespace="", hashes=[row.tobytes().hex() for row in hashes])
        return [block.get("reason") for block in answer["blocks"]]

    def test_hits_and_blocks_never_stored(self, service: LocalService) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        assert self.look_up(engine, [*PROMPT[:24], *range(900, 917)]) == 6
        engine.close()
        expected = {"not_stored": 14}  # 10 of the first prompt, 4 of the second
        until(lambda: self.missed(service) == expected, f"the misses are counted as {expected}")
        found = samples(scrape(service))
        assert value(found, "fdcache_hit_blocks_total", tier="host") == 6
        asked = value(found, "fdcache_lookup_blocks_total")
        assert asked == 6 + 14

    def test_a_reset_and_a_pause(self, service: LocalService) -> None:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        service.ask("pause")
        assert self.look_up(engine, PROMPT) == 0
        service.ask("resume")
        service.ask("reset", tier="host")
        assert self.look_up(engine, PROMPT) == 0
        engine.close()
        expected = {"not_stored": 10, "reset": 10, "paused": 10}
        until(lambda: self.missed(service) == expected, f"the misses are counted as {expected}")

    def test_eviction(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        small = {"FDCACHE_HOST_MEMORY": "128KiB"}
        with local_service(tmp_path / "s", **small) as service:
            engine = Engine(service.address, device_blocks=64)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) > 0, "its first blocks are stored")
            starts = iter(range(1000, 10**6, 1000))

            def is_evicted() -> bool:
                """Whether the prompt has left; nobody looks it up before, since what is used each time stays."""
                start = next(starts)
                engine.serve(list(range(start, start + 41)))
                engine.await_stock()
                return self.reasons(service, engine)[0] == "evicted"

            until(is_evicted, "the prompt is evicted")
            assert self.look_up(engine, PROMPT) == 0
            until(lambda: self.missed(service).get("evicted") == 10, "its misses are counted as evictions")
            engine.close()
            assert set(self.missed(service)) == {"not_stored", "evicted"}

    def test_corrupt_blocks_and_their_descendants(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        service = LocalService(tmp_path / "s")
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(engine.layout.fingerprint))
        engine.close()
        (namespace,) = service.service.namespaces.values()
        slot = int(namespace.tier.find(hashes).slots[4])
        namespace.memory.tables[0].record(slot)[17] ^= 1
        service.crash()
        with local_service(tmp_path / "s") as service:
            engine = Engine(service.address)
            request = Request("reads", PROMPT)
            engine.manager.match_prefix([request])
            engine.manager.allocate_device_blocks([(request, len(PROMPT))])
            engine.carry_out(engine.manager.take_plans())
            engine.manager.finish([request])  # and computes nothing, which would be stored in its place
            until(lambda: service.ask("namespaces")[0]["totals"]["corrupt"] == 1, "it is dropped")
            reasons = self.reasons(service, engine)
            engine.close()
            assert reasons[:6] == [None] * 4 + ["corrupt", "broken_run"]


@pytest.mark.parametrize(
    "figures",
    [
        b'{"plans_in_flight": "many", "counters": {"device_hit_tokens": [1]}}',
        b'{"counters": null, "device": null, "live_requests": 1' + b"0" * 400 + b"}",
        b'{"device": [1]}',
        b'{"device": {"ready": "all"}}',
        b'{"name": "\xdf"}',
        b'{"loads": [1]}',
        b'{"loads": {"whole": "all", "true_seconds": -1e999, "recent": [{"request_id": 1}]}}',
        b"[" * 60000,
        b'{"a":' * 10000,
        b"[1]",
        b"",
    ],
)
def test_invalid_client_figures_are_harmless(service: LocalService, figures: bytes) -> None:
    line = Connection(service.address)
    live = LiveFile(service.directory)
    answer, _ = line.call(Register(layout().to_json().encode(), live.live, 'bad"name\n'), TIMEOUT)
    line.session = answer.session  # type: ignore[union-attr]
    line.call(Heartbeat(figures), TIMEOUT)
    found = samples(scrape(service))
    assert value(found, "fdcache_client_plans_in_flight", client='bad"name\n') == 0
    assert np.isfinite(list(found.values())).all()
    for view in ("stats", "clients", "transfers"):
        assert service.ask(view)
    assert service.ask("reset", tier="device", dry_run=True)
    line.close()
    live.close()
