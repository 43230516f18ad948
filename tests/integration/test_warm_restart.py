"""The next service finds the blocks of the one before, however that one ended."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fdcache.errors import HostMemoryError
from fdcache.hashing import hash_blocks, root_hash
from fdcache.layout import KVLayout
from fdcache.manager import LoadStatus
from fdcache.metadata import Int32Array
from fdcache.service.client.connection import Connection
from fdcache.service.server.arena import Arena, arena_name
from fdcache.service.server.arenas import find_arenas
from fdcache.service.server.lifecycle import Server
from fdcache.service.server.namespace_memory import NamespaceMemory
from fdcache.service.wire.liveness import LiveFile
from fdcache.service.wire.protocol import Granted, Refill, Register, Registered
from fdcache.settings import Settings
from tests.mounts import file_system
from tests.service_engine import BLOCK, PROMPT, Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, LocalService, ServiceProcess, arguments, local_service, run, until
from tests.warm_restart import BLOCKS, CASES, HEAD, QUARTER, Case, measure, row

GUIDE = Path(__file__).parents[2] / "docs" / "serve.md"


def words(case: Case) -> str:
    return f"{case.end} {case.start}".strip()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=words)
def test_the_blocks_of_the_service_before_are_found(tmp_path: Path, case: Case) -> None:
    found = measure(case, tmp_path / "s")
    if case.size != QUARTER:
        assert sum(found) == BLOCKS
    assert row(case, found) in GUIDE.read_text()


def test_the_guide_has_the_whole_table() -> None:
    _, _, table = GUIDE.read_text().partition(HEAD)
    assert len(table.strip().split("\n\n")[0].splitlines()) == len(CASES)


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in folder.glob("fdcache-*"):
        status = path.stat()
        found[path.name] = status.st_ino, status.st_mtime_ns, status.st_size
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"FDCACHE_NUMA_NODE": "4095"},
        {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": "{folder}/file/below"},
        {"FDCACHE_STORAGE": "nosuch"},
        {"FDCACHE_HTTP_ADDRESS": "127.0.0.1:{port}"},
        {"FDCACHE_SERVER": "ipc://{folder}/taken.sock"},
    ],
    ids=["numa", "storage folder", "connector", "http", "lock"],
)
def test_a_refused_start_touches_no_file_of_the_arena(tmp_path: Path, settings: dict[str, str]) -> None:
    filled(tmp_path, [layout()], [prompt_of(1, 10)]).stop()
    (tmp_path / "file").touch()
    (tmp_path / "taken.sock.lock").mkdir()
    before = snapshot(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        chosen = {name: text.format(folder=tmp_path, port=port) for name, text in settings.items()}
        values = {name: str(value) for name, value in arguments(tmp_path, **chosen).items()}
        done = run("serve", **values, FDCACHE_RECOVER="0")
    assert done.returncode in (1, 78), done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert snapshot(tmp_path) == before


def test_an_engine_finds_its_blocks_after_a_rolling_restart(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "s", FDCACHE_DISCARD="0") as service:
        service.start()
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        for _ in range(2):
            assert service.terminate() == 0
            service.start()

            def finds_them() -> bool:
                engine.manager._device.reset()
                return engine.serve(PROMPT)[0] == 10

            until(finds_them, "the engine finds them")
            assert service.ask("stats")["state"] == "ready"
        engine.close()


# --- other sizes --------------------------------------------------------------------------------------------


def prompt_of(number: int, blocks: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + BLOCK * blocks + 1))


def filled(
    directory: Path, shapes: list[KVLayout], prompts: list[list[int]], **settings: str
) -> LocalService:
    """A service that keeps its memory, with the blocks of the prompts in the namespace of each layout."""
    service = LocalService(directory, **{"FDCACHE_DISCARD": "0", "FDCACHE_HOST_MEMORY": "2MiB", **settings})
    wanted = sum(len(prompt) // BLOCK for prompt in prompts)
    for number, shape in enumerate(shapes, 1):
        engine = Engine(service.address, shape)
        # A small stock of slots delays some blocks.
        while ready_blocks(service) < number * wanted:
            for prompt in prompts:
                engine.serve(prompt)
                engine.await_stock()
        engine.close()
    until(lambda: not service.ask("clients"), "the engines are gone")
    return service


def found_by(service: LocalService, shape: KVLayout, prompts: list[list[int]]) -> list[int]:
    """Return the blocks found of each prompt. What is found is loaded, and its bytes are compared."""
    engine = Engine(service.address, shape, stocked=False)
    found = []
    for prompt in prompts:
        count, outcomes = engine.serve(prompt)
        assert all(each.status is LoadStatus.CONFIRMED for each in outcomes)
        found.append(count)
    engine.close()
    return found


def test_a_smaller_arena_keeps_the_blocks_used_last(tmp_path: Path) -> None:
    prompts = [prompt_of(i, 20) for i in range(1, 13)]
    service = filled(tmp_path, [layout()], prompts, FDCACHE_EVICTION="lru")
    engine = Engine(service.address)
    for prompt in prompts[:3]:
        assert engine.serve(prompt)[0] == 20
    engine.close()
    until(lambda: not service.ask("clients"), "the engine is gone")
    service.stop()
    small = {"FDCACHE_HOST_MEMORY": "512KiB", "FDCACHE_EVICTION": "lru"}
    with local_service(tmp_path, **small) as service:
        assert service.ask("stats")["tiers"]["host"]["extents"] == 4
        assert ready_blocks(service) == service.server.recovered == 124
        assert service.ask("integrity") == []
        kept = prompts[:3] + prompts[-3:]
        explained = [explain(service, prompt) for prompt in prompts]
        assert [count for count, prompt in zip(explained, prompts, strict=True) if prompt in kept] == [20] * 6
        assert sum(explained) == 124
        assert found_by(service, layout(), prompts[:3]) == [20] * 3


def explain(service: LocalService, prompt: list[int]) -> int:
    hashes = hash_blocks(prompt, BLOCK, parent=root_hash(layout().fingerprint))
    answer = service.ask("explain", hashes=[row.tobytes().hex() for row in hashes])
    return sum(each["tier"] == "host" for each in answer["blocks"])


@pytest.mark.parametrize("size", ["512KiB", "1536KiB", "4MiB"])
def test_namespaces_of_several_ranks_share_what_is_left(tmp_path: Path, size: str) -> None:
    shapes = [layout("a", ranks=2), layout("b")]
    prompts = [prompt_of(i, 20) for i in range(1, 6)]
    filled(tmp_path, shapes, prompts).stop()
    with local_service(tmp_path, FDCACHE_HOST_MEMORY=size) as service:
        found = {each["model"]: each["tier"]["ready"] for each in service.ask("namespaces")}
        if size != "512KiB":
            assert found == {"a": 100, "b": 100}
        else:
            assert sum(found.values()) >= 31
        assert service.ask("integrity") == []
        host = service.ask("stats")["tiers"]["host"]
        assert host["bytes"] == {"512KiB": 512 << 10, "1536KiB": 1536 << 10, "4MiB": 4 << 20}[size]
        files = [path for path in tmp_path.glob("fdcache-*") if re.search(r"-free-\d+$|-r\d-\d+$", path.name)]
        assert len(files) == host["extents"]
        for shape in shapes:
            found_by(service, shape, prompts)


@pytest.mark.parametrize(
    "settings",
    [
        {"FDCACHE_HOST_MEMORY": "16MiB"},
        {"FDCACHE_HUGE_PAGES": "1"},
        {"FDCACHE_EVICTION": "lru"},
        {"FDCACHE_NAMESPACE_QUOTA": "0.1"},
        {"FDCACHE_TENANT_QUOTA": "0.5"},
    ],
    ids=" ".join,
)
def test_other_settings_keep_the_blocks(tmp_path: Path, settings: dict[str, str]) -> None:
    prompts = [prompt_of(i, 20) for i in range(1, 6)]
    filled(tmp_path, [layout()], prompts).stop()
    with local_service(tmp_path, **{"FDCACHE_HOST_MEMORY": "2MiB", **settings}) as service:
        assert ready_blocks(service) == 100
        assert sum(found_by(service, layout(), prompts)) >= 99  # a quota may evict for the stock
        assert service.ask("integrity") == []


def test_blocks_move_into_no_slot_that_a_former_client_may_write(tmp_path: Path) -> None:
    prompts = [prompt_of(i, 20) for i in range(1, 9)]
    service = filled(tmp_path, [layout()], prompts)
    (namespace,) = service.service.namespaces.values()
    granted = LiveFile(tmp_path)
    line = Connection(service.address)
    answer, _ = line.call(Register(layout().to_json().encode(), granted.live, "writes"), TIMEOUT)
    assert isinstance(answer, Registered)
    line.session = answer.session
    stock, _ = line.call(Refill(20), TIMEOUT)
    assert isinstance(stock, Granted)
    slots = np.frombuffer(stock.slots, np.int32)
    assert len(slots) == 20
    before = [extent.data.copy() for extent in namespace.memory.extents(0)]
    per_extent = namespace.geometry.records_per_extent
    service.crash()
    with local_service(tmp_path, FDCACHE_HOST_MEMORY="512KiB") as service:
        assert service.ask("stats")["state"] == "recovering"
        (namespace,) = service.service.namespaces.values()
        for slot in slots[slots < namespace.num_slots].tolist():
            record = namespace.memory.tables[0].record(slot)
            first = slot % per_extent * namespace.geometry.record_bytes
            assert (record == before[slot // per_extent][first : first + len(record)]).all()
        assert ready_blocks(service) > 80
        granted.close()
        until(lambda: service.ask("stats")["state"] == "ready", "the former client is gone")
    line.close()


def half_of_the_moves(
    memory: NamespaceMemory, sources: Int32Array, targets: Int32Array, generation: int
) -> None:
    half = len(sources) // 2
    assert half
    MOVE(memory, sources[:half], targets[:half], generation)
    raise RuntimeError("planted")


def one_of_the_files(arena: Arena, paths: list[str]) -> None:
    TAKE_BACK(arena, paths[:1])
    if paths:
        raise RuntimeError("planted")


MOVE, TAKE_BACK = NamespaceMemory.move, Arena.take_back


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(NamespaceMemory, "move", half_of_the_moves), (Arena, "take_back", one_of_the_files)],
)
def test_a_start_that_ends_while_it_shrinks_loses_nothing_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: object
) -> None:
    shape, prompts = layout(ranks=2), [prompt_of(i, 20) for i in range(1, 8)]
    filled(tmp_path, [shape], prompts, FDCACHE_HOST_MEMORY="4MiB").stop()
    small = {"FDCACHE_HOST_MEMORY": "1280KiB"}
    with monkeypatch.context() as planted:
        planted.setattr(owner, name, broken)
        server = Server(Settings.load(environ={}, arguments=arguments(tmp_path, **small)))
        with pytest.raises(RuntimeError, match="planted"):
            server.start()
    with local_service(tmp_path, **small) as service:
        assert service.ask("stats")["tiers"]["host"]["extents"] == 5
        assert ready_blocks(service) == 2 * 62
        assert service.ask("integrity") == []
        found_by(service, shape, prompts)


def test_an_arena_smaller_than_an_extent_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, [layout()], [prompt_of(1, 10)]).stop()
    with local_service(tmp_path, FDCACHE_HOST_MEMORY="64KiB") as service:
        assert ready_blocks(service) == 0
    assert "less than one of its extents" in caplog.text


# --- a full file system -------------------------------------------------------------------------------------


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    yield from file_system(tmp_path / "tmpfs", "4m")


def fill_up(folder: Path) -> None:
    number = len(list(folder.glob("stuffing-*")))
    with contextlib.suppress(OSError), (folder / f"stuffing-{number}").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_file_system_costs_no_block(tmp_path: Path, small_file_system: Path) -> None:
    prompts = [prompt_of(i, 20) for i in range(1, 6)]
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    there = {"FDCACHE_ARENA_DIR": str(small_file_system), "FDCACHE_HOST_MEMORY": "2MiB"}
    service = filled(runtime, [layout()], prompts, **there)
    fill_up(small_file_system)
    (namespace,) = service.service.namespaces.values()
    while namespace.grow():  # which needs no room, and leaves the layout alone
        pass
    service.stop()
    gc.collect()  # unmaps what has no name any more
    fill_up(small_file_system)
    refused = Server(Settings.load(environ={}, arguments=arguments(runtime, **there)))
    with pytest.raises(HostMemoryError, match="enlarge the directory's file system"):
        refused.start()
    for stuffing in small_file_system.glob("stuffing-*"):
        stuffing.unlink()
    with local_service(runtime, **there) as service:
        assert found_by(service, layout(), prompts) == [20] * 5


# --- removal on request -------------------------------------------------------------------------------------


def test_an_error_keeps_even_what_shall_be_discarded(tmp_path: Path) -> None:
    filled(tmp_path, [layout()], [prompt_of(1, 10)]).stop()
    settings = Settings.load(environ={}, arguments=arguments(tmp_path, FDCACHE_HOST_MEMORY="2MiB"))
    assert settings.server.discard
    with pytest.raises(RuntimeError, match="planted"), Server(settings) as server:
        server.start()
        raise RuntimeError("planted")
    with local_service(tmp_path, FDCACHE_HOST_MEMORY="2MiB") as service:
        assert ready_blocks(service) == 10
    assert find_arenas(tmp_path) == []


def test_commands_name_the_memory_of_a_stopped_service_and_remove_it(tmp_path: Path) -> None:
    service = filled(tmp_path, [layout()], [prompt_of(1, 10)])
    folder = {"FDCACHE_ARENA_DIR": str(tmp_path)}
    assert "no memory of a stopped service" in run("reset", "arena", "--yes", **folder).stdout
    service.stop()
    for command in (("reset", "--yes"), ("inspect",)):
        done = run(*command, "--server", service.address, **folder)
        assert done.returncode == 1
        assert f"its host tier is kept in {tmp_path}, 2 MiB" in done.stderr
        assert "fdcache reset arena removes it" in done.stderr
    assert run("reset", "arena", **folder).returncode == 2  # there is no terminal to ask on
    other = run("reset", "arena", "--server", f"ipc://{tmp_path}/other.sock", "--yes", **folder)
    assert "no memory of a stopped service" in other.stdout
    assert "would remove 2 MiB" in run("reset", "arena", "--dry-run", **folder).stdout
    assert len(find_arenas(tmp_path)) == 1
    done = run("reset", "arena", "--server", service.address, "--yes", "--json", **folder)
    (removed,) = json.loads(done.stdout)["arenas"]
    assert removed["address"] == service.address
    assert list(tmp_path.glob("fdcache-*")) == []


def test_removing_the_memory_of_stopped_services_leaves_other_files_of_the_folder(tmp_path: Path) -> None:
    filled(tmp_path, [layout()], [prompt_of(1, 10)]).stop()
    stopped = f"fdcache-{arena_name(tmp_path / 'fdcache.sock')}"
    storage = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path),
        "FDCACHE_STORAGE_SIZE": "1MiB",
    }
    other = arguments(tmp_path, FDCACHE_SERVER=f"ipc://{tmp_path}/other.sock", **storage)
    with ServiceProcess(tmp_path, **{name: str(value) for name, value in other.items()}) as service:
        service.address = str(other["FDCACHE_SERVER"])
        service.start()
        engine = Engine(service.address)
        engine.serve(prompt_of(1, 10))
        until(lambda: list(tmp_path.glob("fdcache-*.slab")), "the storage is open")
        kept = {path for path in tmp_path.iterdir() if not path.name.startswith(stopped)}
        assert any(path.name.startswith("fdcache-live-") for path in kept)
        done = run("reset", "arena", "--yes", "--json", FDCACHE_ARENA_DIR=str(tmp_path))
        assert len(json.loads(done.stdout)["arenas"]) == 1
        assert kept <= set(tmp_path.iterdir())
        engine.close()
