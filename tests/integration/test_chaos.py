"""Everything dies at random, and nothing is ever wrong: replays against a service, all of them killed and stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fdcache_cli.slab_files import SlabContents, read_file, slab_files
from tests.seeds import budget
from tests.service_help import ServiceProcess, service_process, until

CLIENTS = 4
PATIENCE = 600
SEED = 20260731


@dataclass
class Replayer:
    """A client process that replays chat after chat; each run has its own seed, two of three share theirs."""

    address: str
    seed: int
    layers: int
    process: subprocess.Popen[str] | None = None
    stopped_until: float | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    runs: int = 0
    killed: bool = False

    def start(self) -> None:
        self.runs += 1
        self.killed = False
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "fdcache_cli.main", "replay", "--json", "--server", self.address),
                *("--requests", "600", "--seed", str(self.seed + self.runs % 3), "--device-blocks", "120"),
                *("--layers", str(self.layers), "--kv-heads", "2", "--head-dim", "32"),
                *("--write-policy", "write_through"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FDCACHE_RPC_TIMEOUT": "0.5"},
        )

    def poll(self, now: float) -> None:
        """Continue it if its time has come; take its report, and start the next run, if it has ended."""
        process = self.process
        assert process is not None
        if self.stopped_until is not None and now >= self.stopped_until:
            process.send_signal(signal.SIGCONT)
            self.stopped_until = None
        if process.poll() is not None:
            self.collect()
            self.start()

    def collect(self) -> None:
        process = self.process
        assert process is not None
        out, errors = process.communicate()
        if not self.killed:
            if process.returncode == 0:
                self.reports.append(json.loads(out))
            else:
                self.failures.append(f"status {process.returncode}: {out[-2000:]} {errors[-2000:]}")

    def kill(self) -> None:
        assert self.process is not None
        self.killed = True
        self.stopped_until = None
        self.process.kill()

    def stop(self, until_when: float) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.stopped_until = until_when

    def finish(self) -> None:
        """Let the present run come to its end; after a blow at the last moment that is a new one."""
        assert self.process is not None
        if self.killed:
            self.collect()
            self.start()
        if self.stopped_until is not None:
            self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.failures.append(f"stuck: a run did not end within {PATIENCE} s")
            self.process.kill()
            self.killed = True
        self.collect()


def rampage(service: ServiceProcess, clients: list[Replayer], seconds: float, rng: random.Random) -> int:
    """Kill and stop whatever ``rng`` says, for so long; how often the service was killed."""
    service_kills = 0
    begin = time.monotonic()
    next_blow = begin + 1.0
    while (now := time.monotonic()) < begin + seconds:
        for client in clients:
            client.poll(now)
        if now >= next_blow:
            victim, blow = rng.choice(clients), rng.random()
            if blow < 0.2:
                service.kill()
                service.start()
                service_kills += 1
            elif blow < 0.6:
                victim.kill()
            elif victim.stopped_until is None:
                victim.stop(now + rng.uniform(0.2, 3.0))
            next_blow = time.monotonic() + rng.uniform(0.3, 1.5)
        time.sleep(0.02)
    return service_kills


def is_idle(service: ServiceProcess) -> bool:
    storage = service.ask("storage")
    return not (storage["queued_blocks"] or storage["reading_blocks"] or storage["writing_blocks"])


def check_service(service: ServiceProcess) -> None:
    until(lambda: not service.ask("clients"), "every client is gone")
    until(lambda: service.ask("stats")["state"] == "ready", "no earlier client is waited for")
    assert service.ask("integrity") == []
    until(lambda: is_idle(service), "nothing is read or written any more")
    for namespace in service.ask("namespaces"):
        tier = namespace["tier"]
        assert (tier["pins"], tier["leases"], tier["writing"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(4,), (4, 5, 7)], ids=["one layout", "layouts that compete"])
def test_nothing_is_corrupt_leaked_or_stuck_whoever_dies(tmp_path: Path, layers: tuple[int, ...]) -> None:
    rng = random.Random(SEED)
    folder = tmp_path / "storage"
    with service_process(
        tmp_path / "s",
        FDCACHE_HOST_MEMORY="8MiB",
        FDCACHE_SESSION_TIMEOUT="0.5s",
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=str(folder),
        FDCACHE_STORAGE_SIZE="32MiB",
    ) as service:
        clients = [Replayer(service.address, seed, layers[seed % len(layers)]) for seed in range(CLIENTS)]
        try:
            for client in clients:
                client.start()
            service_kills = rampage(service, clients, max(budget(120), 15), rng)
            for client in clients:
                client.finish()
        finally:
            for client in clients:
                if client.process is not None and client.process.poll() is None:
                    client.process.kill()
        failures = [failure for client in clients for failure in client.failures]
        assert not failures, failures[0]
        reports = [report for client in clients for report in client.reports]
        assert service_kills > 0
        assert len(reports) >= CLIENTS
        for report in reports:
            assert (report["corrupt_blocks"], report["leaked_slots"], report["leaked_pins"]) == (0, 0, 0)
        for tier in ("host", "storage"):
            assert sum(report["hit_tokens"][tier] for report in reports) > 0
        check_service(service)
        assert service.terminate() == 0
        assert service.leftovers() == []
    for path in slab_files(folder):
        stored = read_file(path, verify=True)
        assert isinstance(stored, SlabContents)
        assert len(stored.slots) > 0
        assert len(stored.corrupt) == 0
