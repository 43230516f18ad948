"""``fdcache env`` as it is run: real processes, real exit statuses."""

import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.settings import VARIABLES

FDCACHE = Path(sys.executable).with_name("fdcache")
SECRET = "hunter2-and-more"


def fdcache(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command with nothing in its environment but what is given."""
    return subprocess.run([FDCACHE, *arguments], capture_output=True, text=True, env=environ, check=False)


def everything(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def shown(*arguments: str, **environ: str) -> dict[str, dict[str, Any]]:
    done = fdcache("env", "show", "--json", *arguments, **environ)
    return {setting["name"]: setting for setting in json.loads(done.stdout)["settings"]}


@pytest.mark.parametrize("arguments", [("--help",), ("env", "--help"), ("-h",)])
def test_help_is_printed_without_pydantic_rich_or_asyncio(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys; from fdcache_cli.main import run; sys.argv[1:] = {!r}\n"
        "try: run()\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = [m for m in ('pydantic', 'rich', 'asyncio', 'fdcache.settings') if m in sys.modules]\n"
        "print(code, heavy, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program.format(list(arguments))], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "0 []"
    assert "Usage: fdcache" in done.stdout
    assert "show" in done.stdout or "env" in done.stdout


@pytest.mark.parametrize(
    ("words", "meant"), [(["evn"], "env"), (["inspect", "tires"], "tiers"), (["env", "tmeplate"], "template")]
)
def test_an_unknown_command_is_wrong_usage_and_the_nearest_is_named(words: list[str], meant: str) -> None:
    done = fdcache(*words)
    assert done.returncode == 2
    assert f"there is no command '{words[-1]}'; did you mean '{meant}'?" in done.stderr


def test_version_is_printed() -> None:
    assert fdcache("--version").stdout.startswith("fdcache ")


def test_check_of_nothing_is_clean() -> None:
    done = fdcache("env", "check")
    assert done.returncode == 0
    assert "fingerprint" in done.stdout


def test_check_says_power_of_two() -> None:
    done = fdcache("env", "check", FD_DETERMINISTIC_SPLIT_KV_SIZE="24")
    assert done.returncode == 78
    assert "power of two" in done.stdout
    assert "FD_DETERMINISTIC_SPLIT_KV_SIZE" in done.stdout


def test_check_suggests_and_only_strict_fails() -> None:
    done = fdcache("env", "check", FD_LOG_DRI="x")
    assert (done.returncode, "FD_LOG_DIR" in done.stdout) == (0, True)
    strict = fdcache("env", "check", "--strict", FD_LOG_DRI="x")
    assert strict.returncode == 78
    assert strict.stdout.startswith("error: FD_LOG_DRI")


def test_strict_check_leaves_names_of_a_newer_engine_alone() -> None:
    done = fdcache("env", "check", "--strict", FD_NEWER_THING="1", FD_ENABLE_OTHER_CACHE="1")
    assert done.returncode == 0
    assert done.stdout.count("note: ") == 2
    assert fdcache("env", "check", "--strict", FDCACHE_NEWER_THING="1").returncode == 78


LINES_OF = {
    "FDCACHE_SERVER=tcp://node:1": "address 'tcp://node:1': a service is reachable on its own node only",
    f"FDCACHE_SERVER=ipc:///{'x' * 120}": "the path is longer than the 107 bytes of a socket",
    "FDCACHE_SERVER=ipc:///dev/null/x.sock": "/dev/null: the directory of the socket is not a directory",
    "FDCACHE_HTTP_ADDRESS=0.0.0.0:1": "0.0.0.0 can be reached from elsewhere; set FD_API_KEY, or use 127.0.0.1",
    "FDCACHE_HTTP_ADDRESS=here": "'here' is not HOST:PORT, as 127.0.0.1:9470, or off",
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
    "FDCACHE_HOST_MEMORY=3": "an arena of 3 bytes holds no extent of 4096",
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


def test_check_and_serve_find_everything_that_would_not_start() -> None:
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


def test_check_and_serve_refuse_what_is_in_the_place_of_the_socket_and_leave_it(tmp_path: Path) -> None:
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


def test_check_finds_links_that_lead_nowhere(tmp_path: Path) -> None:
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


def test_check_finds_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = fdcache("env", "check", FDCACHE_HTTP_ADDRESS=address)
    assert done.returncode == 78
    assert f"error: FDCACHE_HTTP_ADDRESS (environment): {address}: Address already in use" in done.stdout
    assert fdcache("env", "check", FDCACHE_HTTP_ADDRESS=address).returncode == 0


@pytest.mark.parametrize("assignment", ["FDCACHE_NUMA_NODE=4095", "FDCACHE_STORAGE_SIZE=3"])
def test_serve_check_says_the_same_line(assignment: str) -> None:
    name, text = assignment.split("=")
    assert (
        f"{name} (environment): {LINES_OF[assignment]}" in fdcache("serve", "--check", **{name: text}).stderr
    )


def test_check_warns_of_a_split_size_that_leaves_nothing_to_reuse() -> None:
    environ = {"FD_DETERMINISTIC_MODE": "1", "FD_DETERMINISTIC_SPLIT_KV_SIZE": "1048576"}
    assert "nothing is ever reused" in fdcache("env", "check", **environ).stdout
    assert fdcache("env", "check", "--strict", **environ).returncode == 78


def test_what_only_a_service_lacks_is_a_note_to_an_engine_and_an_error_to_the_service(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    environ = {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = fdcache("env", "check", "--strict", **environ)
    assert (done.returncode, "note: FDCACHE_RUNTIME_DIR" in done.stdout) == (0, True)
    assert fdcache("serve", "--check", **environ).returncode == 78


@pytest.mark.parametrize("folder", ["/proc/nope", "/dev/null"])
def test_serve_with_a_log_folder_that_cannot_be_says_so_in_a_line(folder: str, tmp_path: Path) -> None:
    done = fdcache("serve", FD_LOG_DIR=folder, FDCACHE_RUNTIME_DIR=str(tmp_path / "run"))
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: FD_LOG_DIR: {folder} cannot be written")


def test_serve_names_the_variable_of_a_relative_runtime_folder() -> None:
    done = fdcache("serve", FDCACHE_RUNTIME_DIR="relative")
    assert done.returncode == 78
    assert done.stderr.startswith(
        "error: FDCACHE_RUNTIME_DIR: address 'ipc://relative/fdcache.sock': the path must"
    )


def test_serve_refuses_a_runtime_folder_of_others_without_advice_to_close_it() -> None:
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
def test_serve_refuses_an_arena_folder_that_cannot_be_written(folder: str, tmp_path: Path) -> None:
    done = fdcache("serve", FDCACHE_ARENA_DIR=folder, FDCACHE_RUNTIME_DIR=str(tmp_path / "run"))
    assert (done.returncode, done.stderr.splitlines()[1:]) == (78, [])
    assert done.stderr.startswith(
        f"error: FDCACHE_ARENA_DIR: {folder} cannot be written by this user; choose another"
    )


def test_variables_of_the_engine_alone_do_not_stop_fdcache(tmp_path: Path) -> None:
    environ = {"FD_ATTENTION_BACKEND": "FLASH_ATTN", "FD_MOE_BACKEND": "Cutlass", "FD_PD_REORDER": "x"}
    for command in (("serve", "--check"), ("replay", "--requests", "2")):
        assert fdcache(*command, **environ).returncode == 0, command
    assert "'x' is not a flag" in fdcache("env", "check", **environ).stdout


@pytest.mark.parametrize("command", [("inspect", "tiers"), ("reset", "--yes")])
def test_other_settings_do_not_keep_an_operator_from_a_service(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    wrong = {"FDCACHE_WRITE_POLICY": "wrong", "FD_PD_REORDER": "x", "FDCACHE_RUNTIME_DIR": str(tmp_path)}
    done = fdcache(*command, **wrong)
    assert done.returncode == 1
    assert f"error: ipc://{tmp_path}/fdcache.sock: nobody serves" in done.stderr
    assert done.stderr.count("warning: ") == 2
    assert fdcache(*command, FDCACHE_RUNTIME_DIR_FILE="/no/such/file").returncode == 78


def test_check_leaves_service_links_alone() -> None:
    done = fdcache("env", "check", "--strict", FDCACHE_PORT="tcp://10.0.0.1:80")
    assert done.returncode == 0
    assert "FDCACHE_PORT" not in everything(done)


def test_check_says_what_a_size_looks_like() -> None:
    done = fdcache("env", "check", FDCACHE_HOST_MEMORY="lots")
    assert done.returncode == 78
    assert "8GiB" in done.stdout


def test_check_lists_all_problems_as_json() -> None:
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


def test_check_gives_each_of_several_variables_its_own_source() -> None:
    done = fdcache("env", "check", "--json", FDCACHE_STORAGE="local")
    (problem,) = json.loads(done.stdout)["problems"]
    assert dict(zip(problem["variables"], problem["sources"], strict=True)) == {
        "FDCACHE_STORAGE": "environment",
        "FDCACHE_HOST_MEMORY": "default",
    }
    assert problem["source"] == "environment, default"


def test_any_other_command_meets_a_bad_configuration_the_same_way() -> None:
    done = fdcache("replay", "--requests", "1", FDCACHE_RANKS="many", FD_DEBUG="2")
    assert done.returncode == 78
    assert "FDCACHE_RANKS" in done.stderr
    assert "FD_DEBUG" in done.stderr
    assert "Traceback" not in everything(done)


def test_show_knows_a_deprecated_name() -> None:
    done = fdcache("env", "show", "FD_NVFP4_MOE_BACKEND", FD_NVFP4_MOE_BACKEND="flashinfer-cudnn")
    assert done.returncode == 0
    assert done.stdout.startswith("FD_NVFP4_GEMM_BACKEND\n")
    assert "'flashinfer-cudnn' as FD_NVFP4_MOE_BACKEND" in done.stdout


def test_usage_line_names_the_arguments_once() -> None:
    assert "[[" not in fdcache("env", "show", "--help").stdout + fdcache("env", "diff", "--help").stdout


def test_show_gives_every_setting_as_json() -> None:
    settings = shown(FD_LOG_DIR="/x")
    assert set(settings) == set(VARIABLES)
    told = settings["FD_LOG_DIR"]
    assert (told["value"], told["source"], told["default"]) == ("/x", "environment", "log")
    assert (told["type"], told["group"]) == ("path", "logging")
    assert told["description"]
    assert settings["FD_DEBUG"]["value"] is False
    assert settings["FD_DEBUG"]["source"] == "default"


def test_show_filters() -> None:
    environ = {"FD_LOG_DIR": "/x", "FDCACHE_RANKS": "2"}
    assert set(shown("--changed", **environ)) == {"FD_LOG_DIR", "FDCACHE_RANKS"}
    assert {told["group"] for told in shown("--group", "moe").values()} == {"moe"}
    assert set(shown("--used")) == {name for name, variable in VARIABLES.items() if variable.used_in}
    assert set(shown("--group", "logging", "--changed", **environ)) == {"FD_LOG_DIR"}


def test_show_prints_a_table_that_cuts_nothing_off() -> None:
    long = "/" + "-".join(["very-long-name"] * 12)
    done = fdcache("env", "show", FD_LOG_DIR=long)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["NAME", "VALUE", "SOURCE", "DEFAULT", "CHANGED"]
    assert ["FD_LOG_DIR", long, "environment", "log", "yes"] in [line.split() for line in lines]
    assert not any(line.startswith("FD_MOE_BACKEND") for line in lines)
    assert "FD_MOE_BACKEND" in fdcache("env", "show", "--all").stdout


def test_show_tells_the_whole_story_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.env").write_text("FD_LOG_REQUESTS_LEVEL=1\n")
    environ = {"FDCACHE_ENV_FILE": str(tmp_path / "a.env"), "FD_LOG_REQUESTS_LEVEL": "3"}
    story = fdcache("env", "show", "FD_LOG_REQUESTS_LEVEL", **environ).stdout
    winner, loser, default = story.strip().splitlines()[-3:]
    assert winner.split()[:2] == ["environment", "'3'"]
    assert loser.split()[:2] == ["dotenv", "'1'"]
    assert default.split() == ["default", "2"]
    assert "from 0 to 3" in story


def test_show_says_which_variable_a_value_follows_from(tmp_path: Path) -> None:
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
    assert told["FD_LOG_DIR"]["used_in"] == ["serve", "init"]


def test_show_of_an_unknown_name_suggests() -> None:
    done = fdcache("env", "show", "FD_LOG_DRI")
    assert done.returncode == 2
    assert "FD_LOG_DIR" in done.stderr
    assert "moe" in fdcache("env", "show", "--group", "mow").stderr


def test_show_with_errors_shows_the_rest_and_fails() -> None:
    done = fdcache("env", "show", FDCACHE_RANKS="many", FD_LOG_DIR="/x")
    assert done.returncode == 78
    assert "(not valid)" in done.stdout
    assert "/x" in done.stdout
    assert "FDCACHE_RANKS" in done.stderr


def test_secret_from_a_file_is_masked_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    for arguments in (("show",), ("show", "--json"), ("show", "FD_API_KEY"), ("check",), ("check", "--json")):
        done = fdcache("env", *arguments, FD_API_KEY_FILE=str(path))
        assert done.returncode == 0
        assert SECRET not in everything(done)
    told = shown(FD_API_KEY_FILE=str(path))["FD_API_KEY"]
    assert (told["value"], told["given_as"], told["changed"]) == ("********", "FD_API_KEY", True)


def test_rejected_secret_is_not_echoed(tmp_path: Path) -> None:
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


def test_diff_of_two_files_and_of_a_file_and_the_environment(tmp_path: Path) -> None:
    one, two = tmp_path / "one.env", tmp_path / "two.env"
    one.write_text(f"FD_DEBUG=1\nFDCACHE_RANKS=2\nFD_API_KEY={SECRET}\n")
    two.write_text("FD_DEBUG=yes\nFDCACHE_RANKS=4\n")
    done = fdcache("env", "diff", one, two, "--json")
    differences = {told["name"]: told for told in json.loads(done.stdout)["differences"]}
    assert done.returncode == 1
    assert set(differences) == {"FDCACHE_RANKS", "FD_API_KEY"}
    assert (differences["FDCACHE_RANKS"]["a"], differences["FDCACHE_RANKS"]["b"]) == (2, 4)
    assert SECRET not in everything(done)
    same = fdcache("env", "diff", two, FD_DEBUG="1", FDCACHE_RANKS="4")
    assert (same.returncode, same.stdout) == (0, "")
    table = fdcache("env", "diff", one)
    assert table.returncode == 1
    assert "environment" in table.stdout
    assert SECRET not in everything(table)


def test_check_and_diff_take_what_a_service_and_a_replay_start_with(tmp_path: Path) -> None:
    done = fdcache("env", "check", "--strict", FDCACHE_WRITE_POLICY="write_back")
    assert done.returncode == 0
    assert done.stdout.startswith("note: FDCACHE_WRITE_POLICY (environment), FDCACHE_HOST_MEMORY (default): ")
    file = tmp_path / "a.env"
    file.write_text("FDCACHE_WRITE_POLICY=write_back\nFDCACHE_HOST_MEMORY=0\n")
    given = {"FDCACHE_STORAGE": "local", "FDCACHE_HOST_MEMORY": "0"}
    done = fdcache("env", "diff", file, "--json", **given)
    assert done.returncode == 1
    assert [each["name"] for each in json.loads(done.stdout)["differences"]] == [
        "FDCACHE_WRITE_POLICY",
        "FDCACHE_STORAGE",
    ]


def test_check_blames_the_variable_that_a_folder_comes_from() -> None:
    done = fdcache("env", "check", FDCACHE_STORAGE="local", FILE_BACKEND_STORAGE_DIR="/proc/nope2")
    assert done.returncode == 78
    assert "FDCACHE_STORAGE_DIR (FILE_BACKEND_STORAGE_DIR in environment): /proc/nope2" in done.stdout


def test_diff_blames_the_file_on_the_command_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.env"
    bad.write_text("FDCACHE_RANKS=2\nwhat is this\n")
    done = fdcache("env", "diff", bad)
    assert done.returncode == 78
    assert done.stderr.startswith(f"error: {bad} ({bad}:2): it is not of the form NAME=value")
    assert "FDCACHE_ENV_FILE" not in done.stderr


def test_diff_of_a_missing_file_is_wrong_usage(tmp_path: Path) -> None:
    assert fdcache("env", "diff", tmp_path / "none.env").returncode == 2


def test_template_writes_and_checks_a_file(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    template = ("env", "template", "--format", "markdown", "--output", page)
    assert fdcache(*template, "--check").returncode == 1
    assert fdcache(*template).returncode == 0
    assert fdcache(*template, "--check").returncode == 0
    page.write_text(page.read_text() + "x")
    done = fdcache(*template, "--check")
    assert done.returncode == 1
    assert str(page) in done.stderr
    done = fdcache(*template)
    assert done.returncode == 1
    assert "--force" in done.stderr
    assert page.read_text().endswith("x"), "an edited file is not overwritten unasked"
    assert fdcache(*template, "--force").returncode == 0
    assert fdcache(*template, "--check").returncode == 0
    assert fdcache(*template).returncode == 0, "a file that is right already is no mistake"
    assert fdcache("env", "template", "--check").returncode == 2
    assert fdcache("env", "template", "--output", tmp_path / "no" / "page").returncode == 1


def test_migrate_shows_first_and_writes_when_told(tmp_path: Path) -> None:
    file = tmp_path / "old.env"
    before = f"# mine\nFD_API_KEY={SECRET}\nexport FD_NVFP4_MOE_BACKEND=flashinfer-cudnn # keep\n"
    file.write_text(before)
    dry = fdcache("env", "migrate", file)
    assert dry.returncode == 0
    assert f"{file}:3: FD_NVFP4_MOE_BACKEND becomes FD_NVFP4_GEMM_BACKEND" in dry.stdout
    assert SECRET not in everything(dry)
    assert file.read_text() == before
    assert fdcache("env", "migrate", file, "--write").returncode == 0
    assert file.read_text() == before.replace("MOE", "GEMM")
    assert "no deprecated names" in fdcache("env", "migrate", file).stdout


def test_bytes_that_are_no_text_do_no_harm() -> None:
    environ = {b"FD_SERVICE_NAME": b"\xff\xfe", b"FD_\xff": b"\xff", b"FD_JOB_ID": b"ok"}
    for arguments in (["show", "--all"], ["check"], ["show", "--json"]):
        done = subprocess.run([FDCACHE, "env", *arguments], capture_output=True, env=environ, check=False)
        assert done.returncode == 78
        assert b"Traceback" not in done.stdout + done.stderr
        assert b"FD_SERVICE_NAME" in done.stdout + done.stderr


def test_deprecated_name_is_reported_with_its_replacement() -> None:
    done = fdcache("env", "check", FD_NVFP4_MOE_BACKEND="flashinfer-cudnn")
    assert done.returncode == 0
    assert "use FD_NVFP4_GEMM_BACKEND" in done.stdout
