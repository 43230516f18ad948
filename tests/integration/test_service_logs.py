"""The service's log: destinations, formats, levels, and secrets that must not be in it."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path

import pytest

from fdcache.errors import ServiceError
from fdcache.service.client.connection import Client, Connection
from fdcache.service.server import process
from fdcache.settings import Settings, logs
from tests.service_engine import BLOCK, Engine, ready_blocks
from tests.service_help import TIMEOUT, ServiceProcess, arguments, until

KEY, TOKEN, TENANT = "canary-key-5f3a", "canary-token-91bc", "canary-tenant-77de"
PROMPT = [1_912_837_465 + i for i in range(5 * BLOCK + 1)]


def environment(directory: Path, **others: str) -> dict[str, str]:
    texts = {name: str(value) for name, value in arguments(directory, **others).items()}
    return {**os.environ, **texts}


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The service's logger, restored after the test."""
    used = logging.getLogger("fdcache")
    former = (used.handlers[:], used.level, used.propagate)
    yield used
    for handler in used.handlers:
        handler.close()
    used.handlers[:], used.propagate = former[0], former[2]
    used.setLevel(former[1])


def test_the_debug_log_has_no_secret_token_prompt_or_tenant(tmp_path: Path) -> None:
    settings = {
        "FD_API_KEY": KEY,
        "FD_LOG_DIR": str(tmp_path / "logs"),
        "FD_LOG_LEVEL": "DEBUG",
        "FDCACHE_HTTP_ADDRESS": "127.0.0.1:0",
        "FDCACHE_TENANT_QUOTA": "0.5",
    }
    with ServiceProcess(tmp_path / "s", **settings) as service:
        service.start()
        log = tmp_path / "s.log"
        until(lambda: "ready" in log.read_text(), "the screen is there")
        port = re.search(r"http://127.0.0.1:(\d+)", log.read_text())
        assert port is not None
        engine = Engine(service.address)
        engine.serve(PROMPT, TENANT)
        until(lambda: ready_blocks(service) == 5, "the blocks are stored")
        for given in (KEY, TOKEN):
            ask = urllib.request.Request(f"http://127.0.0.1:{port[1]}/v1/stats?key={TOKEN}")
            ask.add_header("Authorization", f"Bearer {given}")
            try:
                with urllib.request.urlopen(ask, timeout=TIMEOUT) as answer:
                    assert answer.status == 200
            except urllib.error.HTTPError as error:
                assert (given, error.code) == (TOKEN, 401)
        line = Connection(service.address)
        line.socket.send(TOKEN.encode())
        line.close()
        with Client(service.address) as client:
            for what in (TOKEN, "block"):
                with pytest.raises(ServiceError):
                    client.ask(what, hash=TOKEN)
        engine.close()
        assert service.terminate() == 0
    written = (tmp_path / "logs" / "fdcache-serve.log").read_text()
    records = [json.loads(each) for each in written.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(records[0])
    assert any("registered" in record["message"] for record in records)
    assert any("goodbye" in record["message"] for record in records)
    for text in (written, log.read_text()):
        assert not [canary for canary in (KEY, TOKEN, TENANT, "19128374") if canary in text]


def test_lines_are_text_on_a_terminal_and_json_elsewhere(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "plain") as plain:
        plain.start()
        assert plain.terminate() == 0
    lines = [each for each in (tmp_path / "plain.log").read_text().splitlines() if each.startswith("{")]
    assert any("serving at" in json.loads(each)["message"] for each in lines)

    (tmp_path / "terminal").mkdir(mode=0o700)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fdcache_cli.main", "serve"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment(tmp_path / "terminal"),
    )
    os.close(theirs)
    shown = ""
    while "serving at ipc://" not in shown:
        shown += os.read(ours, 4096).decode()
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    os.close(ours)
    (line,) = [each for each in shown.splitlines() if "serving at" in each]
    assert re.match(r"\d{4}-\d\d-\d\d \S+ INFO serving at ", line)
    assert "touching memory" in shown


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_the_level_follows_the_setting(tmp_path: Path, logger: logging.Logger, level: str) -> None:
    given = {"FD_LOG_DIR": str(tmp_path), "FD_LOG_LEVEL": level}
    process.configure(Settings.load(environ={}, arguments=given))
    logger.debug("detail")
    logger.info("event")
    text = (tmp_path / "fdcache-serve.log").read_text()
    assert ("detail" in text, "event" in text) == (level == "DEBUG", True)


def test_control_characters_in_names_are_escaped() -> None:
    record = logging.LogRecord(
        "fdcache.service.server", logging.WARNING, "", 0, "client %s is silent", ("a\x1b[2J\nERROR b",), None
    )
    line = logs.TextFormatter("%(levelname)s %(message)s").format(record)
    assert line == r"WARNING client a\x1b[2J\nERROR b is silent"


def test_backup_count_limits_the_days_kept(tmp_path: Path, logger: logging.Logger) -> None:
    for day in range(1, 6):
        (tmp_path / f"fdcache-serve.log.2020-01-0{day}").write_text("old\n")
    process.configure(
        Settings.load(environ={}, arguments={"FD_LOG_DIR": str(tmp_path), "FD_LOG_BACKUP_COUNT": 2})
    )
    logger.info("of today")
    (handler,) = [each for each in logger.handlers if isinstance(each, TimedRotatingFileHandler)]
    handler.doRollover()
    logger.info("of tomorrow")
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept[:2] == ["fdcache-serve.log", "fdcache-serve.log.2020-01-05"]
    assert len(kept) == 3
    assert "of today" in (tmp_path / kept[2]).read_text()
    assert "of tomorrow" in (tmp_path / kept[0]).read_text()


def test_without_a_directory_no_file_is_written(tmp_path: Path, logger: logging.Logger) -> None:
    process.configure(Settings.load(environ={}, arguments={}))
    assert [type(each) for each in logger.handlers] == [logging.StreamHandler]
