"""``fdcache env show`` beside a running service: its settings, and those that its options changed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.settings import VARIABLES
from tests.commands import Done, run_command
from tests.service_help import TIMEOUT, next_line, spawned, until

KEY = "hunter2-and-more"


class Node:
    """Environment in which ``fdcache serve`` runs with options."""

    process: subprocess.Popen[str]

    def __init__(self, folder: Path) -> None:
        self.environment = {
            "FDCACHE_RUNTIME_DIR": str(folder / "run"),
            "FDCACHE_ARENA_DIR": str(folder),
            "FDCACHE_HTTP_ADDRESS": "off",
            "FD_API_KEY": KEY,
        }
        self.address = f"ipc://{folder}/run/fdcache.sock"

    def run(self, *arguments: str, **environment: str) -> Done:
        done = run_command(arguments, {**self.environment, **environment})
        assert KEY not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def show_until_found(self, *arguments: str, **environment: str) -> Done:
        """Run ``env show`` until it finds the service, which on a busy machine may answer too late."""
        answers: list[Done] = []

        def found() -> bool:
            answers.append(self.run("env", "show", *arguments, **environment))
            return (
                "service at" in answers[-1].stdout + answers[-1].stderr or '"overrides"' in answers[-1].stdout
            )

        until(found, "the service is found")
        return answers[-1]

    def shown(self, *arguments: str, **environment: str) -> dict[str, Any]:
        done = self.run("env", "show", "--json", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    running = Node(folder)
    command = ("serve", "--host-memory", "4MiB", "--storage", f"{folder}/storage", "--storage-size", "8MiB")
    environment = {**os.environ, **running.environment, "FDCACHE_HOST_MEMORY": "2MiB"}
    with spawned(sys.executable, "-m", "fdcache_cli.main", *command, env=environment) as process:
        while not next_line(process).startswith("ready"):
            pass
        running.process = process
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0


def rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in text.splitlines()}


class TestOfTheService:
    @pytest.mark.parametrize("address", [[], ["ADDRESS"]], ids=["default", "named"])
    def test_the_table_names_the_option_that_set_a_value(self, node: Node, address: list[str]) -> None:
        done = node.run("env", "show", "--server", *[node.address for _ in address], "--changed")
        assert (done.returncode, done.stderr) == (0, "")
        table = rows(done.stdout)
        assert table["FDCACHE_HOST_MEMORY"][1:-2] == ["4MiB", "--host-memory", "of", "fdcache", "serve"]
        assert table["FDCACHE_STORAGE"][1:3] == ["local", "--storage"]
        assert table["FDCACHE_STORAGE_SIZE"][1:3] == ["8MiB", "--storage-size"]
        assert table["FDCACHE_HTTP_ADDRESS"][1:3] == ["off", "environment"]
        assert table["FD_API_KEY"][1:3] == ["********", "environment"]
        assert "FDCACHE_RANKS" not in table

    def test_json_has_every_setting_and_the_service(self, node: Node) -> None:
        answer = node.shown("--server", FDCACHE_HOST_MEMORY="1MiB")
        settings = {each["name"]: each for each in answer["settings"]}
        assert set(settings) == set(VARIABLES)
        told = settings["FDCACHE_HOST_MEMORY"]
        assert (told["value"], told["source"]) == (4 << 20, "argument")
        assert told["place"] == "--host-memory of fdcache serve"
        assert settings["FD_API_KEY"]["value"] == "********"
        assert settings["FDCACHE_RANKS"]["source"] == "default"
        assert answer["service"]["address"] == node.address
        assert answer["service"]["pid"] == node.process.pid

    def test_filters_are_the_same_here_and_there(self, node: Node) -> None:
        for options in (["--group", "logging"], ["--used", "FDCACHE_RANKS", "FD_LOG_DIR"]):
            here = [each["name"] for each in node.shown(*options)["settings"]]
            there = [each["name"] for each in node.shown(*options, "--server")["settings"]]
            assert here == there != []

    def test_details_list_what_an_option_overrode(self, node: Node) -> None:
        details = node.run("env", "show", "--server", "FDCACHE_HOST_MEMORY").stdout
        winner, loser, default = details.strip().splitlines()[-3:]
        assert winner.split() == ["argument", "'4MiB'", "by", "--host-memory", "of", "fdcache", "serve"]
        assert loser.split()[:2] == ["environment", "'2MiB'"]
        assert default.split() == ["default", "0"]

    def test_secrets_are_refused(self, node: Node) -> None:
        done = node.run("env", "show", "--server", "--show-secrets")
        assert done.returncode == 2
        assert "leave --server out" in done.stderr

    def test_without_a_service_it_fails_and_names_the_remedy(self, node: Node, tmp_path: Path) -> None:
        done = node.run("env", "show", "--server", f"{tmp_path}/none.sock")
        assert done.returncode == 1
        assert "fdcache serve" in done.stderr


class TestOfThisEnvironment:
    def test_a_note_lists_what_the_options_of_the_service_changed(self, node: Node) -> None:
        done = node.show_until_found(FDCACHE_STORAGE="local", FDCACHE_HOST_MEMORY="1MiB")
        assert done.returncode == 0
        (note,) = done.stderr.splitlines()
        assert f"the service at {node.address} (process {node.process.pid})" in note
        assert "FDCACHE_HOST_MEMORY=4MiB (--host-memory)" in note
        assert "FDCACHE_STORAGE_SIZE=8MiB (--storage-size)" in note
        assert "FDCACHE_STORAGE=" not in note, "it is the same here"
        assert f"`fdcache env show --server {node.address}`" in note
        assert rows(done.stdout)["FDCACHE_HOST_MEMORY"][1] == "1MiB"

    def test_json_has_the_overrides(self, node: Node) -> None:
        done = node.show_until_found("--json")
        assert done.stderr == ""
        overrides = {each["name"]: each for each in json.loads(done.stdout)["service"]["overrides"]}
        assert set(overrides) == {
            "FDCACHE_HOST_MEMORY",
            "FDCACHE_STORAGE",
            "FDCACHE_STORAGE_DIR",
            "FDCACHE_STORAGE_SIZE",
        }
        assert overrides["FDCACHE_HOST_MEMORY"]["value"] == 4 << 20

    def test_details_of_an_overridden_name_mention_it(self, node: Node) -> None:
        details = node.show_until_found("FDCACHE_HOST_MEMORY").stdout
        (line,) = (each for each in details.splitlines() if "overridden:" in each)
        assert "4MiB in the service at" in line and line.endswith("by --host-memory of fdcache serve")
        assert "overridden:" not in node.run("env", "show", "FDCACHE_RANKS").stdout
        assert (
            "overridden:"
            not in node.run("env", "show", "FDCACHE_HOST_MEMORY", FDCACHE_HOST_MEMORY="4MiB").stdout
        )

    def test_a_note_says_when_nothing_differs(self, node: Node) -> None:
        service = json.loads(node.show_until_found("--json").stdout)["service"]
        same = {each["name"]: str(each["value"]) for each in service["overrides"]}
        done = node.show_until_found(**same)
        (note,) = done.stderr.splitlines()
        assert "change no setting" in note

    def test_errors_of_the_environment_follow_the_note(self, node: Node) -> None:
        done = node.show_until_found(FDCACHE_RANKS="many")
        assert done.returncode == 78
        assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["note", "error"]

    def test_a_service_that_does_not_answer_is_ignored(self, node: Node) -> None:
        process = node.process
        process.send_signal(signal.SIGSTOP)
        try:
            done = node.run("env", "show")
        finally:
            process.send_signal(signal.SIGCONT)
        assert (done.returncode, done.stderr) == (0, "")


def test_without_a_service_nothing_is_printed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "run").mkdir(mode=0o700)
    for make in (lambda socket: None, Path.touch, _abandoned_socket):
        path = tmp_path / "run" / "fdcache.sock"
        make(path)
        done = node.run("env", "show", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["service"] is None
        path.unlink(missing_ok=True)
    assert node.run("env", "show", FDCACHE_SERVER="tcp://elsewhere:1").stderr == ""


def _abandoned_socket(path: Path) -> None:
    """Create the socket of a dead process."""
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(path))
