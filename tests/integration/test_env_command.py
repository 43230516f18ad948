"""``fdcache env`` as it is run: real processes, real exit statuses."""

import json
import os
import pty
import subprocess
import sys
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


def test_check_leaves_service_links_alone() -> None:
    done = fdcache("env", "check", "--strict", FDCACHE_PORT="tcp://10.0.0.1:80")
    assert done.returncode == 0
    assert "FDCACHE_PORT" not in everything(done)


def test_check_says_what_a_size_looks_like() -> None:
    done = fdcache("env", "check", FDCACHE_HOST_MEMORY="lots")
    assert done.returncode == 78
    assert "8GiB" in done.stdout


def test_check_lists_all_problems_as_json() -> None:
    done = fdcache("env", "check", "--json", FD_DEBUG="2", FD_TRACE="x", FD_LOG_DRI="x")
    told = json.loads(done.stdout)
    assert done.returncode == 78
    assert told["ok"] is False
    assert [(problem["severity"], problem["variables"]) for problem in told["problems"]] == [
        ("error", ["FD_DEBUG"]),
        ("error", ["FD_TRACE"]),
        ("warning", ["FD_LOG_DRI"]),
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
    assert all(name.startswith(("FDCACHE_", "MOONCAKE_", "MC_")) for name in shown("--used"))
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
