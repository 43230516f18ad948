"""Deleting a tenant's blocks reaches the files of local storage: a restart does not bring them back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fdcache.errors import RefusedError
from fdcache.hashing import tenant_key
from fdcache.service.client.connection import Client
from fdcache.service.client.control import Control, Prefix
from fdcache.service.client.remote_tier import RemoteHostTier
from tests.integration.test_router_feed import snapshot
from tests.service_engine import PROMPT, Engine
from tests.service_help import LocalService, local_service, until

OTHER = list(range(700, 741))
BLOCKS = 10


def settings(folder: Path, **more: str) -> dict[str, str]:
    return {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(folder / "disk"),
        "FDCACHE_STORAGE_SIZE": "8MiB",
        **more,
    }


def stored(service: LocalService, tokens: list[int], tenant: str | None) -> int:
    """Return how many blocks of a prompt the service has in any tier."""
    with Client(service.address) as client:
        found = Control(client).explain(Prefix(tokens, tenant=tenant))
    return sum(block.tier is not None for block in found.blocks)


@contextmanager
def serving(folder: Path, **more: str) -> Iterator[tuple[LocalService, Engine]]:
    """Run a service whose files are open, and an engine."""
    with local_service(folder, **settings(folder, **more)) as service:
        engine = Engine(service.address)
        until(lambda: service.ask("stats")["state"] == "ready", "the files are open")
        layouts = service.service.storage.layouts
        until(
            lambda: (
                layouts
                and all(each.reads is not None and each.reads.is_open for each in list(layouts.values()))
            ),
            "the storage of the engine's layout is open",
        )
        yield service, engine
        engine.close()


def fill(service: LocalService, engine: Engine) -> None:
    """Store two prompts of a tenant, and one of them for another tenant and for none."""
    for tokens, tenant in ((PROMPT, "acme"), (OTHER, "acme"), (PROMPT, "other"), (PROMPT, None)):
        engine.serve(tokens, tenant)
        engine.await_stock()
    until(lambda: service.ask("storage")["blocks"] == 4 * BLOCKS, "all blocks are stored")


def reset(service: LocalService, tier: str, tenant: str, **more: object) -> dict[str, int]:
    answer = service.ask("reset", tier=tier, tenant=tenant_key(tenant).hex(), **more)
    return {
        name: sum(each["blocks"] for each in answer[name]) for name in ("host", "storage") if answer[name]
    }


@pytest.mark.parametrize("tier", ["all", "storage"])
def test_the_blocks_of_a_tenant_are_gone_after_a_restart(tmp_path: Path, tier: str) -> None:
    with serving(tmp_path) as (service, engine):
        fill(service, engine)
        assert reset(service, tier, "acme", dry_run=True)["storage"] == 2 * BLOCKS
        assert stored(service, PROMPT, "acme") == BLOCKS
        told = reset(service, tier, "acme")
        assert told["storage"] == 2 * BLOCKS
        assert told.get("host", 0) == (2 * BLOCKS if tier == "all" else 0)
        until(lambda: service.ask("storage")["blocks"] == 2 * BLOCKS, "they are gone")
        service.ask("reset", tier="host")
        assert stored(service, PROMPT, "acme") == stored(service, OTHER, "acme") == 0
    with serving(tmp_path) as (service, _):
        assert service.ask("storage")["blocks"] == 2 * BLOCKS
        assert [stored(service, PROMPT, each) for each in ("acme", "other", None)] == [0, BLOCKS, BLOCKS]
        assert stored(service, OTHER, "acme") == 0


def test_a_later_service_knows_whose_stored_blocks_are(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, engine):
        fill(service, engine)
    with serving(tmp_path) as (service, _):
        with Client(service.address) as client:
            until(lambda: Control(client).prefetch(Prefix(PROMPT, tenant="acme")).done, "they are read")
        # What was read from storage belongs to the tenant in the host tier, too.
        assert reset(service, "all", "acme") == {"host": BLOCKS, "storage": 2 * BLOCKS}
        assert [stored(service, PROMPT, each) for each in ("acme", "other", None)] == [0, BLOCKS, BLOCKS]
    with serving(tmp_path) as (service, _):
        assert stored(service, PROMPT, "acme") == 0
        with pytest.raises(RefusedError, match="no namespace knows"):
            reset(service, "all", "acme")


def test_blocks_that_are_being_written_are_deleted_behind_their_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (service, engine):
        engine.serve(OTHER, "other")
        until(lambda: service.ask("storage")["blocks"] == BLOCKS, "the storage is open")
        (storage,) = service.service.storage.layouts.values()
        take, ended = storage._take_reports, list[bool]()
        monkeypatch.setattr(storage, "_take_reports", lambda: take() if ended else None)
        engine.await_stock()
        engine.serve(PROMPT, "acme")
        pool = storage.index.pool
        until(lambda: pool.stats().pending == BLOCKS, "the blocks are being written")
        assert reset(service, "all", "acme")["storage"] == 0
        ended.append(True)
        until(lambda: storage.is_flushed and not pool.stats().writing, "the writes have ended")
        assert stored(service, PROMPT, "acme") == 0
    with serving(tmp_path) as (service, _):
        assert service.ask("storage")["blocks"] == BLOCKS
        assert stored(service, PROMPT, "acme") == 0
        assert stored(service, OTHER, "other") == BLOCKS


def test_what_routers_are_told_of_a_deleted_tenant_is_in_no_file(tmp_path: Path) -> None:
    notes = dict[str, str](FDCACHE_KV_EVENTS="tcp://127.0.0.1:*")
    with serving(tmp_path, **notes) as (service, engine):
        fill(service, engine)
        file = notes_of(tmp_path)
        until(lambda: b"acme" in file.read_bytes(), "the notes are written")
        engine.close()
        until(lambda: not service.ask("clients"), "no device has the blocks")
        reset(service, "all", "acme")
        until(lambda: b"acme" not in file.read_bytes(), "the notes are gone")
        assert b"other" in file.read_bytes()


def test_what_routers_are_told_of_a_deleted_prefix_is_in_no_file(tmp_path: Path) -> None:
    with serving(tmp_path, FDCACHE_KV_EVENTS="tcp://127.0.0.1:*") as (service, engine):
        longer = [*OTHER[:40], *range(5000, 5009)]
        for tokens, tenant in ((longer, "other"), (PROMPT, "acme")):
            engine.serve(tokens, tenant)
            engine.await_stock()
        file = notes_of(tmp_path)
        beyond = np.array(longer[40:44], np.int32).tobytes()
        kept = np.array(PROMPT[:4], np.int32).tobytes()
        until(lambda: {beyond, kept} <= present(file, beyond, kept), "the notes are written")
        until(lambda: service.ask("storage")["blocks"] == 2 * BLOCKS + 2, "all blocks are stored")
        engine.close()
        until(lambda: not service.ask("clients"), "no device has the blocks")
        with Client(service.address) as client:
            Control(client).delete(Prefix(OTHER, tenant="other"), 4)
        until(lambda: present(file, beyond, kept) == {kept}, "the notes of what continues it are gone, too")
        assert present(file, *(np.array(OTHER[i : i + 4], np.int32).tobytes() for i in (0, 12, 16, 36))) == {
            np.array(OTHER[i : i + 4], np.int32).tobytes() for i in (0, 12)
        }


def notes_of(folder: Path) -> Path:
    """Return the file with what routers are told, once there is one."""
    until(lambda: any((folder / "disk").glob("*.notes")), "notes are written")
    (file,) = (folder / "disk").glob("*.notes")
    return file


def present(file: Path, *parts: bytes) -> set[bytes]:
    """Return those parts that a file has."""
    data = file.read_bytes()
    return {part for part in parts if part in data}


def test_a_deleted_prompt_that_comes_again_is_described_again(tmp_path: Path) -> None:
    with serving(tmp_path, FDCACHE_KV_EVENTS="tcp://127.0.0.1:*") as (service, engine):
        engine.serve(PROMPT, "acme")
        (feed,) = service.service.namespaces.feeds._feeds.values()
        until(lambda: service.ask("storage")["blocks"] == BLOCKS, "all blocks are stored")
        engine.manager.reset_cache()
        reset(service, "all", "acme")
        until(lambda: not feed.notes._notes, "the notes are gone")
        host = engine.manager._host
        assert isinstance(host, RemoteHostTier)
        session = host.sessions.session
        until(lambda: session is None or session.has_forgotten, "the engine is told")
        engine.await_stock()
        engine.serve(PROMPT, "acme")

        def told() -> list[int]:
            every = [event for event in snapshot(feed) if event.medium == "CPU"]
            return [token for event in every for token in event.token_ids]

        until(lambda: told() == PROMPT[:40], "routers are told of the blocks with their tokens")


def test_a_prefix_that_is_deleted_does_not_come_back(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, engine):
        fill(service, engine)
        with Client(service.address) as client:
            found = Control(client).delete(Prefix(PROMPT, tenant="acme"), 4)
        assert (found.deleted_host, found.deleted_storage) == (BLOCKS - 4, BLOCKS - 4)
    with serving(tmp_path) as (service, _):
        assert stored(service, PROMPT, "acme") == 4
        assert np.sum([stored(service, PROMPT, each) for each in ("other", None)]) == 2 * BLOCKS
