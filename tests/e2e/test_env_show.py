"""``fdcache env show`` without a service: values, sources, filters, secrets."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

from fdcache.settings import VARIABLES
from tests.commands import FDCACHE, everything, fdcache

SECRET = "hunter2-and-more"


def shown(*arguments: str, **environ: str) -> dict[str, dict[str, Any]]:
    done = fdcache("env", "show", "--json", *arguments, **environ)
    return {setting["name"]: setting for setting in json.loads(done.stdout)["settings"]}


def test_json_has_every_setting() -> None:
    settings = shown(FD_LOG_DIR="/x")
    assert set(settings) == set(VARIABLES)
    told = settings["FD_LOG_DIR"]
    assert (told["value"], told["source"], told["default"]) == ("/x", "environment", "log")
    assert (told["type"], told["group"]) == ("path", "logging")
    assert told["description"]
    assert settings["FD_DEBUG"]["value"] is False
    assert settings["FD_DEBUG"]["source"] == "default"


def test_filters() -> None:
    environ = {"FD_LOG_DIR": "/x", "FDCACHE_RANKS": "2"}
    assert set(shown("--changed", **environ)) == {"FD_LOG_DIR", "FDCACHE_RANKS"}
    assert {told["group"] for told in shown("--group", "moe").values()} == {"moe"}
    assert set(shown("--used")) == {name for name, variable in VARIABLES.items() if variable.used_in}
    assert set(shown("--group", "logging", "--changed", **environ)) == {"FD_LOG_DIR"}


def test_the_table_cuts_nothing_off() -> None:
    long = "/" + "-".join(["very-long-name"] * 12)
    done = fdcache("env", "show", FD_LOG_DIR=long)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "VALUE", "SOURCE", "DEFAULT", "CHANGED"]
    assert ["FD_LOG_DIR", long, "environment", "log", "yes"] in [line.split() for line in lines]
    assert not any(line.startswith("FD_MOE_BACKEND") for line in lines)
    assert "FD_MOE_BACKEND" in fdcache("env", "show", "--all").stdout


def test_details_list_every_candidate(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("FD_LOG_REQUESTS_LEVEL=1\n")
    environ = {"FDCACHE_ENV_FILE": str(tmp_path / "a.env"), "FD_LOG_REQUESTS_LEVEL": "3"}
    story = fdcache("env", "show", "FD_LOG_REQUESTS_LEVEL", **environ).stdout
    winner, loser, default = story.strip().splitlines()[-3:]
    assert winner.split()[:2] == ["environment", "'3'"]
    assert loser.split()[:2] == ["dotenv", "'1'"]
    assert default.split() == ["default", "2"]
    assert "from 0 to 3" in story


def test_derived_values_name_their_source(tmp_path: Path) -> None:
    environ = {"FD_DETERMINISTIC_MODE": "1", "FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    story = fdcache("env", "show", "FDCACHE_REUSE_GRID", **environ).stdout
    assert "value:        16" in story
    assert (
        "derived      '16' as FD_DETERMINISTIC_SPLIT_KV_SIZE in default, with FD_DETERMINISTIC_MODE in"
        in story
    )
    told = shown(**environ)
    assert (told["FDCACHE_REUSE_GRID"]["source"], told["FDCACHE_REUSE_GRID"]["given_as"]) == (
        "derived",
        "FD_DETERMINISTIC_SPLIT_KV_SIZE",
    )
    assert told["FDCACHE_STORAGE_DIR"]["value"] == str(tmp_path)
    assert told["FD_PD_REORDER"]["used_by"] == "engine"
    assert told["FD_LOG_DIR"]["used_in"] == ["serve", "init", "manager", "controller"]


def test_a_deprecated_name_shows_its_replacement() -> None:
    done = fdcache("env", "show", "FD_NVFP4_MOE_BACKEND", FD_NVFP4_MOE_BACKEND="flashinfer-cudnn")
    assert done.returncode == 0
    assert done.stdout.startswith("FD_NVFP4_GEMM_BACKEND\n")
    assert "'flashinfer-cudnn' as FD_NVFP4_MOE_BACKEND" in done.stdout


def test_an_unknown_name_or_group_is_corrected() -> None:
    done = fdcache("env", "show", "FD_LOG_DRI")
    assert done.returncode == 2
    assert "FD_LOG_DIR" in done.stderr
    assert "moe" in fdcache("env", "show", "--group", "mow").stderr


def test_valid_settings_are_shown_beside_errors() -> None:
    done = fdcache("env", "show", FDCACHE_RANKS="many", FD_LOG_DIR="/x")
    assert done.returncode == 78
    assert "(not valid)" in done.stdout
    assert "/x" in done.stdout
    assert "FDCACHE_RANKS" in done.stderr


def test_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    for arguments in (("show",), ("show", "--json"), ("show", "FD_API_KEY"), ("check",), ("check", "--json")):
        done = fdcache("env", *arguments, FD_API_KEY_FILE=str(path))
        assert done.returncode == 0
        assert SECRET not in everything(done)
    told = shown(FD_API_KEY_FILE=str(path))["FD_API_KEY"]
    assert (told["value"], told["given_as"], told["changed"]) == ("********", "FD_API_KEY", True)


def test_a_rejected_secret_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET + "\0")
    for arguments in (("show",), ("show", "FD_API_KEY"), ("check",), ("check", "--json"), ("diff", path)):
        done = fdcache("env", *arguments, FD_API_KEY_FILE=str(path))
        assert done.returncode in (1, 78)
        assert SECRET not in everything(done)
        assert "Traceback" not in everything(done)


def test_secrets_are_shown_on_a_terminal_only() -> None:
    done = fdcache("env", "show", "--show-secrets", FD_API_KEY=SECRET)
    assert done.returncode == 2
    assert SECRET not in everything(done)
    leader, follower = pty.openpty()
    command = [str(FDCACHE), "env", "show", "FD_API_KEY", "--show-secrets"]
    with subprocess.Popen(command, stdout=follower, env={"FD_API_KEY": SECRET, "TERM": "dumb"}) as process:
        os.close(follower)
        told = b""
        while chunk := _read(leader):
            told += chunk
    os.close(leader)
    assert process.returncode == 0
    assert SECRET.encode() in told


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the end of a terminal as EIO
        return b""
