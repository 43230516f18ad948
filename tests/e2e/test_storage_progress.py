"""Progress of commands that open storage: bars on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from fdcache.errors import ServiceUnavailableError
from fdcache.layout import KVLayout
from fdcache.replay.config import Shape
from fdcache.service.client.connection import Client
from tests.commands import Done, run_command
from tests.service_help import until
from tests.storage_help import Records, open_store, path_hashes

MANY = 330 << 20
"""Bytes of a file of more than 65,536 slots: its headers are read in several steps."""

TINY = Shape(layers=1, kv_heads=1, head_dim=8)


class Terminal:
    """Command whose standard error is a terminal; ``shown`` is everything written there."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        ours, theirs = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fdcache_cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "200", **environment},
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, ours: int) -> None:
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            self.shown += part.decode()
        os.close(ours)

    def end(self) -> str:
        """Wait for its end and return its standard output."""
        output, _ = self.process.communicate(timeout=240)
        self._reader.join()
        return output


def quietly(*arguments: str) -> Done:
    return run_command(arguments, dict(os.environ))


def tiny(ranks: int = 1) -> KVLayout:
    return TINY.build(4, ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a file of many slots, 600 of which hold a block."""
    layout = tiny()
    directory = tmp_path_factory.mktemp("many") / "storage"
    store = open_store(directory, layout, size=MANY)
    assert store.num_slots > 65536
    records = Records(layout, 600)
    assert store.put(records.full_batch(path_hashes(600), slots=range(600)), 60).ok.all()
    store.close()
    return directory


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("inspect", "storage", "--verify"), ("scanning fdcache-", "checking fdcache-")),
        (("inspect", "storage"), ("scanning fdcache-",)),
        (("reset", "storage", "--corrupt", "--dry-run"), ("scanning fdcache-", "checking fdcache-")),
    ],
)
def test_commands_that_read_files(folder: Path, command: Sequence[str], expected: Sequence[str]) -> None:
    arguments = (*command, "--json", str(folder))
    terminal = Terminal(*arguments)
    output = terminal.end()
    assert terminal.process.returncode == 0, output
    assert all(words in terminal.shown for words in expected)
    done = quietly(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["blocks"] == json.loads(output)["blocks"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_replay(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        open_store(tmp_path, tiny(ranks), rank=rank, size=MANY).close()
    arguments = (
        *("replay", "--json", "--requests", "3", "--layers", "1", "--kv-heads", "1", "--head-dim", "8"),
        *(
            "--block-size",
            "4",
            "--device-blocks",
            "3000",
            "--host-memory",
            f"{128 * ranks}MiB",
            "--ranks",
            str(ranks),
        ),
        *("--storage", str(tmp_path), "--storage-size", str(MANY)),
    )
    terminal = Terminal(*arguments)
    report = json.loads(terminal.end())
    assert report["corrupt_blocks"] == 0
    for rank in range(ranks):
        assert f"scanning the storage of rank {rank}" in terminal.shown
        assert f"allocating the host memory of rank {rank}" in terminal.shown
    assert "hit rate" in terminal.shown
    assert quietly(*arguments).stderr == ""


def answers(address: str) -> bool:
    with Client(address, timeout=1.0) as client, contextlib.suppress(ServiceUnavailableError):
        return bool(client.ask("stats"))
    return False


def test_a_service(tmp_path: Path) -> None:
    open_store(tmp_path / "storage", tiny(), size=MANY).close()
    arena = tmp_path / "arena"
    arena.mkdir()
    terminal = Terminal(
        *("serve", "--socket", f"ipc://{tmp_path}/s/x.sock", "--http", "off", "--host-memory", "4MiB"),
        *("--arena-dir", str(arena), "--storage", str(tmp_path / "storage"), "--storage-size", str(MANY)),
    )
    until(lambda: "loading the storage index" in terminal.shown, "the scan is shown")
    until(lambda: answers(f"ipc://{tmp_path}/s/x.sock"), "it serves")
    terminal.process.send_signal(signal.SIGTERM)
    output = terminal.end()
    assert terminal.process.returncode == 0
    assert "storage" in output
    assert "loading the storage index" not in output
