"""``fdcache env check``: every problem is found and named."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

from tests.commands import FDCACHE, everything, fdcache


def test_an_empty_environment_is_valid() -> None:
    done = fdcache("env", "check")
    assert done.returncode == 0
    assert "fingerprint" in done.stdout


def test_a_split_size_must_be_a_power_of_two() -> None:
    done = fdcache("env", "check", FD_DETERMINISTIC_SPLIT_KV_SIZE="24")
    assert done.returncode == 78
    assert "power of two" in done.stdout
    assert "FD_DETERMINISTIC_SPLIT_KV_SIZE" in done.stdout


def test_a_misspelt_name_is_corrected_and_only_strict_fails() -> None:
    done = fdcache("env", "check", FD_LOG_DRI="x")
    assert (done.returncode, "FD_LOG_DIR" in done.stdout) == (0, True)
    strict = fdcache("env", "check", "--strict", FD_LOG_DRI="x")
    assert strict.returncode == 78
    assert strict.stdout.startswith("error: FD_LOG_DRI")


def test_strict_ignores_names_of_a_newer_engine() -> None:
    done = fdcache("env", "check", "--strict", FD_NEWER_THING="1", FD_ENABLE_OTHER_CACHE="1")
    assert done.returncode == 0
    assert done.stdout.count("note: ") == 2
    assert fdcache("env", "check", "--strict", FDCACHE_NEWER_THING="1").returncode == 78


def test_docker_service_links_are_ignored() -> None:
    done = fdcache("env", "check", "--strict", FDCACHE_PORT="tcp://10.0.0.1:80")
    assert done.returncode == 0
    assert "FDCACHE_PORT" not in everything(done)


def test_an_invalid_size_comes_with_an_example() -> None:
    done = fdcache("env", "check", FDCACHE_HOST_MEMORY="lots")
    assert done.returncode == 78
    assert "8GiB" in done.stdout


def test_json_lists_all_problems() -> None:
    done = fdcache(
        "env", "check", "--json", FD_DEBUG="2", FD_TRACE="x", FD_PD_REORDER="x", FD_NEWER_THING="1"
    )
    told = json.loads(done.stdout)
    assert done.returncode == 78
    assert told["ok"] is False
    assert [(problem["severity"], problem["variables"]) for problem in told["problems"]] == [
        ("error", ["FD_DEBUG"]),
        ("error", ["FD_PD_REORDER"]),
        ("warning", ["FD_TRACE"]),
        ("note", ["FD_NEWER_THING"]),
    ]
    assert all(problem["wrong"] and problem["right"] and problem["source"] for problem in told["problems"])


def test_each_variable_of_a_problem_has_its_own_source() -> None:
    done = fdcache("env", "check", "--json", FDCACHE_STORAGE="local", FDCACHE_STORAGE_SIZE="1MiB")
    problems = json.loads(done.stdout)["problems"]
    (problem,) = (each for each in problems if each["variables"][0] == "FDCACHE_STORAGE")
    assert dict(zip(problem["variables"], problem["sources"], strict=True)) == {
        "FDCACHE_STORAGE": "environment",
        "FDCACHE_HOST_MEMORY": "default",
    }
    assert problem["source"] == "environment, default"


def test_a_split_size_that_prevents_reuse_is_a_warning() -> None:
    environ = {"FD_DETERMINISTIC_MODE": "1", "FD_DETERMINISTIC_SPLIT_KV_SIZE": "1048576"}
    assert "nothing is ever reused" in fdcache("env", "check", **environ).stdout
    assert fdcache("env", "check", "--strict", **environ).returncode == 78


def test_a_derived_directory_names_the_variable_it_comes_from() -> None:
    done = fdcache("env", "check", FDCACHE_STORAGE="local", FILE_BACKEND_STORAGE_DIR="/proc/nope2")
    assert done.returncode == 78
    assert "FDCACHE_STORAGE_DIR (FILE_BACKEND_STORAGE_DIR in environment): /proc/nope2" in done.stdout


def test_broken_links_are_found(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    environ = {"FDCACHE_STORAGE": "local", "FDCACHE_HOST_MEMORY": "1MiB"}
    for folders in ({"FDCACHE_STORAGE_DIR": str(link)}, {"FD_LOG_DIR": f"{link}/logs"}):
        done = fdcache("env", "check", **{**environ, "FDCACHE_STORAGE_DIR": str(tmp_path), **folders})
        (name, folder) = folders.popitem()
        assert done.returncode == 78
        assert (
            f"error: {name} (environment): {folder} cannot be created: {link} is a broken link" in done.stdout
        )


def test_a_port_in_use_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = fdcache("env", "check", FDCACHE_HTTP_ADDRESS=address)
    assert done.returncode == 78
    assert f"error: FDCACHE_HTTP_ADDRESS (environment): {address}: Address already in use" in done.stdout
    assert fdcache("env", "check", FDCACHE_HTTP_ADDRESS=address).returncode == 0


def test_a_deprecated_name_is_reported_with_its_replacement() -> None:
    done = fdcache("env", "check", FD_NVFP4_MOE_BACKEND="flashinfer-cudnn")
    assert done.returncode == 0
    assert "use FD_NVFP4_GEMM_BACKEND" in done.stdout


def test_values_that_are_not_utf8_are_reported() -> None:
    environ = {name.decode("utf-8", "surrogateescape"): text for name, text in NOT_UTF8.items()}
    for arguments in (["show", "--all"], ["check"], ["show", "--json"]):
        done = fdcache("env", *arguments, **environ)
        assert done.returncode == 78
        assert "Traceback" not in everything(done)
        assert "FD_SERVICE_NAME" in everything(done)
    command = [FDCACHE, "env", "check"]
    real = subprocess.run(command, capture_output=True, env={"FD_SERVICE_NAME": b"\xff\xfe"}, check=False)
    assert real.returncode == 78
    assert b"FD_SERVICE_NAME" in real.stdout


NOT_UTF8 = {b"FD_SERVICE_NAME": "\udcff\udcfe", b"FD_\xff": "\udcff", b"FD_JOB_ID": "ok"}
