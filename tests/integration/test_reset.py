"""``fdcache reset`` against a running service: loads in flight, selected blocks, report and exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.errors import RefusedError
from fdcache.hashing import tenant_key
from fdcache.manager import Request
from fdcache.service.client.connection import Client
from tests.service_engine import PROMPT, Engine, ready_blocks
from tests.service_help import LocalService, local_service, run, until


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path) as running:
        yield running


@pytest.fixture
def engine(service: LocalService) -> Iterator[Engine]:
    """An engine whose prompt is in the host tier and not on its device."""
    made = Engine(service.address)
    made.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    made.manager._device.reset()
    yield made
    made.close()


def pinned(service: LocalService, engine: Engine, name: str = "holds") -> Request:
    """Return a request that has pinned its blocks and not loaded them yet."""
    request = Request(name, PROMPT)
    assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
    assert service.ask("clients")[0]["runs"] == 1
    return request


class TestInFlight:
    def test_a_reset_is_refused_and_names_the_loading_client(
        self, service: LocalService, engine: Engine
    ) -> None:
        request = pinned(service, engine)
        done = run("reset", "--server", service.address, "--tier", "host", "--yes")
        assert done.returncode == 1
        (client,) = service.ask("clients")
        assert client["name"] in done.stderr
        assert f"process {client['pid']}" in done.stderr
        assert "--wait" in done.stderr
        assert ready_blocks(service) == 10
        engine.manager.finish([request])

    def test_a_drain_lets_loads_end_and_no_new_ones_begin(
        self, service: LocalService, engine: Engine
    ) -> None:
        request = pinned(service, engine)
        assert service.ask("reset", tier="host", in_flight="drain")["in_flight"][0]["pinned_runs"] == 1

        def holds() -> bool:
            """Drain again: a drain lasts 2 s, which a busy machine may need between these lines."""
            service.ask("reset", tier="host", in_flight="drain")
            late = Request("late", PROMPT)
            found = engine.manager.match_prefix([late])[0].num_host_blocks
            engine.manager.finish([late])
            return found == 0

        until(holds, "nothing new begins")
        engine.manager.finish([request])
        done = run("reset", "--server", service.address, "--tier", "host", "--yes", "--wait", "60s", "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["host"][0]["blocks"], answer["in_flight"]) == (10, [])
        assert ready_blocks(service) == 0

    def test_a_drain_that_times_out_forgets_nothing_and_ends(
        self, service: LocalService, engine: Engine
    ) -> None:
        request = pinned(service, engine)
        done = run("reset", "--server", service.address, "--tier", "host", "--yes", "--wait", "200ms")
        assert done.returncode == 1
        assert "wait longer" in done.stderr
        engine.manager.finish([request])
        names = iter(range(10**6))

        def finds_it_again() -> bool:
            again = Request(f"again{next(names)}", PROMPT)
            found = engine.manager.match_prefix([again])[0].num_host_blocks
            engine.manager.finish([again])
            return found == 10

        until(finds_it_again, "look-ups find blocks again")

    def test_a_lease_from_before_the_reset_is_stale_and_harmless(
        self, service: LocalService, engine: Engine
    ) -> None:
        request = pinned(service, engine)
        assert service.ask("reset", tier="host")["host"][0]["in_use"] == 10
        (allocation,) = engine.manager.allocate_device_blocks([(request, len(PROMPT))])
        assert allocation.ok
        outcomes = engine.carry_out(engine.manager.take_plans())
        assert all(outcome.status.value in {"confirmed", "failed"} for outcome in outcomes)
        engine.manager.finish([request])
        until(lambda: service.ask("clients")[0]["runs"] == 0, "the run is given back")
        assert service.ask("integrity") == []


class TestWhichBlocks:
    def test_tenant_resets_the_blocks_of_one_tenant(self, service: LocalService, engine: Engine) -> None:
        engine.serve(PROMPT, "gone")
        until(lambda: ready_blocks(service) == 20, "the tenant's blocks are stored")
        where = ("--server", service.address)
        dry = run("reset", *where, "--tenant", "gone", "--dry-run")
        assert "would forget 10 blocks" in dry.stdout
        done = run("reset", *where, "--tenant", "gone", "--yes")
        assert "forgot 10 blocks" in done.stdout
        assert "device" not in done.stdout
        assert [each["tenant"] for each in service.ask("tenants")] == ["(none)"]
        assert ready_blocks(service) == 10

    def test_older_than_resets_unused_blocks(self, service: LocalService, engine: Engine) -> None:
        assert service.ask("reset", tier="host", older_than=1000.0)["host"][0]["blocks"] == 0
        key = tenant_key("nobody").hex()
        with pytest.raises(RefusedError, match="no namespace knows"):
            service.ask("reset", tier="host", older_than=1e-6, tenant=key)
        assert service.ask("reset", tier="all", older_than=1e-6)["device"] == []
        assert ready_blocks(service) == 0

    def test_a_partial_device_reset_is_a_usage_error(self) -> None:
        done = run("reset", "--tier", "device", "--tenant", "x", "--yes")
        assert done.returncode == 2
        assert "reset as a whole" in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"tier": "cloud"}, "tier: 'cloud' is not one of host, storage, device, all"),
            ({"tenant": "name"}, "tenant: give the key"),
            ({"older_than": -1}, "older_than"),
            ({"in_flight": "ignore"}, "in_flight: 'ignore' is not one of"),
            ({"namespace": "zz"}, "namespace: no name begins with"),
            ({"tier": "device", "older_than": 5}, "reset as a whole"),
            ({"tier": "host", "dryrun": True}, "dryrun: unknown; a reset takes dry_run"),
        ],
    )
    def test_invalid_arguments_are_refused(
        self, service: LocalService, arguments: dict[str, str], said: str
    ) -> None:
        with Client(service.address) as client, pytest.raises(RefusedError, match=said):
            client.ask("reset", **arguments)


def test_after_a_reset_an_engine_copies_into_slots_granted_later(
    service: LocalService, engine: Engine
) -> None:
    (client,) = service.service.clients.values()
    assert client.stock
    service.ask("reset", tier="host")
    until(lambda: client.stock and not client.stale_stock, "the earlier slots are given back")
    engine.await_stock()
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored again")


def test_all_tiers_are_reported(service: LocalService, engine: Engine) -> None:
    engine.serve(PROMPT)

    def shows_its_device() -> bool:
        engine.manager.take_plans()
        return bool(service.ask("reset", dry_run=True)["device"][0]["blocks"])

    until(shows_its_device, "the engine has told what its device tier holds")
    dry = run("reset", "--server", service.address, "--dry-run")
    assert dry.returncode == 0
    assert "host" in dry.stdout
    assert "10 blocks, would be reset" in dry.stdout
    late = run("reset", "--server", service.address, "--yes", "--wait", "100ms")
    assert late.returncode == 1
    assert "forgot 10 blocks" in late.stdout
    assert "not reset yet" in late.stdout
