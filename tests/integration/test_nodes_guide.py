"""docs/nodes.md: its commands run, and the metrics and variables that it names exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fdcache.service.server.http import make_app
from fdcache.settings import VARIABLES
from tests import commands
from tests.integration.test_serve_storage import chat
from tests.service_help import local_service

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "nodes.md").read_text()


def replay(line: str, folder: Path) -> int:
    """Run a replay in a process of its own; return the tokens that it found in storage."""
    shown, arguments = line.split(" fdcache ")
    environment = dict(each.split("=") for each in shown.replace("$PWD", str(folder)).split())
    command = [sys.executable, "-m", "fdcache_cli.main", *arguments.split()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, (line, done.stderr)
    return int(json.loads(done.stdout)["hit_tokens"]["storage"])


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replays, looks = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
    make, first, second = replays.splitlines()
    assert make == "mkdir blocks"
    (tmp_path / "blocks").mkdir()
    found = [replay(line, tmp_path) for line in (first, second)]
    assert found[1] > found[0], "the second node finds the blocks of the first"
    (look,) = looks.splitlines()
    shown = commands.fdcache(*look.split()[1:])
    assert shown.returncode == 0
    assert "0 corrupt (all checked)" in shown.stdout


def test_the_metrics_and_variables_exist(tmp_path: Path) -> None:
    named = {name for name in re.findall(r"fdcache_storage_\w+", GUIDE) if "_node_" not in name}
    assert len(named) == 3
    folder = tmp_path / "blocks"
    folder.mkdir()
    settings = {
        "FDCACHE_STORAGE": "shared",
        "FDCACHE_STORAGE_DIR": str(folder),
        "FDCACHE_HOST_MEMORY": "4MiB",
        "FDCACHE_WRITE_POLICY": "write_through",
    }
    with local_service(tmp_path, **settings) as service:
        chat(service, requests=40)
        assert service.ask("storage")["layouts"][0]["store_objects"] is not None
        with TestClient(make_app(service.address, ())) as web:
            served = set(re.findall(r"^(fdcache_storage_\w+)", web.get("/metrics").text, re.MULTILINE))
    assert named <= served
    files = {"FDCACHE_OBJECT_KEY_FILE", "FDCACHE_NODES_KEY_FILE"}
    assert set(re.findall(r"FDCACHE_[A-Z_]+[A-Z]", GUIDE)) - files <= set(VARIABLES)
