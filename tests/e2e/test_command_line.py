"""The command line as a whole: help, unknown commands, settings that any command reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer import Context
from typer.core import TyperGroup
from typer.main import get_command

from fdcache_cli.commands import make_app
from tests.commands import FDCACHE, everything, fdcache


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"]])
def test_the_first_pages_import_almost_nothing(words: list[str]) -> None:
    program = (
        "import sys, importlib.util; before = set(sys.modules); from fdcache_cli.main import run\n"
        f"sys.argv[1:] = {words}\n"
        "try: run()\n"
        "except SystemExit as end: print(end.code, *sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    status, *loaded = done.stderr.split()
    assert status == "0" and done.stdout.startswith(("fdcache ", "Usage: fdcache"))
    assert not {"typing", "re", "pathlib", "contextlib", "typer", "dataclasses", "subprocess"} & set(loaded)
    assert len([name for name in loaded if not name.startswith("fdcache")]) <= 8


def test_alone_it_says_what_to_do_next(tmp_path: Path) -> None:
    first = fdcache(XDG_CONFIG_HOME=str(tmp_path))
    assert first.returncode == 0
    assert "fdcache doctor" in first.stdout and "fdcache init" in first.stdout
    file = tmp_path / "fdcache/fdcache.env"
    file.parent.mkdir()
    file.touch()
    second = fdcache(XDG_CONFIG_HOME=str(tmp_path))
    assert f"export FDCACHE_ENV_FILE={file}" in second.stdout and "fdcache serve" in second.stdout
    assert "export" not in fdcache(FDCACHE_ENV_FILE=str(file)).stdout


def test_the_help_lists_every_option_and_command() -> None:
    shown = fdcache("--help").stdout
    app = get_command(make_app())
    assert isinstance(app, TyperGroup)
    options = {option for parameter in app.params for option in parameter.opts if option.startswith("--")}
    commands = app.list_commands(Context(app))
    assert all(name in shown for name in (*options, *commands, "--version"))


def test_help_imports_neither_pydantic_nor_rich_nor_asyncio() -> None:
    program = (
        "import sys; from fdcache_cli.main import run\n"
        "for words in (['--help'], ['-h'], ['env', '--help']):\n"
        "    sys.argv[1:] = words\n"
        "    try: run()\n"
        "    except SystemExit as end: print(end.code, file=sys.stderr)\n"
        "heavy = [m for m in ('pydantic', 'rich', 'asyncio', 'fdcache.settings') if m in sys.modules]\n"
        "print(heavy, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "0", "0", "[]"]
    assert done.stdout.count("Usage: fdcache") == 3
    assert "template" in done.stdout


@pytest.mark.parametrize(
    ("words", "meant"), [(["evn"], "env"), (["inspect", "tires"], "tiers"), (["env", "tmeplate"], "template")]
)
def test_an_unknown_command_is_a_usage_error_naming_the_nearest(words: list[str], meant: str) -> None:
    done = fdcache(*words)
    assert done.returncode == 2
    assert f"there is no command '{words[-1]}'; did you mean '{meant}'?" in done.stderr


def test_a_refused_choice_is_named_first() -> None:
    for words in (
        ["replay", "--workload", "chatt"],
        ["reset", "--tier", "gpu"],
        ["env", "template", "--format", "x"],
    ):
        done = fdcache(*words)
        assert done.returncode == 2
        assert f"Invalid value for '{words[-2]}': '{words[-1]}' is not one of '" in done.stderr


def test_help_is_an_option() -> None:
    for words in (["help"], ["inspect", "help"]):
        assert "there is no command 'help'; did you mean --help?" in fdcache(*words).stderr


def test_the_installed_command_prints_its_version() -> None:
    done = subprocess.run([FDCACHE, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fdcache ")


def test_the_usage_line_names_arguments_once() -> None:
    assert "[[" not in fdcache("env", "show", "--help").stdout + fdcache("env", "diff", "--help").stdout


def test_a_bad_configuration_ends_any_command_with_status_78() -> None:
    done = fdcache("replay", "--requests", "1", FDCACHE_RANKS="many", FD_DEBUG="2")
    assert done.returncode == 78
    assert "FDCACHE_RANKS" in done.stderr
    assert "FD_DEBUG" in done.stderr
    assert "Traceback" not in everything(done)


def test_variables_of_the_engine_alone_stop_no_command(tmp_path: Path) -> None:
    environ = {"FD_ATTENTION_BACKEND": "FLASH_ATTN", "FD_MOE_BACKEND": "Cutlass", "FD_PD_REORDER": "x"}
    for command in (("serve", "--check"), ("replay", "--requests", "2")):
        assert fdcache(*command, **environ).returncode == 0, command
    assert "'x' is not a flag" in fdcache("env", "check", **environ).stdout


@pytest.mark.parametrize("command", [("inspect", "tiers"), ("reset", "--yes")])
def test_invalid_settings_do_not_lock_operators_out_of_a_service(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    wrong = {"FDCACHE_WRITE_POLICY": "wrong", "FD_PD_REORDER": "x", "FDCACHE_RUNTIME_DIR": str(tmp_path)}
    done = fdcache(*command, **wrong)
    assert done.returncode == 1
    assert f"ipc://{tmp_path}/fdcache.sock" in done.stderr
    assert "is `fdcache serve` running?" in done.stderr
    assert done.stderr.count("warning: ") == 2
    assert fdcache(*command, FDCACHE_RUNTIME_DIR_FILE="/no/such/file").returncode == 78
