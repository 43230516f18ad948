"""The command as a process: closed and full streams, Ctrl-C during imports, users without a home, completion."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fdcache_cli import commands
from tests.commands import FDCACHE

COMMANDS = ("--version", "--help", "inspect --help", "env check", "env show --all --json", "serve --check")
HEAVY = {
    "asyncio",
    "fastapi",
    "fdcache._core",
    "fdcache.settings",
    "msgspec",
    "multiprocessing",
    "numpy",
    "pydantic",
    "rich",
    "uvicorn",
    "zmq",
}


def start(words: str, redirection: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that redirects its streams, with nothing of fdcache in its environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FD_", "FDCACHE_"))}
    line = f"exec '{FDCACHE}' {words} {redirection}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60, env=environ
    )


@pytest.mark.parametrize("words", COMMANDS)
def test_a_full_standard_output_is_an_error_in_one_line(words: str) -> None:
    done = start(words, "> /dev/full")
    (line,) = done.stderr.splitlines()
    assert (line, done.returncode) == (
        "error: standard output cannot be written: No space left on device",
        1,
    )
    assert start(words, "> /dev/full 2> /dev/full").returncode == 1


@pytest.mark.parametrize("words", COMMANDS)
def test_closed_streams_do_not_change_the_status(words: str) -> None:
    done = start(words, ">&-")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert start(words, "<&- >&- 2>&-").returncode == 0


def test_a_bad_configuration_keeps_its_status_on_a_full_disk() -> None:
    assert start("serve --host-memory many", "> /dev/full 2> /dev/full").returncode == 78


@pytest.mark.parametrize("words", ["inspect storage .", "serve --check --storage local"])
def test_a_working_directory_that_was_removed_is_an_error_in_one_line(tmp_path: Path, words: str) -> None:
    line = f"mkdir gone && cd gone && rmdir ../gone && FDCACHE_STORAGE_DIR=. exec '{FDCACHE}' {words}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stderr, done.returncode) == (
        "error: the working directory was removed; change to one that exists\n",
        1,
    )


def test_a_closed_stream_gives_its_number_to_no_file() -> None:
    program = (
        "import os, sys; from fdcache_cli import streams; streams.prepare()\n"
        "opened = os.open('/', os.O_RDONLY)\n"
        "print('lost'); sys.stdout.flush(); sys.exit(opened)"
    )
    line = f"exec '{sys.executable}' -c \"{program}\" <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], check=False).returncode > 2


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [FDCACHE, "env", "show", "--all"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.stderr, done.returncode) == ("", 1)


@pytest.mark.parametrize(
    "module",
    [
        "fdcache_cli.commands",
        "typer",
        "fdcache_cli.env",
        "typer._adapters",
        "fdcache.settings.loading",
        "msgspec",
    ],
)
def test_ctrl_c_during_an_import_ends_the_command_quietly(module: str) -> None:
    program = (
        "import os, signal, sys\n"
        "class Presses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{module}': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Presses())\n"
        "sys.argv = ['fdcache', 'env', 'check']\n"
        "from fdcache_cli.main import run\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 130)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    program = (
        "import os, signal, sys\n"
        "class Presses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Presses())\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv = ['fdcache', 'env', '--help']\n"
        "from fdcache_cli.main import run\n"
        "run()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv to become another user",
)
@pytest.mark.parametrize(
    "words", ["--help", "env check", "serve --check", "env show FDCACHE_CALIBRATION_DIR"]
)
def test_a_user_without_a_passwd_entry_runs_every_command(words: str) -> None:
    # Reading everything lets it use an interpreter in the home of root.
    reading = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    done = subprocess.run(
        ["setpriv", "--reuid", "54321", "--clear-groups", *reading, FDCACHE, *words.split()],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
        cwd="/",
    )
    assert (done.stderr, done.returncode) == ("", 0)
    if words.startswith("env show"):
        assert "/nonexistent/.cache/fdcache/calibration" in done.stdout


def imported_by(words: str) -> set[str]:
    program = (
        "import sys; from fdcache_cli.main import run\n"
        f"sys.argv = ['fdcache', *{words.split()!r}]\n"
        "try: run()\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "sys.stdout = sys.__stderr__; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "inspect --help",
        "inspect tiers --help",
        "reset storage --help",
        "serve --help",
        "env show -h",
    ],
)
def test_help_imports_none_of_what_commands_need(words: str) -> None:
    assert not HEAVY & imported_by(words)


def test_the_version_imports_not_even_typer() -> None:
    assert not (HEAVY | {"typer"}) & imported_by("--version")


@pytest.mark.parametrize("words", ["env check", "env show", "env template", "serve --check"])
def test_commands_about_settings_import_no_service(words: str) -> None:
    found = imported_by(words)
    assert "pydantic" in found
    assert not {"fastapi", "fdcache._core", "numpy", "uvicorn", "zmq"} & found


def completions(home: Path, *words: str) -> list[str]:
    """Return what bash completes after the last word, with the completion installed in ``home``."""
    typed = " ".join(f"'{word}'" for word in words)
    script = (
        "shopt -s expand_aliases; source ~/.bashrc\n"
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}\n"
        "complete -p fdcache | grep -q _fdcache_completion && _fdcache_completion fdcache\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=environment_of(home)
    )
    assert done.stderr == ""
    return done.stdout.split()


def environment_of(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": f"{Path(FDCACHE).parent}:{os.environ['PATH']}", "SHELL": "/bin/bash"}


def test_bash_completes_commands_options_and_choices_once_it_is_installed(tmp_path: Path) -> None:
    # A second command keeps bash as the parent, by which the shell is found.
    script = "fdcache --install-completion; exit $?"
    subprocess.run(
        ["bash", "--norc", "-c", script], check=True, capture_output=True, env=environment_of(tmp_path)
    )
    assert completions(tmp_path, "fdcache", "") == list(commands.COMMANDS)
    assert completions(tmp_path, "fdcache", "inspect", "t") == ["tiers", "tree", "transfers", "tenants"]
    assert completions(tmp_path, "fdcache", "inspect", "tiers", "--wa") == ["--watch"]
    assert completions(tmp_path, "fdcache", "reset", "--tier", "") == ["device", "host", "storage", "all"]


def test_a_signal_during_a_command_keeps_its_status() -> None:
    program = (
        "import os, signal; from fdcache_cli import errors\n"
        "errors.guard(lambda: os.kill(os.getpid(), signal.SIGINT))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, b"")
