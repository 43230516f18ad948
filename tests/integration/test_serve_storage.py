"""The storage tier of a service: blocks that outlive every process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fdcache.errors import RefusedError
from fdcache.replay.report import Report
from fdcache.service.client.control import Control, Prefix
from fdcache.service.server.http import make_app
from fdcache.settings.cache import PrefetchPolicy, StorageTierSettings, WritePolicy
from fdcache.storage.connector import BlockStorage, ConnectorContext
from fdcache.storage.factory import open_storage
from fdcache.storage.slab import SlabStore
from fdcache_cli.slab_files import SlabContents, read_file, slab_files
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_engine import BLOCK, PROMPT, Engine, layout
from tests.service_help import TIMEOUT, LocalService, ServiceProcess, local_service, service_process, until

BLOCKS = len(PROMPT) // BLOCK


def storage_settings(folder: Path, **others: str) -> dict[str, str]:
    return {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(folder),
        "FDCACHE_STORAGE_SIZE": "64MiB",
        "FDCACHE_HOST_MEMORY": "4MiB",
        **others,
    }


def chat(
    service: ServiceProcess | LocalService, *, ranks: int = 1, requests: int = 100, **tier: Any
) -> Report:
    options = {"prefetch_policy": PrefetchPolicy.WAIT_COMPLETE} | tier
    report = run_chat(
        small_config(
            device_blocks=150,
            ranks=ranks,
            host_memory=0,
            cache={
                "server": service.address,
                "rpc_timeout": TIMEOUT,
                "write_policy": WritePolicy.WRITE_THROUGH,
            },
            storage=StorageTierSettings(**options),
        ),
        requests,
    )
    assert_clean(report)
    return report


def contents_of(folder: Path) -> list[SlabContents]:
    found = [read_file(path, verify=True) for path in slab_files(folder)]
    assert all(isinstance(one, SlabContents) for one in found)
    return [one for one in found if isinstance(one, SlabContents)]


def storage_of(service: ServiceProcess | LocalService) -> dict[str, Any]:
    found = service.ask("stats")["storage"]
    assert isinstance(found, dict)
    return found


# Which blocks each policy stores is what an engine of its own stores: test_replay_storage has all three.
@pytest.mark.parametrize(
    "policy",
    [
        WritePolicy.WRITE_BACK,
        pytest.param(WritePolicy.WRITE_THROUGH, marks=pytest.mark.slow),
        pytest.param(WritePolicy.WRITE_THROUGH_SELECTIVE, marks=pytest.mark.slow),
    ],
)
def test_a_restarted_service_without_its_arena_is_warm(tmp_path: Path, policy: WritePolicy) -> None:
    folder = tmp_path / "storage"
    with service_process(tmp_path / "s", **storage_settings(folder, FDCACHE_WRITE_POLICY=policy)) as service:
        first = chat(service)
        assert service.terminate() == 0
        assert service.leftovers() == []
        (stored,) = contents_of(folder)
        assert len(stored.slots) > 0
        assert len(stored.corrupt) == 0
        assert (stored.depths >= 0).all(), "every block can be reached from the root"
        service.start()
        until(lambda: service.ask("stats")["state"] == "ready", "the index is loaded")
        assert storage_of(service)["blocks"] == len(stored.slots)
        second = chat(service)
        assert second.tally.hit_tokens["storage"] > 0
        assert second.tally.hit_rate > first.tally.hit_rate
        assert service.ask("integrity") == []


def test_every_rank_stores_its_part(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    with service_process(tmp_path / "s", **storage_settings(folder)) as service:
        chat(service, ranks=2, requests=60)
        assert service.terminate() == 0
        files = contents_of(folder)
        assert [len(file.corrupt) for file in files] == [0, 0]
        assert (files[0].hashes == files[1].hashes).all()
        service.start()
        until(lambda: service.ask("stats")["state"] == "ready", "the index is loaded")
        assert chat(service, ranks=2, requests=60).tally.hit_tokens["storage"] > 0


# Each kill is of a service that has begun with what the one before left: the second is the first once more.
@pytest.mark.parametrize("after", [[1.0], pytest.param([0.5, 1.0, 2.0], marks=pytest.mark.slow)], ids=len)
def test_a_service_killed_while_it_wrote_restarts_warm_and_correct(
    tmp_path: Path, after: list[float]
) -> None:
    folder = tmp_path / "storage"
    with service_process(tmp_path / "s", **storage_settings(folder)) as service:
        for seconds in after:
            replay = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fdcache_cli.main", "replay", "--json", "--requests", "400"),
                    *("--device-blocks", "150", "--write-policy", "write_through"),
                ],
                stdout=subprocess.PIPE,
                env={**os.environ, "FDCACHE_SERVER": service.address, "FDCACHE_RPC_TIMEOUT": "1"},
            )
            until(lambda: storage_of(service)["blocks"] > 0, "blocks are stored")
            time.sleep(seconds)
            service.kill()
            for left in service.directory.glob("fdcache-*"):
                if not left.name.startswith("fdcache-live-"):
                    left.unlink()
            service.start()
            output, _ = replay.communicate(timeout=240)
            report = json.loads(output)
            found = (report["corrupt_blocks"], report["leaked_slots"], report["leaked_pins"])
            assert (replay.returncode, *found) == (0, 0, 0, 0)
        until(lambda: service.ask("stats")["state"] == "ready", "it is ready")
        assert chat(service).tally.hit_tokens["storage"] > 0
        assert storage_of(service)["layouts"][0]["totals"]["corrupt_blocks"] == 0
        assert service.ask("integrity") == []
        assert service.terminate() == 0
        assert [len(file.corrupt) for file in contents_of(folder)] == [0]


class TestFlush:
    def test_an_end_leaves_nothing_unwritten(self, tmp_path: Path) -> None:
        settings = storage_settings(tmp_path / "storage", FDCACHE_WRITE_POLICY="write_back")
        with service_process(tmp_path / "s", **settings) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: service.ask("stats")["tiers"]["host"]["ready"] == BLOCKS, "the blocks are there")
            engine.close()
            assert service.terminate() == 0
        (stored,) = contents_of(tmp_path / "storage")
        assert len(stored.slots) == BLOCKS

    def test_a_restart_after_a_kill_stores_what_the_arena_still_has(self, tmp_path: Path) -> None:
        settings = storage_settings(tmp_path / "storage")
        with service_process(tmp_path / "s", **settings | {"FDCACHE_STORAGE": "none"}) as bare:
            engine = Engine(bare.address)
            engine.serve(PROMPT)
            until(lambda: bare.ask("stats")["tiers"]["host"]["ready"] == BLOCKS, "the blocks are there")
            bare.kill()
            engine.close()
            with service_process(tmp_path / "s", **settings) as service:
                until(lambda: storage_of(service)["blocks"] == BLOCKS, "they are stored")
                assert service.terminate() == 0

    def test_it_takes_no_longer_than_the_drain_may(self, tmp_path: Path) -> None:
        """A client that does not leave and blocks without end to write: the deadline holds all the same."""
        settings = storage_settings(tmp_path / "storage", FDCACHE_DRAIN_TIMEOUT="200ms")
        with service_process(tmp_path / "s", **settings) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            assert service.terminate() == 0
            engine.close()
        assert [len(file.corrupt) for file in contents_of(tmp_path / "storage")] == [0]


def told(notified: socket.socket) -> list[bytes]:
    """Return the notifications to the service manager since the last call."""
    messages = []
    while True:
        try:
            messages.append(notified.recv(200))
        except BlockingIOError:
            return messages


class TestReadiness:
    def test_it_is_not_ready_before_the_index_is_loaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, gate = tmp_path / "storage", threading.Event()
        SlabStore(folder, layout(), rank=0, size=64 << 20).close()

        def open_late(context: ConnectorContext) -> BlockStorage | None:
            assert gate.wait(60)
            return open_storage(context)

        monkeypatch.setattr("fdcache.service.server.storage_opening.open_storage", open_late)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(tmp_path / "notify"))
            notified.setblocking(False)
            monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            with (
                local_service(tmp_path, **storage_settings(folder)) as service,
                TestClient(make_app(service.address, ())) as web,
            ):
                answer = web.get("/readyz")
                assert answer.status_code == 503
                assert "loading the storage index" in answer.json()["detail"]
                assert web.get("/healthz").status_code == 200
                assert service.ask("storage")["loading"]["active"]
                assert not any(each.startswith(b"READY=1") for each in told(notified))
                engine = Engine(service.address)
                engine.serve(PROMPT)  # the host tier works meanwhile
                gate.set()
                until(lambda: web.get("/readyz").status_code == 200, "the index is loaded")
                until(lambda: any(each.startswith(b"READY=1") for each in told(notified)), "systemd is told")
                until(lambda: service.ask("storage")["blocks"] == BLOCKS, "what came meanwhile is stored")
                engine.close()

    def test_a_folder_that_another_process_uses_is_told_of_and_taken_later(self, tmp_path: Path) -> None:
        folder = tmp_path / "storage"
        other = SlabStore(folder, layout(), rank=0, size=64 << 20)
        with local_service(tmp_path, {"retry_after": 0.0}, **storage_settings(folder)) as service:
            until(lambda: service.ask("stats")["state"] == "ready", "no one waits for a busy file")
            engine = Engine(service.address)
            (state,) = service.ask("storage")["layouts"]
            assert state["state"] == "off"
            assert "another process is using it" in state["error"]
            other.close()
            until(lambda: service.ask("storage")["state"] == "ready", "it is tried again")
            engine.serve(PROMPT)
            until(lambda: service.ask("storage")["blocks"] == BLOCKS, "the blocks are stored")
            engine.close()


class TestReset:
    @pytest.fixture
    def service(self, tmp_path: Path) -> Iterator[LocalService]:
        with local_service(tmp_path, **storage_settings(tmp_path / "storage")) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: service.ask("storage")["blocks"] == BLOCKS, "the blocks are stored")
            engine.close()
            yield service

    def test_it_frees_the_storage_and_says_how_much(self, service: LocalService, tmp_path: Path) -> None:
        planned = service.ask("reset", tier="storage", dry_run=True)
        assert [each["blocks"] for each in planned["storage"]] == [BLOCKS]
        assert service.ask("storage")["blocks"] == BLOCKS
        done = service.ask("reset", tier="storage")
        assert done["storage"] == planned["storage"]
        assert done["host"] == done["device"] == []
        assert service.ask("storage")["blocks"] == 0
        assert service.ask("stats")["tiers"]["host"]["ready"] == BLOCKS
        until(lambda: service.ask("storage")["layouts"][0]["erasures_queued"] == 0, "the file is empty")
        assert [len(file.slots) for file in contents_of(tmp_path / "storage")] == [0]

    def test_only_what_nobody_used_for_so_long(self, service: LocalService, tmp_path: Path) -> None:
        assert service.ask("reset", tier="storage", older_than=3600)["storage"][0]["blocks"] == 0
        engine = Engine(service.address)
        older = time.monotonic()
        time.sleep(1)  # the service may take so long to hear of the reset
        engine.serve([token + 1000 for token in PROMPT])
        until(lambda: service.ask("storage")["blocks"] == 2 * BLOCKS, "more blocks are stored")
        done = service.ask("reset", tier="storage", older_than=time.monotonic() - older)
        assert done["storage"][0]["blocks"] == BLOCKS
        assert service.ask("storage")["blocks"] == BLOCKS
        until(lambda: service.ask("storage")["layouts"][0]["erasures_queued"] == 0, "the file has followed")
        assert [len(file.slots) for file in contents_of(tmp_path / "storage")] == [BLOCKS]
        assert service.ask("integrity") == []
        engine.close()

    def test_a_layout_without_clients_and_another_name(self, service: LocalService) -> None:
        name = service.ask("storage")["layouts"][0]["namespace"]
        assert service.ask("reset", tier="all", namespace=name)["storage"][0]["blocks"] == BLOCKS
        with pytest.raises(RefusedError, match="no name begins with"):
            service.ask("reset", tier="storage", namespace="0" * 16 if name[0] != "0" else "f" * 16)


class TestLookingIn:
    def test_where_a_block_is(self, tmp_path: Path) -> None:
        with local_service(tmp_path, **storage_settings(tmp_path / "storage")) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: service.ask("storage")["blocks"] == BLOCKS, "the blocks are stored")
            service.ask("reset", tier="host")
            answer = Control(service.client).explain(Prefix([*PROMPT, *range(900, 904)]))
            assert [block.tier for block in answer.blocks] == ["storage"] * BLOCKS + [None]
            assert answer.broken_at == BLOCKS
            with TestClient(make_app(service.address, ())) as web:
                assert web.get("/v1/stats").json()["storage"]["blocks"] == BLOCKS
                assert web.get("/v1/namespaces").json()[0]["storage"]["blocks"] == BLOCKS
                lines = web.get("/metrics").text.splitlines()
            name = service.ask("namespaces")[0]["namespace"]
            record = engine.layout.record_bytes
            assert f'fdcache_storage_blocks{{namespace="{name}"}} {BLOCKS:.1f}' in lines
            assert f'fdcache_storage_state{{namespace="{name}",state="ready"}} 1.0' in lines
            written = next(line for line in lines if line.startswith("fdcache_storage_written_bytes_total"))
            assert float(written.split()[-1]) >= BLOCKS * record
            engine.close()
