"""Checks before a service starts: `env check`, `serve --check` and `serve` name every problem and change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import everything, fdcache

LINES_OF = {
    "FDCACHE_SERVER=tcp://node:1": "address 'tcp://node:1': a service is reachable on its own node only",
    f"FDCACHE_SERVER=ipc:///{'x' * 120}": "the path is longer than the 107 bytes of a socket",
    "FDCACHE_SERVER=ipc:///dev/null/x.sock": "/dev/null: the directory of the socket is not a directory",
    "FDCACHE_HTTP_ADDRESS=0.0.0.0:1": "0.0.0.0 is reachable from other machines; set FD_API_KEY, or use 127.0.0.1",
    "FDCACHE_HTTP_ADDRESS=here": "'here' is not HOST:PORT, such as 127.0.0.1:9470, or off",
    "FDCACHE_ARENA_DIR=/no/such/folder": "/no/such/folder is not a directory; mount a tmpfs there",
    "FDCACHE_ARENA_DIR=/sys": "/sys cannot be written by this user; choose another one, a tmpfs such as /dev/shm",
    "FDCACHE_RUNTIME_DIR=/etc": "/etc: ",
    "FDCACHE_RUNTIME_DIR=relative": "address 'ipc://relative/fdcache.sock': the path must be absolute",
    f"FDCACHE_RUNTIME_DIR=/tmp/{'x' * 120}": "the path is longer than the 107 bytes of a socket",
    "FDCACHE_RUNTIME_DIR=/proc/nope": "/proc/nope: the directory of the socket cannot be created in /proc",
    "FDCACHE_NUMA_NODE=4095": "this machine has no NUMA node 4095; unset the variable",
    "FD_LOG_DIR=/proc/nope": "/proc/nope cannot be created",
    "FDCACHE_STORAGE=nosuch": "FDCACHE_STORAGE=nosuch: no such connector",
    "FDCACHE_STORAGE_DIR=/proc/nope": "/proc/nope cannot be created",
    "FDCACHE_STORAGE_SIZE=3": "'3' is below 4KiB; use a size, at least 4KiB",
    "FDCACHE_HOST_MEMORY=3": "an arena of 3 bytes is smaller than an extent of 4096",
    "FDCACHE_REUSE_GRID=48": "a grid of 48 tokens neither divides the block size 64 nor is a multiple of it",
}
"""An assignment that lets nothing start, and what is said of it. All that concern other variables go together."""


def rounds() -> Iterator[list[tuple[str, str, str]]]:
    left = [(*assignment.split("=", 1), said) for assignment, said in LINES_OF.items()]
    while left:
        taken = {name: (name, text, said) for name, text, said in reversed(left)}
        if "FDCACHE_SERVER" in taken:
            taken.pop("FDCACHE_RUNTIME_DIR", None)  # it counts without an address only
        if taken.get("FDCACHE_STORAGE", ("", "local"))[1] != "local":
            taken.pop("FDCACHE_STORAGE_DIR", None)
        if "FDCACHE_ARENA_DIR" in taken:
            taken.pop("FDCACHE_HOST_MEMORY", None)
        left = [each for each in left if each not in taken.values()]
        yield list(taken.values())


def test_env_check_and_serve_check_find_every_problem() -> None:
    for assignments in rounds():
        environ = {"FDCACHE_HOST_MEMORY": "1MiB", "FDCACHE_STORAGE": "local"}
        environ |= {name: text for name, text, _ in assignments}
        found = {command: fdcache(*command.split(), **environ) for command in ("env check", "serve --check")}
        for done in found.values():
            assert done.returncode == 78, everything(done)
            assert "Traceback" not in everything(done)
            assert "chmod" not in everything(done)
        for name, _, said in assignments:
            (line,) = [each for each in found["env check"].stdout.splitlines() if said in each]
            assert line.startswith("error: ")
            assert f"{name} (environment)" in line or f"{name}, " in line


@pytest.mark.parametrize("assignment", ["FDCACHE_NUMA_NODE=4095", "FDCACHE_STORAGE_SIZE=3"])
def test_serve_check_prints_the_same_line(assignment: str) -> None:
    name, text = assignment.split("=")
    assert (
        f"{name} (environment): {LINES_OF[assignment]}" in fdcache("serve", "--check", **{name: text}).stderr
    )


def test_a_file_in_the_place_of_the_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    (run / "precious.txt").write_text("years of work")
    (run / "folder").mkdir()
    (run / "link").symlink_to(run / "precious.txt")
    kept = sorted(run.iterdir())
    for path in kept:
        for command in ("env check", "serve --check", "serve --host-memory 1MiB --http off"):
            done = fdcache(*command.split(), FDCACHE_SERVER=f"ipc://{path}", FDCACHE_ARENA_DIR=str(tmp_path))
            assert done.returncode == 78, everything(done)
            (line,) = [each for each in everything(done).splitlines() if each.startswith("error: ")]
            assert line.endswith(
                f"{path}: exists and is not a socket; choose another --socket, or move it away"
            )
    assert sorted(run.iterdir()) == kept
    assert (run / "precious.txt").read_text() == "years of work"


def test_errors_of_a_service_alone_are_notes_in_an_environment(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = fdcache("env", "check", "--strict", **environ)
    assert (done.returncode, "note: FDCACHE_RUNTIME_DIR" in done.stdout) == (0, True)
    assert fdcache("serve", "--check", **environ).returncode == 78


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null"])
def test_serve_refuses_an_invalid_log_directory(folder: str, tmp_path: Path) -> None:
    done = fdcache("serve", FD_LOG_DIR=folder, FDCACHE_RUNTIME_DIR=str(tmp_path / "run"))
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: FD_LOG_DIR (environment): {folder} cannot be created")


def test_serve_names_the_variable_of_a_relative_runtime_directory() -> None:
    done = fdcache("serve", FDCACHE_RUNTIME_DIR="relative")
    assert done.returncode == 78
    assert done.stderr.startswith(
        "error: FDCACHE_RUNTIME_DIR (environment): address 'ipc://relative/fdcache.sock': the path must"
    )


def test_serve_refuses_the_runtime_directory_of_others_and_does_not_advise_chmod() -> None:
    done = fdcache(
        "serve", FDCACHE_RUNTIME_DIR="/etc", FDCACHE_HTTP_ADDRESS="off", FDCACHE_HOST_MEMORY="1MiB"
    )
    assert done.returncode == 78
    assert (
        f"set FDCACHE_RUNTIME_DIR to another directory, such as /tmp/fdcache-{os.geteuid()}, which"
        in done.stderr
    )
    assert "chmod" not in done.stderr


@pytest.mark.parametrize("folder", ["/sys", "/proc"])
def test_serve_refuses_an_arena_directory_that_cannot_be_written(folder: str, tmp_path: Path) -> None:
    done = fdcache("serve", FDCACHE_ARENA_DIR=folder, FDCACHE_RUNTIME_DIR=str(tmp_path / "run"))
    assert (done.returncode, done.stderr.splitlines()[1:]) == (78, [])
    assert done.stderr.startswith(
        f"error: FDCACHE_ARENA_DIR (environment): {folder} cannot be written by this user; choose another"
    )


@pytest.mark.parametrize(
    ("options", "environ", "variable"),
    [
        (("--host-memory", "1MiB"), {"FDCACHE_NUMA_NODE": "5000"}, "FDCACHE_NUMA_NODE (environment)"),
        (("--host-memory", "5"), {}, "FDCACHE_HOST_MEMORY (--host-memory of fdcache serve)"),
        ((), {"FDCACHE_HOST_MEMORY": "5"}, "FDCACHE_HOST_MEMORY (environment)"),
        (
            ("--host-memory", "1MiB", "--storage", "/proc/x"),
            {},
            "FDCACHE_STORAGE_DIR (--storage of fdcache serve)",
        ),
        (
            ("--host-memory", "1MiB", "--storage", "nosuch"),
            {},
            "FDCACHE_STORAGE (--storage of fdcache serve)",
        ),
        (
            ("--host-memory", "1MiB", "--http", "127.0.0.1:\u00b2"),
            {},
            "FDCACHE_HTTP_ADDRESS (--http of fdcache serve)",
        ),
        (
            ("--host-memory", "1MiB", "--socket", "~no-such-user/x"),
            {},
            "FDCACHE_SERVER (--socket of fdcache serve)",
        ),
    ],
)
def test_serve_ends_with_the_status_of_a_bad_configuration(
    options: tuple[str, ...], environ: dict[str, str], variable: str, tmp_path: Path
) -> None:
    places = {"FDCACHE_RUNTIME_DIR": str(tmp_path / "run"), "FDCACHE_ARENA_DIR": str(tmp_path)}
    done = fdcache("serve", "--http", "off", *options, **places, **environ)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: {variable}: "), done.stderr
    assert list(tmp_path.iterdir()) == []
