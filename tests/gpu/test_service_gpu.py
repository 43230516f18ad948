"""Engines with GPUs on one service: each client pins the shared extents that its copies need."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service_help import ServiceProcess, service_process


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    """Start a service with its arena in shared memory; files on a disk cannot be pinned."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="fdcache-test-") as folder,
        service_process(Path(folder) / "service", FDCACHE_HOST_MEMORY="64MiB") as running,
    ):
        yield running


def start_engine(service: ServiceProcess, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fdcache_cli.main", "replay", "--device", "cuda", "--server", service.address,
        "--workload", "chat", "--requests", "60", "--write-policy", "write_through", "--device-blocks", "256",
        "--concurrency", "4", "--layers", "4", "--json", *options,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def report_of(engine: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = engine.communicate(timeout=120)
    assert engine.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def check(report: dict[str, Any]) -> None:
    assert report["finished"] == 60 and report["verified_blocks"] > 0
    assert report["corrupt_blocks"] == report["failed_loads"] == report["leaked_pins"] == 0
    assert report["integrity_error"] is None


def test_two_engines_at_once_and_one_after_them_share_host_blocks(service: ServiceProcess) -> None:
    both = [start_engine(service) for _ in range(2)]
    reports = [report_of(engine) for engine in both]
    for report in reports:
        check(report)
    # What one has stored the other does not copy again.
    assert sum(report["swap"]["d2h"]["bytes"] for report in reports) > 0
    later = report_of(start_engine(service))
    check(later)
    assert later["hit_tokens"]["host"] > 0 and later["swap"]["h2d"]["bytes"] > 0
    assert later["hit_rate"] > 0.9
