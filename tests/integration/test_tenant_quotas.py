"""Quotas of tenants in a running service: eviction stays within a tenant, and views show it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fdcache.errors import RefusedError
from fdcache.hashing import NO_TENANT, TokenBlocks, root_hash, tenant_key
from fdcache.manager import Request
from fdcache.service.client.connection import Client, Connection
from fdcache.service.client.control import Control, Prefix
from fdcache.service.server.http import make_app
from fdcache.service.wire.protocol import Bye, Match
from tests.service_engine import BLOCK, PROMPT, Engine, assert_nothing_is_held, layout, ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service, until
from tests.service_line import ints, numbers, register

QUOTAS = {
    "FDCACHE_HOST_MEMORY": "512KiB",
    "FDCACHE_TENANT_QUOTA": "0.25",
    "FDCACHE_TENANT_QUOTAS": "large=0.5",
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path, **QUOTAS) as running:
        yield running


def tenants(service: LocalService) -> dict[str, dict[str, int]]:
    return {each["tenant"]: each for each in service.ask("tenants")}


def found(service: LocalService, tokens: list[int], tenant: str | None) -> int:
    """Return the blocks of a prompt that a fresh engine finds."""
    engine = Engine(service.address, device_blocks=64, stocked=False)
    count, _ = engine.serve(tokens, tenant)
    engine.close()
    return count


def flood(service: LocalService, engine: Engine, tenant: str | None, stored: int) -> None:
    """Let a tenant store prompts until it has stored that many blocks."""
    starts = iter(range(1000, 10**7, 1000))

    def enough() -> bool:
        start = next(starts)
        engine.serve(list(range(start, start + 41)), tenant)
        engine.await_stock()
        return bool(service.ask("namespaces")[0]["totals"]["stored"] >= stored)

    until(enough, "the tenant has stored all that")


@pytest.mark.parametrize("flooding", ["batch", None])
def test_a_flooding_tenant_evicts_only_its_own_blocks(service: LocalService, flooding: str | None) -> None:
    engine = Engine(service.address, device_blocks=64)
    engine.serve(PROMPT, "quiet")
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    flood(service, engine, flooding, 400)
    engine.close()
    until(lambda: not service.ask("clients"), "the engine is gone")
    (namespace,) = service.ask("namespaces")
    have = tenants(service)
    name = "(none)" if flooding is None else tenant_key(flooding).hex()[:12]
    assert have[name]["blocks"] <= have[name]["most_blocks"] == 21
    assert have[tenant_key("quiet").hex()[:12]]["blocks"] == 10
    assert namespace["totals"]["evicted"] > 250
    assert found(service, PROMPT, "quiet") == 10
    assert service.ask("integrity") == []


def test_without_quotas_a_flood_takes_everything(tmp_path: Path) -> None:
    small = {name: value for name, value in QUOTAS.items() if "TENANT" not in name}
    with local_service(tmp_path, **small) as service:
        engine = Engine(service.address, device_blocks=64)
        engine.serve(PROMPT, "quiet")
        flood(service, engine, "batch", 400)
        engine.close()
        assert found(service, PROMPT, "quiet") == 0


@pytest.mark.parametrize("storage", [False, True], ids=["host", "with storage"])
def test_what_another_tenant_has_is_a_miss_like_any_other(tmp_path: Path, storage: bool) -> None:
    """The answers, the work of the service and the counters are the same, so that a time has nothing to tell."""
    below = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path / "storage"),
        "FDCACHE_STORAGE_SIZE": "4MiB",
    }
    with local_service(tmp_path, **(below if storage else {})) as service:
        engine = Engine(service.address)
        engine.serve(PROMPT, "other")
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        until(lambda: not storage or service.ask("storage")["blocks"] == 10, "those in storage, too")
        engine.close()
        curious = Engine(service.address)
        nobody_has_it = [token + 10_000 for token in PROMPT]

        def look_up(tokens: list[int]) -> tuple[object, ...]:
            before = work(service)
            request = Request("curious", tokens, tenant="curious")
            found = curious.manager.match_prefix([request])[0]
            curious.manager.finish([request])
            until(lambda: work(service)[1] != before[1], "the service has counted it")
            asked, missed = work(service)
            return found, asked - before[0], missed - before[1], asked_of_the_service(service, request)

        seen = look_up(PROMPT)
        assert seen == look_up(nobody_has_it)
        assert seen[2] == 10, "each block is a miss"
        curious.close()
        assert found(service, PROMPT, "other") == 10


def work(service: LocalService) -> tuple[int, int]:
    """Return the look-ups that were sent to the service, and the blocks that were never stored."""
    kinds = service.ask("stats")["totals"]["latencies"]["kinds"]
    counted = sum(sum(each["counts"]) for kind, each in kinds.items() if kind in ("match", "prefetch"))
    (namespace,) = service.ask("namespaces")
    return counted, namespace["totals"]["missed"]["not_stored"]


def asked_of_the_service(service: LocalService, request: Request) -> object:
    """Return the answer to a message that looks up the blocks of a request."""
    line = Connection(service.address)
    live = register(line, service.directory)
    hashes = request.block_hashes
    answer, _ = line.call(Match(numbers(1), ints(len(hashes)), ints(0), hashes.tobytes()), TIMEOUT)
    line.call(Bye(), TIMEOUT)
    line.close()
    live.close()
    return answer


def test_a_named_quota_is_shown_by_name_and_in_the_metrics(service: LocalService) -> None:
    engine = Engine(service.address, device_blocks=64)
    flood(service, engine, "large", 400)
    engine.close()
    until(lambda: not service.ask("clients"), "the engine is gone, and all that it stored is counted")
    large = tenants(service)["large"]
    (namespace,) = service.ask("namespaces")
    assert namespace["tier"]["slots"] // 4 < large["blocks"] <= large["most_blocks"]
    with TestClient(make_app(service.address, ())) as web:
        text = web.get("/metrics").text
    labels = f'{{namespace="{namespace["namespace"]}",tenant="large"}}'
    assert f"fdcache_tenant_blocks{labels} {float(large['blocks'])}" in text
    assert f"fdcache_tenant_quota_blocks{labels} {float(large['most_blocks'])}" in text


def test_a_prompt_longer_than_the_quota_is_stored_in_part(service: LocalService) -> None:
    engine = Engine(service.address, device_blocks=64)
    tokens = list(range(4 * 40 + 1))
    engine.serve(tokens, "batch")
    until(lambda: service.ask("namespaces")[0]["totals"]["over_quota"] > 0, "some are over the quota")
    key = tenant_key("batch").hex()[:12]
    most = tenants(service)[key]["most_blocks"]
    engine.close()
    until(lambda: not service.ask("clients"), "the engine is gone")
    assert tenants(service)[key]["blocks"] == found(service, tokens, "batch") == most
    hashes = TokenBlocks(BLOCK, root_hash(layout().fingerprint, "batch"))
    hashes.append(tokens)
    answer = service.ask("explain", namespace="", hashes=[row.tobytes().hex() for row in hashes.hashes])
    assert answer["blocks"][most]["reason"] == "tenant_quota"
    assert_nothing_is_held(service)


def test_owners_of_blocks_survive_the_service(tmp_path: Path) -> None:
    service = LocalService(tmp_path)
    engine = Engine(service.address)
    engine.serve(PROMPT, "one")
    engine.serve(PROMPT, "two")
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 30, "the blocks are stored")
    engine.close()
    service.crash()
    with local_service(tmp_path) as service:
        one, two = (tenant_key(name).hex() for name in ("one", "two"))
        have = {name: each["blocks"] for name, each in tenants(service).items()}
        assert have == {one[:12]: 10, two[:12]: 10, "(none)": 10}
        service.ask("reset", tier="host", tenant=one)
        assert [found(service, PROMPT, name) for name in ("two", None)] == [10, 10]
        assert one[:12] not in tenants(service)


def is_read(client: Client, prefix: Prefix) -> bool:
    try:
        return Control(client).prefetch(prefix).done
    except RefusedError:  # the storage is being opened
        return False


def are_stored(service: LocalService, blocks: int) -> bool:
    return bool(service.ask("storage")["blocks"] == blocks)


def read_all(service: LocalService, prompts: list[list[int]], tenant: str) -> None:
    """Read prompts of a tenant from storage into the host tier."""
    with Client(service.address) as client:
        for tokens in prompts:
            until(partial(is_read, client, Prefix(tokens, tenant=tenant)), "the prompt is read")


def test_blocks_read_from_storage_are_their_tenants_and_within_its_quota(tmp_path: Path) -> None:
    storage = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path / "disk"),
        "FDCACHE_STORAGE_SIZE": "4MiB",
        **QUOTAS,
    }
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    prompts = [list(range(start, start + 41)) for start in range(0, 10_000, 1000)]
    batch = tenant_key("batch").hex()[:12]
    with local_service(folder, **storage) as service:
        engine = Engine(service.address, device_blocks=128)
        for number, tokens in enumerate(prompts, 1):
            engine.await_stock(10)
            engine.serve(tokens, "batch")
            until(partial(are_stored, service, 10 * number), "it is stored")
        engine.await_stock(10)
        engine.serve(PROMPT, "large")
        until(partial(are_stored, service, 110), "all is stored")
        engine.close()
    with local_service(folder, **storage) as service:  # without the host tier of the first
        engine = Engine(service.address)  # its layout is known
        read_all(service, [PROMPT], "large")
        read_all(service, prompts, "batch")
        engine.close()
        have = tenants(service)
        assert have["large"]["blocks"] == 10
        assert "(none)" not in have or not have["(none)"]["blocks"]
        assert 10 <= have[batch]["blocks"] <= have[batch]["most_blocks"] < 100
        assert found(service, prompts[-1], "batch") == 10
        service.ask("reset", tier="host", tenant=tenant_key("large").hex())
        assert not tenants(service)["large"]["blocks"]


def test_a_key_does_not_contain_the_name() -> None:
    assert tenant_key(None) == NO_TENANT
    assert len({tenant_key(name) for name in ("", "a", "b")}) == 3
    assert b"secret" not in tenant_key("secret")
