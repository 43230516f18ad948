"""Deleted blocks that engines still have on their devices do not come back into the tiers of a service."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.errors import RefusedError
from fdcache.hashing import tenant_key
from fdcache.manager import LoadOutcome
from fdcache.metadata import TransferPlan, TransferReport
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from fdcache.service.server import deletion_log
from fdcache.service.wire.protocol import Forget
from tests.offload_engine import OffloadEngine
from tests.seeds import budget
from tests.service_engine import BLOCK, Engine, layout
from tests.service_help import TIMEOUT, LocalService, local_service, until

DEVICE = 64
PROMPT_BLOCKS = 10
SERVICE = {"FDCACHE_HOST_MEMORY": "1MiB"}


class InterruptedEngine(Engine):
    """Calls ``meanwhile`` once, while it copies to the host."""

    meanwhile: Callable[[], None] | None = None

    def carry_out(self, plans: list[TransferPlan]) -> list[LoadOutcome]:
        for plan in plans:
            for rank in self.ranks:
                rank.submit_swap_tasks(plan)
        if self.meanwhile is not None and any(plan.backups for plan in plans):
            act, self.meanwhile = self.meanwhile, None
            act()
        reports = [report for _ in plans for rank in self.ranks for report in rank.wait_reports(TIMEOUT)]
        return self.manager.apply(reports)


class OwnDevice:
    """An engine whose device blocks are the manager's."""

    def __init__(self, address: str) -> None:
        self._engine = InterruptedEngine(address, device_blocks=DEVICE)

    def serve(
        self, tokens: list[int], tenant: str | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self._engine.await_stock(len(tokens) // BLOCK)
        self._engine.meanwhile = meanwhile
        self._engine.serve(tokens, tenant=tenant)
        self._engine.meanwhile = None

    def step(self) -> None:
        self._engine.carry_out(self._engine.manager.take_plans())

    def close(self) -> None:
        self._engine.close()


class InterruptedOffload(OffloadEngine):
    """The same, of an engine that owns its device blocks."""

    meanwhile: Callable[[], None] | None = None

    def reports(self) -> list[TransferReport]:
        if self.meanwhile is not None:
            act, self.meanwhile = self.meanwhile, None
            act()
        return super().reports()


class EngineOwned:
    """An engine that owns its device blocks: those used longest ago are given to new requests."""

    def __init__(self, address: str) -> None:
        self._engine = InterruptedOffload(
            layout=layout(), device_blocks=DEVICE, server=address, rpc_timeout=TIMEOUT
        )
        self._ids = list(range(DEVICE))
        self._names = 0

    def serve(
        self, tokens: list[int], tenant: str | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        count = len(tokens) // BLOCK
        host = self._engine.manager._host
        until(lambda: host.index.room >= count, "slots are granted")
        taken, self._ids = self._ids[:count], self._ids[count:]
        self._names += 1
        self._engine.meanwhile = meanwhile
        self._engine.stored(f"r{self._names}", tokens, taken, tenant=tenant)
        self._engine.meanwhile = None
        self._ids += taken

    def step(self) -> None:
        self._engine.step()
        self._engine.collect()

    def close(self) -> None:
        self._engine.close()


OWNERS = [OwnDevice, EngineOwned]
Owner = Callable[[str], Any]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LocalService]:
    with local_service(tmp_path, **SERVICE) as running:
        yield running


def prompt(number: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    return [number * 1000 + i for i in range(blocks * BLOCK + 1)]


def on_host(client: Client, tokens: list[int], tenant: str | None = None) -> int:
    return sum(
        block.tier == "host" for block in Control(client).explain(Prefix(tokens, tenant=tenant)).blocks
    )


def delete_prefix(client: Client, prompts: list[list[int]], tenant: str) -> None:
    for tokens in prompts:
        Control(client).delete(Prefix(tokens, tenant=tenant))


def delete_tenant(client: Client, prompts: list[list[int]], tenant: str) -> None:
    client.ask("reset", tenant=tenant_key(tenant).hex())


def has_forgotten(service: LocalService) -> bool:
    """Return True if every engine has told that nothing is left of what was deleted."""
    latest = service.service.deletions.latest
    return all(client.forgotten == latest for client in service.service.clients.values())


def stored_by(engine: Any, client: Client) -> list[list[int]]:
    """Return prompts of a tenant that nearly fill the device, once the service has them all."""
    prompts = [prompt(number) for number in range(1, 7)]
    for tokens in prompts:
        engine.serve(tokens, "a")
    until(lambda: all(on_host(client, each, "a") == PROMPT_BLOCKS for each in prompts), "stored")
    return prompts


WAYS = [delete_prefix, delete_tenant]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("owner", OWNERS)
def test_an_engine_does_not_copy_out_again_what_was_deleted(
    service: LocalService, owner: Owner, way: Callable[..., None]
) -> None:
    engine = owner(service.address)
    deleted = stored_by(engine, service.client)
    way(service.client, deleted, "a")
    for number in range(20, 32):
        engine.serve(prompt(number))
    until(lambda: on_host(service.client, prompt(31)) == PROMPT_BLOCKS, "the next ones are stored")
    assert [on_host(service.client, each, "a") for each in deleted] == [0] * len(deleted)
    until(lambda: engine.step() or has_forgotten(service), "the service hears that the engine has forgotten")
    engine.serve(deleted[0], "a")
    until(
        lambda: on_host(service.client, deleted[0], "a") == PROMPT_BLOCKS, "a new request's blocks are stored"
    )
    engine.close()


@pytest.mark.parametrize("owner", OWNERS)
def test_the_next_service_knows_what_engines_have_to_forget(tmp_path: Path, owner: Owner) -> None:
    variables = {**SERVICE, "FDCACHE_DISCARD": "0"}
    former = LocalService(tmp_path, **variables)
    engine = owner(former.address)
    deleted = stored_by(engine, former.client)
    delete_prefix(former.client, deleted, "a")
    former.crash()  # the engine has made no step since
    with local_service(tmp_path, **variables) as service:
        until(lambda: service.ask("clients"), "the engine has registered again")
        for number in range(20, 32):
            engine.serve(prompt(number))
        until(lambda: on_host(service.client, prompt(31)) == PROMPT_BLOCKS, "the next ones are stored")
        assert [on_host(service.client, each, "a") for each in deleted] == [0] * len(deleted)
        engine.close()


def test_an_engine_that_missed_more_deletions_than_are_kept_forgets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion_log, "MOST_DELETED", 4)
    log = deletion_log.DeletionLog(tmp_path / "deletions")
    for number in range(5):
        log.add("n", np.full((1, 32), number, np.uint8))
    assert log.after("n", 0) == Forget(log.latest, everything=True)
    kept = deletion_log.DeletionLog(tmp_path / "deletions")
    kept.load()
    assert kept.latest == log.latest
    assert kept.after("n", 0) == log.after("n", 0)


def test_a_damaged_file_of_deletions_makes_engines_forget_everything(tmp_path: Path) -> None:
    (tmp_path / "deletions").write_bytes(b"\xc1")
    log = deletion_log.DeletionLog(tmp_path / "deletions")
    log.load()
    assert log.is_behind("n", 0)
    assert log.after("n", 0).everything


Block = tuple[str, tuple[int, ...]]


def ready(service: LocalService) -> int:
    return int(service.ask("stats")["tiers"]["host"]["ready"])


@pytest.mark.parametrize("how", ["delete", "tenant", "reset", "evicted"])
def test_no_restart_brings_deleted_blocks_back(tmp_path: Path, how: str) -> None:
    deleted, other = prompt(1), prompt(7)
    variables = {"FDCACHE_DISCARD": "0"}
    former = LocalService(tmp_path, **variables)
    engine = Engine(former.address)
    engine.serve(deleted, tenant="leaves")
    engine.serve(other)
    until(lambda: ready(former) == 2 * PROMPT_BLOCKS, "the blocks are on the host")
    gone, stays = Prefix(deleted, tenant="leaves"), Prefix(other)
    with Client(former.address) as client:
        if how == "delete":
            done = Control(client).delete(gone)
            assert (done.host, done.deleted_host) == (0, PROMPT_BLOCKS)
        elif how == "tenant":
            former.ask("reset", tier="host", tenant_name="leaves", tenant=tenant_key("leaves").hex())
        elif how == "reset":
            former.ask("reset", tier="host")
        else:
            Control(client).set_quota("leaves", 1e-6)  # its blocks leave with its next ones
            engine.serve(prompt(9), tenant="leaves")
            until(lambda: ready(former) <= PROMPT_BLOCKS + 1, "the quota evicts them")
            Control(client).delete(gone)
    former.crash()
    engine.close()
    with local_service(tmp_path, **variables) as service, Client(service.address) as client:
        control = Control(client)
        found = [block.tier for block in control.explain(gone).blocks]
        assert "host" not in found, found
        kept = [block.tier for block in control.explain(stays).blocks]
        assert kept == ([None] if how == "reset" else ["host"]) * PROMPT_BLOCKS


class History:
    """Random requests and deletions, and the blocks that a request has had since they were deleted."""

    TENANTS = "ab"
    PROMPTS = range(1, 5)
    TAILS = range(3)

    def __init__(self, service: LocalService, owner: Owner, seed: int) -> None:
        self.service = service
        self.rng = random.Random(seed)
        self.engines: list[Any] = [owner(service.address) for _ in range(2)]
        self.allowed: set[Block] = set()
        self.paths = [(t, self.tokens(p, tail)) for t in "ab" for p in self.PROMPTS for tail in self.TAILS]
        self.found = 0

    def tokens(self, number: int, tail: int) -> list[int]:
        """Return a prompt. Those of a number begin alike; the last four blocks differ."""
        return [*prompt(number, 6)[:-1], *prompt(100 + 10 * number + tail, 4)]

    def act(self) -> None:
        tenant, tokens = self.rng.choice(self.paths)
        kind = self.rng.random()
        if kind < 0.6:
            self.serve(tenant, tokens)
        elif kind < 0.75:
            self.serve(tenant, tokens, meanwhile=self.delete)
        elif kind < 0.9:
            self.delete()
        else:
            self.rng.choice(self.engines).step()
        self.check()

    def serve(self, tenant: str, tokens: list[int], meanwhile: Callable[[], None] | None = None) -> None:
        self.allowed |= {(tenant, each) for each in blocks_of(tokens)}
        self.rng.choice(self.engines).serve(tokens, tenant, meanwhile)

    def delete(self) -> None:
        tenant, tokens = self.rng.choice(self.paths)
        if self.rng.random() < 0.3:
            self.allowed = {each for each in self.allowed if each[0] != tenant}
            with suppress(RefusedError):  # nobody knows the tenant
                self.service.ask("reset", tenant=tenant_key(tenant).hex())
            return
        start = self.rng.randrange(len(tokens) // BLOCK)
        first = blocks_of(tokens)[start]
        self.allowed = {
            (owner, each) for owner, each in self.allowed if owner != tenant or each[: len(first)] != first
        }
        Control(self.service.client).delete(Prefix(tokens, tenant=tenant), start=start)

    def check(self) -> None:
        control = Control(self.service.client)
        for tenant, tokens in self.paths:
            views = control.explain(Prefix(tokens, tenant=tenant)).blocks
            there = {(tenant, each) for each, view in zip(blocks_of(tokens), views, strict=True) if view.tier}
            assert there <= self.allowed
            self.found += len(there)

    def is_quiet(self) -> bool:
        for engine in self.engines:
            engine.step()
        return has_forgotten(self.service)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def blocks_of(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[: BLOCK * (i + 1)]) for i in range(len(tokens) // BLOCK)]


@pytest.mark.parametrize("storage", [{}, {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_SIZE": "16MiB"}])
@pytest.mark.parametrize("owner", OWNERS)
def test_only_what_a_request_had_since_its_deletion_is_in_a_tier(
    tmp_path: Path, owner: Owner, storage: dict[str, str]
) -> None:
    for seed in range(budget(10)):
        folder = {"FDCACHE_STORAGE_DIR": str(tmp_path / f"disk{seed}")} if storage else {}
        with local_service(tmp_path / str(seed), **SERVICE, **storage, **folder) as service:
            run_history(History(service, owner, seed))


def run_history(history: History) -> None:
    for _ in range(60):
        history.act()
    assert history.found
    until(history.is_quiet, "the service hears that the engines have forgotten")
    tenant, tokens = history.paths[0]
    history.serve(tenant, tokens)
    client = history.service.client
    until(
        lambda: on_host(client, tokens, tenant) == len(tokens) // BLOCK, "a new request's blocks are stored"
    )
    history.close()
