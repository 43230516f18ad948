"""Messages, files and faults of one client: they are refused by themselves, and the service goes on."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import LoadStatus
from fdcache.service.server import requests
from fdcache.service.server import service as server_service
from fdcache.service.wire.liveness import Live, LiveFile
from fdcache.service.wire.protocol import Attach, Heartbeat, Match, Refill, Register
from tests.mounts import file_system
from tests.service_engine import BLOCK, PROMPT, Engine, layout, ready_blocks
from tests.service_help import local_service, until
from tests.service_line import Line, code, ints, numbers, register, runs_of

LAYOUT = layout().to_json().encode()


def changed(live: Live, **fields: Any) -> Live:
    return msgspec.structs.replace(live, **fields)


def layout_with(**fields: Any) -> bytes:
    return json.dumps(json.loads(LAYOUT) | fields).encode()


def assert_serves(line: Line) -> None:
    """Another client registers, stores and finds blocks."""
    service, _ = line
    assert service.ask("integrity") == []
    engine = Engine(service.address)
    engine.serve(PROMPT)
    until(lambda: ready_blocks(service) == 10, "the blocks are stored")
    engine.close()
    until(
        lambda: not any(each["name"].startswith("test") for each in service.ask("clients")), "they are gone"
    )


class TestRegistration:
    @pytest.mark.parametrize(
        "change",
        [
            lambda live: {"path": f"{Path(live.path).parent}/{'x' * 300}"},
            lambda live: {"path": f"{Path(live.path).parent}/{'x' * 5000}"},
            lambda live: {"path": f"{Path(live.path).parent}/.."},
            lambda live: {"path": f"{Path(live.path).parent}"},
            lambda live: {"path": f"{live.path}/../{Path(live.path).name}"},
            lambda live: {"path": f"{Path(live.path).parent}/fdcache.sock"},
            lambda live: {"path": f"{Path(live.path).parent}/fdcache-live-0000000000000000"},
            lambda live: {"path": f"{live.path}\0"},
            lambda live: {"path": ""},
            lambda live: {"engine": "y" * 5000},
            lambda live: {"pid": 2**40},
            lambda live: {"pid": 2**63},
            lambda live: {"pid": 0},
            lambda live: {"pid": -1},
            lambda live: {"pid_namespace": -1},
            lambda live: {"start_time": 2**63 - 1},
        ],
    )
    def test_an_impossible_process_is_refused(self, line: Line, change: Any) -> None:
        service, connection = line
        live = LiveFile(service.directory)
        bad = changed(live.live, **change(live.live))
        assert code(connection, Register(LAYOUT, bad, "test")) == "malformed"
        assert code(connection, Attach(0, bad)) == "malformed"
        live.close()
        assert service.ask("clients") == []

    def test_a_folder_a_link_and_a_pipe_are_no_live_files(self, line: Line) -> None:
        service, connection = line
        live = LiveFile(service.directory)
        names = [service.directory / f"fdcache-live-000000000000000{i}" for i in range(3)]
        names[0].mkdir()
        names[1].symlink_to(live.live.path)
        os.mkfifo(names[2])
        for name in names:
            assert (
                code(connection, Register(LAYOUT, changed(live.live, path=str(name)), "test")) == "malformed"
            )
        names[0].rmdir()
        for name in names[1:]:
            name.unlink()
        live.close()

    @pytest.mark.parametrize(
        "text",
        [
            b"[" * 200_000,
            b'{"planes": ' + b"[" * 200_000,
            b'{"a":' * 100_000,
            b"",
            b"\xff\xfe",
            b"1e999",
            b"9" * 5000,
            layout_with(tp_size=0),
            layout_with(tp_size=2**70),
            layout_with(block_size=2**64),
            layout_with(num_layers=10**9),
            layout_with(record_bytes=2**62),
            layout_with(model="m" * (2 << 20)),
            layout_with(model="\ud800"),
            layout_with(group=10**9),
            layout_with(planes=[{}]),
            layout_with(planes=None),
        ],
        ids=lambda text: repr(text[:24]),
    )
    def test_an_impossible_layout_is_refused(self, line: Line, text: bytes) -> None:
        service, connection = line
        live = LiveFile(service.directory)
        assert code(connection, Register(text, live.live, "test")) not in {"done", "internal", "silence"}
        live.close()
        assert service.ask("clients") == []

    def test_more_ranks_than_extents_are_refused_before_they_cost_memory(self, line: Line) -> None:
        service, connection = line
        live, process = LiveFile(service.directory), psutil.Process()
        gc.collect()
        before, began = process.memory_info().rss, process.cpu_times().user
        for ranks in (17, 10**5, 10**8, 2**62):
            assert code(connection, Register(layout_with(tp_size=ranks), live.live, "test")) == "no_memory"
        assert process.memory_info().rss - before < 32 << 20
        assert process.cpu_times().user - began < 5
        assert service.service.namespaces == {}
        live.close()

    def test_a_client_has_a_limit_of_workers(self, line: Line) -> None:
        service, connection = line
        live = register(connection, service.directory)
        workers = [LiveFile(service.directory, live.live.path) for _ in range(20)]
        answers = [code(connection, Attach(0, worker.live)) for worker in workers]
        assert answers == ["done"] * 8 + ["too_many"] * 12
        for worker in workers:
            worker.close()
        connection.session = 0
        live.close()
        until(lambda: not service.ask("clients"), "it is gone")


class TestTruncatedFiles:
    """A client shares its memory with the service by files that it can truncate at any time."""

    def test_a_ring_costs_its_client_the_runs_and_nobody_else_anything(self, line: Line) -> None:
        service, connection = line
        live = register(connection, service.directory)
        path = service.service.clients[connection.session].ring_path
        for size in (4096, 100, 0):
            os.truncate(path, size)
            assert code(connection, Heartbeat(b"{}")) == "done"
            hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(layout().fingerprint))
            code(connection, Match(numbers(size + 1), ints(10), ints(0), hashes.tobytes()))
            assert service.ask("integrity") == []
        (client,) = service.service.clients.values()
        assert "truncated" in client.ring_error
        connection.session = 0
        live.close()
        assert_serves(line)

    @pytest.mark.parametrize("what", ["table", "extent"])
    def test_a_table_or_an_extent_is_made_anew(
        self, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            (namespace,) = service.service.namespaces.values()
            geometry = namespace.geometry
            path = Path(geometry.table_path if what == "table" else geometry.path(0, 0))
            size = path.stat().st_size
            engine.close()  # it maps them, and an engine has no handler of its own
            until(lambda: not service.ask("clients"), "it is gone")
            os.truncate(path, 0)
            service.ask("integrity")  # reads all of both
            again = Engine(service.address)
            assert service.ask("integrity") == []
            assert path.stat().st_size == size
            found, outcomes = again.serve(PROMPT)
            assert found == 10
            wanted = LoadStatus.CONFIRMED if what == "table" else LoadStatus.FAILED
            assert [each.status for each in outcomes] == [wanted]
            assert "vanished" in caplog.text
            other = list(range(100, 141))
            again.serve(other)
            until(lambda: ready_blocks(service) >= 10, "it stores again")
            again.close()


class TestFaults:
    def test_a_fault_in_one_message_is_answered_and_logged_once(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        service, connection = line
        live = register(connection, service.directory)

        def fault(*_: object) -> None:
            raise KeyError("planted")

        with monkeypatch.context() as planted:
            planted.setattr(requests, "match", fault)
            body = Match(numbers(1), ints(1), ints(0), b"x" * 32)
            assert [code(connection, body) for _ in range(3)] == ["internal"] * 3
        assert code(connection, Refill(1)) == "done"
        assert [record.exc_info is not None for record in caplog.records if "match" in record.message] == [
            True
        ]
        connection.session = 0
        live.close()
        assert_serves(line)

    def test_a_fault_in_one_clients_ring_costs_that_client_its_ring(
        self, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service, connection = line
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        engine.close()
        live = register(connection, service.directory)
        client = service.service.clients[connection.session]
        hashes = hash_blocks(PROMPT, BLOCK, parent=root_hash(layout().fingerprint))
        runs = runs_of(line)

        def fault(*_: object) -> None:
            raise KeyError("planted")

        monkeypatch.setattr(type(client), "pin", fault)
        assert runs.pin(hashes, runs.find(hashes, 0))
        until(lambda: client.ring_error, "the fault is noticed")
        monkeypatch.undo()
        assert code(connection, Refill(1)) == "done"
        connection.session = 0
        live.close()
        assert_serves(line)

    def test_a_fault_in_looking_after_one_client_costs_no_other(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        service, connection = line
        live = register(connection, service.directory)
        client = service.service.clients[connection.session]
        is_gone = type(client).is_gone

        def fault(each: Any) -> bool:
            if each is client:
                raise OSError("planted")
            return bool(is_gone(each))

        monkeypatch.setattr(type(client), "is_gone", fault)
        until(lambda: "cannot be looked after" in caplog.text, "the fault is noticed")
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        engine.close()
        until(lambda: len(service.ask("clients")) == 1, "another client's end is noticed")
        monkeypatch.undo()
        assert caplog.text.count("cannot be looked after") == 1
        connection.session = 0
        live.close()
        assert_serves(line)


# --- files that vanish --------------------------------------------------------------------------------------


def remove_arena_files(folder: Path) -> None:
    for path in folder.glob("fdcache-*"):
        if not path.name.startswith(("fdcache-live", "fdcache.sock")):
            path.unlink()


class TestVanishedFiles:
    @pytest.mark.parametrize("waits", [False, True])
    def test_an_arena_without_files_is_made_anew_and_keeps_its_blocks(
        self, tmp_path: Path, waits: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with local_service(tmp_path, FDCACHE_DISCARD="0") as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            remove_arena_files(tmp_path)
            if waits:
                until(lambda: "the table vanished" in caplog.text, "the service has looked")
            other = Engine(service.address)
            found, outcomes = other.serve(PROMPT)
            assert found == 10
            assert [each.status for each in outcomes] == [LoadStatus.CONFIRMED]
            assert service.ask("stats")["state"] == "ready"
            assert service.ask("integrity") == []
            assert "vanished" in caplog.text
            prompt = list(range(100, 141))
            other.serve(prompt)
            until(lambda: ready_blocks(service) == 20, "new blocks are stored")

            def finds_again() -> bool:
                engine.manager._device.reset()
                return engine.serve(PROMPT)[0] == 10

            until(finds_again, "the former engine finds its blocks again")
            engine.close()
            other.close()
        with local_service(tmp_path) as service:
            assert service.server.recovered == 20

    def test_a_first_registration_after_the_files_have_gone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with local_service(tmp_path) as service:
            remove_arena_files(tmp_path)
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            engine.close()
            assert "16 free extents vanished" in caplog.text

    def test_an_arena_directory_that_is_gone_is_made_again(self, tmp_path: Path) -> None:
        arena = tmp_path / "arena"
        arena.mkdir()
        (tmp_path / "s").mkdir()
        with local_service(tmp_path / "s", FDCACHE_ARENA_DIR=str(arena)) as service:
            remove_arena_files(arena)
            arena.rmdir()
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            engine.close()


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    yield from file_system(tmp_path / "tmpfs", "48m")


def test_without_room_for_new_files_the_service_goes_on_with_what_it_has(
    tmp_path: Path,
    small_file_system: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "s").mkdir()
    monkeypatch.setattr(server_service, "_LOOK_SECONDS", 0.5)
    with local_service(tmp_path / "s", FDCACHE_ARENA_DIR=str(small_file_system)) as service:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        remove_arena_files(small_file_system)
        with (small_file_system / "stuffing").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        until(lambda: "the arena has lost files" in caplog.text, "the service has looked")
        assert service.ask("stats")["state"] == "ready"
        (small_file_system / "stuffing").unlink()
        until(lambda: "the table vanished" in caplog.text, "the files are made anew")
        other = Engine(service.address)
        assert other.serve(PROMPT)[0] == 10
        other.close()
        engine.close()
