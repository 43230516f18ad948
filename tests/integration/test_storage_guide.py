"""docs/storage.md: its commands run, and the metrics, figures and variables that it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fdcache.service.server.http import make_app
from fdcache.settings import VARIABLES
from fdcache.storage.connector import StorageStats
from fdcache.tiers.statistics import CacheStats, Counters
from tests import commands
from tests.integration.test_serve_storage import BLOCKS, storage_settings
from tests.service_engine import PROMPT, Engine
from tests.service_help import local_service, until

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "storage.md").read_text()


def run(line: str) -> str:
    """Run a replay in a process of its own, and other commands in this one."""
    arguments = line.split()[1:]
    if arguments[0] != "replay":
        done = commands.fdcache(*arguments)
    else:
        replay = [sys.executable, "-m", "fdcache_cli.main", *arguments]
        done = subprocess.run(replay, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.search(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    assert shown is not None
    first, second, inspected, reset = (run(line) for line in shown[1].splitlines())
    found = [int(re.findall(r"storage ([\d,]+)", text)[0].replace(",", "")) for text in (first, second)]
    assert found[0] == 0
    assert found[1] > 0, "the second process finds the blocks of the first"
    assert "0 corrupt (all checked)" in inspected
    assert "would remove the file and its" in reset


def test_the_metrics_exist(tmp_path: Path) -> None:
    named = {name for name in re.findall(r"fdcache_storage_\w+", GUIDE) if "_node_" not in name}
    assert len(named) > 10
    with local_service(tmp_path, **storage_settings(tmp_path / "storage")) as service:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("storage")["blocks"] == BLOCKS, "the blocks are stored")
        with TestClient(make_app(service.address, ())) as web:
            served = set(re.findall(r"^(fdcache_storage_\w+)", web.get("/metrics").text, re.MULTILINE))
        engine.close()
    assert named <= served


def test_the_figures_and_variables_exist() -> None:
    table = GUIDE.split("| figure |")[1].split("\n\n")[0]
    cells = [line.split("|")[2] for line in table.splitlines()[2:]]
    members = {name for cell in cells for name in re.findall(r"(\w+)`", cell)}
    known = {
        *Counters.__struct_fields__,
        *CacheStats.__struct_fields__,
        *StorageStats.__struct_fields__,
    }
    assert {"storage_hit_tokens", "stores_dropped", "reading_blocks"} <= members <= known
    assert set(re.findall(r"FDCACHE_[A-Z_]+[A-Z]", GUIDE)) <= set(VARIABLES)
