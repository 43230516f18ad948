"""``fdcache inspect``: tree, transfers, pictures, and watching a service on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fdcache.hashing import TokenBlocks, root_hash
from fdcache.tiers.pool import TreeNode
from fdcache_cli.inspect_blocks import draw_tree
from tests.service_engine import BLOCK, PROMPT, Engine, ready_blocks
from tests.service_help import TIMEOUT, LocalService, local_service, next_line, run, spawned, until

_PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    """A service with a hot trunk of 5 blocks, and two branches of 5 and 3 blocks."""
    with local_service(tmp_path_factory.mktemp("service")) as running:
        engine = Engine(running.address)
        engine.serve(PROMPT)
        branch = [*PROMPT[: 5 * BLOCK], *range(900, 900 + 3 * BLOCK + 1)]
        engine.serve(branch)
        until(lambda: ready_blocks(running) == 13, "the blocks are stored")
        for _ in range(3):
            engine.manager._device.reset()
            engine.serve(PROMPT[: 5 * BLOCK + 1])
        payload = engine.layout.payload_bytes

        def told() -> bool:
            copied = running.ask("transfers")[0]["copied"]
            return bool(copied.get("host_to_device", {}).get("bytes") == 15 * payload)

        until(told, "it has told what it copied")
        yield running
        engine.close()


def hashes(engine_layout: bytes, tokens: list[int]) -> list[str]:
    blocks = TokenBlocks(BLOCK, root_hash(engine_layout, None))
    blocks.append(tokens)
    return [row.tobytes().hex() for row in blocks.hashes]


def test_the_tree_draws_the_hottest_prefixes_with_their_branches(service: LocalService) -> None:
    (namespace,) = service.service.namespaces
    trunk = hashes(namespace, PROMPT)
    first, *rest = draw_tree(msgspec.convert(service.ask("tree", limit=1000), list[TreeNode]))
    assert re.match(rf"{trunk[0][:12]}  5 blocks, \d+ hits", first)
    assert len(rest) == 2
    assert {re.sub(r"\d+ hits.*", "", line)[14:] for line in rest} == {"  5 blocks, ", "  3 blocks, "}
    assert rest[0].startswith("  ") and trunk[5][:12] in "".join(rest)
    shown = run("inspect", "tree", "--limit", "2", "--server", service.address)
    assert shown.stdout.startswith(trunk[0][:12])
    assert len(shown.stdout.splitlines()) == 1


def test_transfers_show_bytes_and_speed_by_direction(service: LocalService) -> None:
    (told,) = service.ask("transfers")
    payload = next(iter(service.service.namespaces.values())).layout.payload_bytes
    assert told["copied"]["device_to_host"]["bytes"] == 13 * payload
    assert told["copied"]["host_to_device"]["bytes"] == 15 * payload
    shown = run("inspect", "transfers", "--server", service.address)
    assert "to device" in shown.stdout and "GB/s" in shown.stdout


@pytest.mark.parametrize("what", ["tiers", "tree", "transfers", "clients", "namespaces", "tenants"])
def test_plot_writes_a_picture(service: LocalService, tmp_path: Path, what: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    done = run("inspect", what, "--server", service.address, "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    data = picture.read_bytes()
    assert data.startswith(_PNG)
    assert len(data) > 5000


def test_plot_without_matplotlib_names_the_extra(service: LocalService, tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['matplotlib'] = None; from fdcache_cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", blocked, "inspect", "tiers", "--plot", str(tmp_path / "x.png")],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 78
    assert "fdcache[plot]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--plot", "x.text"], 78, "must end in one of"),
        (["--plot", "no/such/x.png"], 78, "does not exist"),
        (["--plot", "x.png", "--json"], 2, "leave --json"),
    ],
)
def test_an_invalid_plot_option_is_refused(
    tmp_path: Path, options: list[str], status: int, said: str
) -> None:
    pytest.importorskip("matplotlib")
    done = run("inspect", "tiers", "--server", f"ipc://{tmp_path}/none.sock", *options)
    assert done.returncode == status
    assert said in done.stderr


def read_until(fd: int, *texts: str) -> str:
    shown, deadline = "", time.monotonic() + TIMEOUT
    while not all(text in shown for text in texts):
        assert select.select([fd], [], [], deadline - time.monotonic())[0], shown
        shown += os.read(fd, 65536).decode()
    return shown


def test_watch_refreshes_the_terminal_until_ctrl_c(tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "fdcache_cli.main", "inspect", "namespaces", "--watch"),
                *("--server", service.address),
            ],
            stdout=theirs,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": "200", "TERM": "xterm"},
        )
        os.close(theirs)
        read_until(ours, "\x1b[2J\x1b[H", "namespace")
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        name = service.ask("namespaces")[0]["namespace"]
        engine.close()
        read_until(ours, name)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
        os.close(ours)


def test_watch_waits_for_a_service_that_is_away(tmp_path: Path) -> None:
    service = LocalService(tmp_path)
    command = ("inspect", "tiers", "--watch", "--json", "--server", service.address)
    with spawned(sys.executable, "-m", "fdcache_cli.main", *command) as process:
        assert next_line(process) == "{\n"
        service.crash()
        while not next_line(process).startswith("waiting: "):
            pass
        with local_service(tmp_path):
            while next_line(process) != "{\n":
                pass
            rest = "{\n"
            while not rest.endswith("\n}\n"):
                rest += next_line(process)
            assert json.loads(rest)["host"]["bytes"] == 16 << 20
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 0
