"""Share of the blocks of a service that the next one finds, for each way in which the first one can end.

    python -m tests.warm_restart

prints the table of docs/serve.md. Every block found is loaded, and its bytes are compared.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import LoadStatus
from fdcache.service.client.connection import Connection
from tests.service_engine import BLOCK, Engine, layout, ready_blocks
from tests.service_help import TIMEOUT, ServiceProcess, arguments, run, until

PROMPTS = [list(range(1000 * i, 1000 * i + 41)) for i in range(1, 61)]
BLOCKS = 600
SIZE, LARGER, SMALLER, QUARTER = "4MiB", "8MiB", "3MiB", "1MiB"

_PLANTED = """
import os, sys
from fdcache.service.server.service import Service
work, fault = Service.work, sys.argv[1]

def planted(self):
    if os.path.exists(fault):
        raise RuntimeError("planted")
    work(self)

Service.work = planted
sys.argv = ["fdcache", "serve"]
from fdcache_cli.main import run
run()
"""


class WarmService(ServiceProcess):
    """A service with 600 blocks, which keeps its memory when it ends."""

    def __init__(self, directory: Path, **settings: str) -> None:
        super().__init__(directory, **{"FDCACHE_HOST_MEMORY": SIZE, "FDCACHE_DISCARD": "0", **settings})
        self.fault = directory.with_name(f"{directory.name}.fault")

    def __enter__(self) -> WarmService:
        return self

    def fill(self) -> None:
        """Store every block of the prompts, in their order."""
        engine = Engine(self.address)

        def stored() -> bool:
            for prompt in PROMPTS:
                engine.serve(prompt)
                engine.await_stock()
            return ready_blocks(self) == BLOCKS

        until(stored, "the blocks are stored")
        engine.close()

    def found(self) -> list[int]:
        """Return how many blocks of each prompt are found, and load all prompts that are there as a whole."""
        root = root_hash(layout().fingerprint)
        counts = []
        for prompt in PROMPTS:
            hashes = [row.tobytes().hex() for row in hash_blocks(prompt, BLOCK, parent=root)]
            explained = self.ask("explain", hashes=hashes)["blocks"]
            counts.append(sum(each["tier"] == "host" for each in explained))
        engine = Engine(self.address, stocked=False)
        for prompt, count in zip(PROMPTS, counts, strict=True):
            if count == len(prompt) // BLOCK:
                found, outcomes = engine.serve(prompt)
                assert found <= count  # a full tier evicts for what the engine stores
                assert all(each.status is LoadStatus.CONFIRMED for each in outcomes)
        engine.close()
        return counts

    def end_by_exception(self) -> None:
        """Let an exception end the service's loop."""
        self.fault.touch()
        assert self.process is not None
        assert self.process.wait(TIMEOUT) == 1
        self.fault.unlink()

    def refuse(self, **settings: str) -> None:
        """Start a service whose settings are refused."""
        chosen = arguments(
            self.directory, **{"FDCACHE_HOST_MEMORY": SIZE, "FDCACHE_DISCARD": "0", **settings}
        )
        done = run("serve", **{name: str(value) for name, value in chosen.items()})
        assert done.returncode in (1, 78), done.stderr
        assert "Traceback" not in done.stderr

    def refuse_taken_port(self) -> None:
        """Start a service whose HTTP port is taken."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.refuse(FDCACHE_HTTP_ADDRESS=f"127.0.0.1:{taken.getsockname()[1]}")

    def refuse_storage(self) -> None:
        """Start a service whose storage folder cannot be written."""
        (self.directory / "file").touch()
        storage = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": f"{self.directory}/file/below"}
        self.refuse(**storage)

    def start_without_output(self) -> None:
        """Start a service whose output nobody reads, as in ``fdcache serve | head -0``."""
        reader, writer = os.pipe()
        os.close(reader)
        environment = {**os.environ, **self._settings}
        done = subprocess.run(
            self.command,
            env=environment,
            stdout=writer,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=TIMEOUT,
        )
        os.close(writer)
        assert done.returncode != 0

    def send_malformed_messages(self) -> None:
        """Send what no client sends."""
        line = Connection(self.address)
        for data in (b"", b"\x93" * 100_000, bytes(1000), b"\xff"):
            line.socket.send(data)
        assert self.ask("stats")["state"] == "ready"
        line.close()

    def leave_bad_files(self) -> None:
        """Put into the runtime folder what no service leaves there."""
        (self.directory / "fdcache-live-00112233").mkdir()
        (self.directory / "fdcache-live-0011223344556677").write_bytes(b"[" * 100_000)
        (self.directory / "fdcache-live-8899aabbccddeeff").write_text('{"pid": 1e999}')
        os.mkfifo(self.directory / "fdcache-live-0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Case:
    """One end of a service and one start of the next, in words and as code; ``size`` of the next one's memory."""

    end: str
    start: str
    ends: tuple[Callable[[WarmService], object], ...]
    size: str = SIZE


def _interrupt(service: WarmService) -> None:
    assert service.process is not None
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(TIMEOUT) == 0


_kill, _terminate = WarmService.kill, WarmService.terminate

CASES = [
    Case("kill -9", "", (_kill,)),
    Case("SIGTERM", "", (_terminate,)),
    Case("Ctrl-C", "", (_interrupt,)),
    Case("an exception in its loop", "", (WarmService.end_by_exception,)),
    Case("SIGTERM, after malformed messages", "", (WarmService.send_malformed_messages, _terminate)),
    Case("SIGTERM", "after a start with a taken HTTP port", (_terminate, WarmService.refuse_taken_port)),
    Case("kill -9", "after a start with a wrong storage folder", (_kill, WarmService.refuse_storage)),
    Case("SIGTERM", "after a start whose output is closed", (_terminate, WarmService.start_without_output)),
    Case("kill -9", "beside bad files in the runtime folder", (_kill, WarmService.leave_bad_files)),
    Case("SIGTERM", "with twice the memory", (_terminate,), LARGER),
    Case("SIGTERM", "with three quarters of the memory", (_terminate,), SMALLER),
    Case("kill -9", "with three quarters of the memory", (_kill,), SMALLER),
    Case("SIGTERM", "with a quarter of the memory, which has room for 248 blocks", (_terminate,), QUARTER),
]


def measure(case: Case, folder: Path) -> list[int]:
    """Return how many blocks of each prompt the next service finds."""
    with WarmService(folder) as first:
        first.command = [sys.executable, "-c", _PLANTED, str(first.fault)]
        first.start()
        first.fill()
        first.command = [sys.executable, "-m", "fdcache_cli.main", "serve"]
        for step in case.ends:
            step(first)
    with WarmService(folder, FDCACHE_HOST_MEMORY=case.size, FDCACHE_DISCARD="1") as following:
        following.start()
        found = following.found()
        assert following.terminate() == 0
    return found


def row(case: Case, found: list[int]) -> str:
    """Return the row of a case."""
    share = sum(found) / BLOCKS
    return f"| {case.end} | {case.start or 'as before'} | {sum(found)} of {BLOCKS} ({share:.0%}) |"


HEAD = "| the service ended by | the next one starts | blocks found |\n|---|---|---|"


def main() -> None:
    """Print the table."""
    sys.stdout.write(HEAD + "\n")
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="fdcache-warm-") as folder:
            sys.stdout.write(row(case, measure(case, Path(folder) / "s")) + "\n")


if __name__ == "__main__":
    main()
