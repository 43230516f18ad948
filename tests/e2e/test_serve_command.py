"""``fdcache serve``, and the commands that ask a service: inspect, reset, env diff; the demonstration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fdcache.service.server.arenas import find_arenas
from tests.service_engine import BLOCK, PROMPT, Engine
from tests.service_help import (
    LocalService,
    ServiceProcess,
    local_service,
    next_line,
    run,
    service_process,
    spawned,
    until,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("run") / "s") as running:
        engine = Engine(running.address)
        engine.serve(PROMPT)
        until(lambda: running.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
        yield running
        engine.close()


def inspect(service: ServiceProcess | LocalService, *arguments: str) -> str:
    done = run("inspect", *arguments, "--server", service.address)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestServe:
    @pytest.mark.parametrize("discards", [False, True])
    def test_it_serves_and_leaves_its_memory_unless_asked_to_discard_it(
        self, tmp_path: Path, discards: bool
    ) -> None:
        runtime = tmp_path / "run"
        environment = {
            **os.environ,
            "FDCACHE_RUNTIME_DIR": str(runtime),
            "FDCACHE_ARENA_DIR": str(tmp_path),
            "FDCACHE_HTTP_ADDRESS": "127.0.0.1:0",
            "FDCACHE_HOST_MEMORY": "4MiB",
        }
        words = ("serve", "--discard") if discards else ("serve",)
        with spawned(sys.executable, "-m", "fdcache_cli.main", *words, env=environment) as process:
            screen = []
            while not (line := next_line(process)).startswith("ready"):
                screen.append(line)
            assert str(runtime) in screen[0]
            assert runtime.stat().st_mode & 0o777 == 0o700
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert list(runtime.iterdir()) == []
        left = [(each.nbytes >= 4 << 20, each.alive) for each in find_arenas(tmp_path)]
        assert left == ([] if discards else [(True, False)])
        assert ([path.name for path in tmp_path.iterdir()] == ["run"]) == discards

    def test_check_starts_nothing(self, tmp_path: Path) -> None:
        done = run("serve", "--check", FDCACHE_RUNTIME_DIR=str(tmp_path / "run"))
        assert done.returncode == 0
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--socket", "tcp://0.0.0.0:1"], "own node only"),
            (["--socket", "relative.sock"], "absolute"),
            (["--http", "0.0.0.0:9999"], "FD_API_KEY"),
            (["--http", "nonsense"], "HOST:PORT"),
            (["--host-memory", "a lot"], "size"),
        ],
    )
    def test_an_invalid_option_names_the_remedy(self, arguments: list[str], said: str) -> None:
        done = run("serve", "--check", *arguments)
        assert done.returncode == 78
        assert said in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "status", "said"),
        [
            (["--storage", "nosuch"], 78, "no such connector"),
            (["--storage", "attnstore"], 78, "vendor's connector"),
            (["--storage", "mooncake"], 78, "MOONCAKE_MASTER_SERVER_ADDR"),
            (["--storage", "none", "--storage-size", "1GiB"], 2, "--storage-size"),
            (["--storage-size", "1GiB"], 2, "give --storage DIR"),
            (["--storage", "./x", "--storage-size", "plenty"], 78, "size"),
        ],
    )
    def test_an_invalid_storage_is_refused(self, arguments: list[str], status: int, said: str) -> None:
        done = run("serve", "--check", *arguments)
        assert done.returncode == status, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_storage_directory_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        done = run(
            *("serve", "--storage", f"{tmp_path}/file/storage", "--http", "off"),
            *("--host-memory", "4MiB", "--socket", f"ipc://{tmp_path}/run/s.sock"),
            FDCACHE_ARENA_DIR=str(tmp_path),
        )
        assert done.returncode == 78
        assert "FDCACHE_STORAGE_DIR" in done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.glob("fdcache-*")) == []

    def test_storage_takes_a_directory(self, tmp_path: Path) -> None:
        done = run("serve", "--check", "--storage", f"{tmp_path}/storage", "--storage-size", "1GiB")
        assert done.returncode == 0
        assert not (tmp_path / "storage").exists()

    def test_more_memory_than_available_is_refused(self, tmp_path: Path) -> None:
        done = run(
            "serve",
            "--host-memory",
            "1000TiB",
            FDCACHE_RUNTIME_DIR=str(tmp_path),
            FDCACHE_ARENA_DIR=str(tmp_path),
        )
        assert done.returncode != 0
        assert "Traceback" not in done.stderr

    def test_a_second_service_is_refused_with_the_pid_of_the_first(self, service: ServiceProcess) -> None:
        assert service.process is not None
        done = run("serve", "--socket", service.address, "--http", "off")
        assert done.returncode == 1
        assert str(service.process.pid) in done.stderr


class TestInspect:
    @pytest.mark.parametrize("what", ["tiers", "clients", "transfers", "namespaces", "tree"])
    def test_tables_and_json(self, service: ServiceProcess, what: str) -> None:
        assert inspect(service, what).strip()
        assert json.loads(inspect(service, what, "--json"))

    def test_without_a_command_it_shows_tiers_clients_and_transfers(self, service: ServiceProcess) -> None:
        shown = inspect(service)
        assert [line for line in shown.splitlines() if line in {"tiers", "clients", "transfers"}] == [
            "tiers",
            "clients",
            "transfers",
        ]
        answers = json.loads(inspect(service, "--json"))
        assert answers["tiers"]["host"]["ready"] == 10
        assert answers["clients"][0]["name"] in shown
        done = run("inspect", "--json", "tiers", "--server", service.address)
        assert done.returncode == 2
        assert "after it" in done.stderr

    def test_block_finds_by_the_beginning_of_the_hash(self, service: ServiceProcess) -> None:
        (first, *_) = json.loads(inspect(service, "tree", "--json"))
        (found,) = json.loads(inspect(service, "block", first["hash"][:12], "--json"))
        assert found["hash"] == first["hash"]

    def test_explain_names_the_block_that_breaks_the_run(
        self, service: ServiceProcess, tmp_path: Path
    ) -> None:
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps([*PROMPT[: 6 * BLOCK], *range(900, 900 + 2 * BLOCK)]))
        answer = json.loads(inspect(service, "explain", "--tokens", str(tokens), "--json"))
        assert answer["broken_at"] == 6
        assert [block["tier"] for block in answer["blocks"]] == ["host"] * 6 + [None] * 2
        assert all(0 < block["stored_at"] <= time.time() for block in answer["blocks"][:6])
        shown = inspect(service, "explain", "--tokens", str(tokens))
        assert "before block 6" in shown
        assert re.search(r"\bhost +[\d.]+\w ago", shown), shown

    def test_without_a_service_the_remedy_is_named(self, tmp_path: Path) -> None:
        done = run("inspect", "tiers", "--server", f"ipc://{tmp_path}/none.sock")
        assert done.returncode == 1
        assert "fdcache serve" in done.stderr


class TestStorage:
    def test_storage_is_shown_and_reset(self, tmp_path: Path) -> None:
        settings = {
            "FDCACHE_STORAGE": "local",
            "FDCACHE_STORAGE_DIR": str(tmp_path / "storage"),
            "FDCACHE_STORAGE_SIZE": "4MiB",
        }
        (tmp_path / "s").mkdir()
        with local_service(tmp_path / "s", **settings) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: service.ask("storage")["blocks"] == 10, "the blocks are stored")
            assert "storage" in inspect(service, "tiers")
            assert json.loads(inspect(service, "tiers", "--json"))["storage"]["blocks"] == 10
            assert "local: ready, 10 blocks" in inspect(service, "storage")
            assert json.loads(inspect(service, "storage", "--json"))["layouts"][0]["blocks"] == 10
            offline = run("inspect", "storage", str(tmp_path / "storage"), "--verify", "--json")
            assert json.loads(offline.stdout)["blocks"] == 10
            done = run("reset", "--server", service.address, "--tier", "storage", "--yes")
            assert done.returncode == 0
            assert "forgot 10 blocks" in done.stdout
            assert "local: ready, 0 blocks" in inspect(service, "storage")
            engine.close()

    def test_without_storage_the_remedy_is_named(self, service: ServiceProcess) -> None:
        assert "--storage" in inspect(service, "storage")
        done = run("reset", "--server", service.address, "--tier", "storage", "--yes")
        assert done.returncode == 1
        assert "--storage" in done.stderr


class TestReset:
    def test_it_requires_a_yes(self, service: ServiceProcess) -> None:
        done = run("reset", "--server", service.address, "--tier", "host")
        assert done.returncode == 2
        assert "--yes" in done.stderr

    def test_an_unknown_tenant_is_an_error(self, service: ServiceProcess) -> None:
        before = service.ask("namespaces")[0]["tier"]["ready"]
        done = run("reset", "--server", service.address, "--tier", "host", "--tenant", "nosuch", "--yes")
        assert done.returncode == 1
        assert "tenant: no namespace knows 'nosuch'; `fdcache inspect tenants` lists" in done.stderr
        assert service.ask("namespaces")[0]["tier"]["ready"] == before

    def test_it_prints_what_was_dropped(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: service.ask("namespaces")[0]["tier"]["ready"] == 10, "the blocks are stored")
            dry = run("reset", "--server", service.address, "--tier", "host", "--dry-run")
            assert "would forget 10 blocks" in dry.stdout
            done = run("reset", "--server", service.address, "--tier", "host", "--yes")
            assert done.returncode == 0
            assert "forgot 10 blocks" in done.stdout
            late = run("reset", "--server", service.address, "--tier", "device", "--yes", "--wait", "100ms")
            assert late.returncode == 1
            assert "not reset yet" in late.stdout
            engine.close()


def test_explain_names_evictions(tmp_path: Path) -> None:
    small = {"FDCACHE_HOST_MEMORY": "128KiB"}
    with local_service(tmp_path, **small) as service:
        engine = Engine(service.address, device_blocks=64)
        starts = iter(range(1000, 10**6, 1000))
        engine.serve(PROMPT)
        until(lambda: service.ask("namespaces")[0]["totals"]["stored"] > 0, "blocks of the prompt are stored")

        def has_evicted() -> bool:
            start = next(starts)
            engine.serve(list(range(start, start + 41)))
            return bool(service.ask("namespaces")[0]["totals"]["evicted"] > 40)

        until(has_evicted, "the blocks are evicted")
        tokens = tmp_path / "tokens"
        tokens.write_text(" ".join(map(str, PROMPT)))
        assert "evicted" in inspect(service, "explain", "--tokens", str(tokens))
        engine.close()


def test_env_diff_compares_this_shell_with_the_service(service: ServiceProcess) -> None:
    done = run("env", "diff", "--server", service.address, FDCACHE_DEVICE_BLOCKS="77")
    assert done.returncode == 1
    assert "FDCACHE_DEVICE_BLOCKS" in done.stdout


@pytest.mark.slow
def test_the_demonstration_ends_clean() -> None:
    done = subprocess.run(
        [sys.executable, "examples/node.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left behind: nothing" in done.stdout
    assert "corrupt blocks" in done.stdout
