"""Logs that help to find a fault: each request's story, the level and folder of the settings, a crash's traceback."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache.manager import Request
from fdcache.settings.logs import LogFile
from tests.offload_engine import BLOCK as OFFLOAD_BLOCK
from tests.offload_engine import OffloadEngine
from tests.service_help import TIMEOUT, ServiceProcess, arguments, until

ROOT = Path(__file__).parent.parent.parent

ENGINE = """
import time
from fdcache.controller.cache_controller import CacheController
from fdcache.manager import CacheManager, MatchStatus, Request
from fdcache.settings import Settings
from tests.storage_help import storage_layout

layout = storage_layout()
settings = Settings.load(defaults={
    "FDCACHE_DEVICE_BLOCKS": 30,
    "FDCACHE_WRITE_POLICY": "write_through",
    "FDCACHE_PREFETCH_POLICY": "wait_complete",
})
manager = CacheManager.from_settings(layout, settings)
controller = CacheController.from_settings(layout, settings)
controller.initialize_kv_cache(30)
controller.initialize_host_cache(manager.host_cache)
if settings.storage_tier.is_on:
    manager.restore_storage([controller.open_storage()])

def settle():
    for _ in range(200):
        plans = manager.take_plans()
        for plan in plans:
            controller.submit_swap_tasks(plan)
        reports = controller.wait_reports(30)
        manager.apply(reports)
        if not plans and not reports:
            return

def serve(name, tokens):
    request = Request(name, tokens)
    manager.begin([request])
    while manager.match_prefix([request])[0].status is MatchStatus.DEFERRED:
        settle()
    assert manager.allocate_device_blocks([(request, len(tokens))])[0].ok
    settle()
    manager.commit([(request, len(tokens))])
    manager.finish([request])
    settle()

def wait_for(done):
    for _ in range(4000):
        if done():
            return
        settle()
        time.sleep(0.005)
    raise AssertionError("it never comes")

def is_on_host():
    probe = Request("probe", tokens)
    found = manager.match_prefix([probe])[0].num_host_blocks
    manager.finish([probe])
    return found == 4

tokens = [7] * (4 * layout.block_size + 1)
wait_for(lambda: manager._tiers.host.index.room >= 4)
serve("first-request", tokens)
manager._reset_device()
wait_for(is_on_host)
serve("second-request", tokens)
large = Request("too-large", [9] * 40 * layout.block_size)
manager.match_prefix([large])
assert not manager.allocate_device_blocks([(large, 40 * layout.block_size)])[0].ok
manager.finish([large])
controller.shutdown()
manager.close()
"""

CRASH = """
from fdcache.service.server.service import Service
def crash(*arguments):
    raise RuntimeError("a planted fault")
Service.tick = crash
from fdcache_cli.main import run
import sys
sys.argv = ["fdcache", "serve"]
run()
"""

THREAD_CRASH = """
import threading
from fdcache.service.server.service import Service
def crash(*arguments):
    raise RuntimeError("a planted fault")
tick = Service.tick
def start(*arguments):
    Service.tick = tick
    threading.Thread(target=crash, name="planted").start()
    return tick(*arguments)
Service.tick = start
from fdcache_cli.main import run
import sys
sys.argv = ["fdcache", "serve"]
run()
"""


def run_engine(folder: Path, **settings: str) -> str:
    """Run two requests of one prompt, of which the second loads, and one that finds no room; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def lines_of(path: Path) -> list[dict[str, Any]]:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return [json.loads(line) for line in path.read_text().splitlines()]


def story(lines: list[dict[str, Any]], request: str) -> list[str]:
    return [line["message"].partition(": ")[2] for line in lines if line.get("request") == request]


def assert_stories(lines: list[dict[str, Any]], *, before: tuple[str, ...] = ()) -> None:
    assert [each.split(":")[0] for each in story(lines, "first-request")] == [
        *before,
        "matched 0 tokens",
        "allocated 5 blocks",
        "finished",
    ]
    assert [each.split(":")[0] for each in story(lines, "second-request")] == [
        *before,
        "matched 64 tokens",
        "allocated 5 blocks, a load is planned",
        "load confirmed up to token 64",
        "finished",
    ]
    assert "no allocation: no_blocks, 10 blocks short" in story(lines, "too-large")
    assert any(
        line["message"].startswith("TransferPlan(") and "load of 4" in line["message"] for line in lines
    )


def test_an_embedded_manager_writes_the_story_of_each_request(tmp_path: Path) -> None:
    settings = {
        "FD_LOG_DIR": str(tmp_path / "logs"),
        "FDCACHE_HOST_MEMORY": "1MiB",
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(tmp_path / "blocks"),
        "FDCACHE_STORAGE_SIZE": "4MiB",
    }
    printed = run_engine(tmp_path, FD_LOG_LEVEL="DEBUG", **settings)
    (file,) = (tmp_path / "logs").iterdir()
    lines = lines_of(file)
    assert_stories(lines, before=("reads from storage may begin, for a path of 4 blocks",))
    assert "request second-request: load confirmed" in printed, "the application has no handler of its own"
    assert any(
        "storage task" in line["message"] and "store of 4 of 4 blocks" in line["message"] for line in lines
    )
    run_engine(tmp_path, FD_DEBUG="1", **settings)
    files = list((tmp_path / "logs").iterdir())
    (other,) = [each for each in files if each != file]
    again = lines_of(other)
    assert story(again, "first-request")[1] == "match deferred"
    assert any("read of 4 blocks ordered" in line["message"] for line in again)
    assert any(
        "storage task" in line["message"] and "prefetch of 4 of 4" in line["message"] for line in again
    )


def test_the_manager_of_an_engine_with_its_own_device_cache_tells_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = OffloadEngine()
    tokens = [*range(1, 2 * OFFLOAD_BLOCK + 1), 7]
    engine.stored("first", tokens, [0, 1])
    with caplog.at_level(logging.DEBUG, "fdcache"):
        request = Request("second", tokens)
        engine.manager.begin([request])
        engine.manager.match(request, 0)
        assert engine.manager.load(request, np.array([4, 5], np.int32)) == 2
        engine.settle()
        engine.manager.finish([request])
    told = [record.getMessage() for record in caplog.records if vars(record).get("request") == "second"]
    assert [each.removeprefix("request second: ") for each in told] == [
        "matched 8 tokens beyond the device, 0 from storage",
        "load of 2 blocks planned",
        "load confirmed up to token 8",
        "finished",
    ]
    engine.close()


def test_without_the_settings_an_embedded_manager_says_nothing(tmp_path: Path) -> None:
    printed = run_engine(tmp_path, FDCACHE_HOST_MEMORY="1MiB")
    assert "request" not in printed
    run_engine(tmp_path, FDCACHE_HOST_MEMORY="1MiB", FD_LOG_DIR=str(tmp_path / "logs"))
    (file,) = (tmp_path / "logs").iterdir()
    assert not [line for line in lines_of(file) if line["level"] == "DEBUG"]


def test_files_of_engines_that_have_ended_are_bounded(tmp_path: Path) -> None:
    for process in range(5):
        path = tmp_path / f"fdcache-engine-{2**22 + process}.log"
        path.write_text("")
        os.utime(path, (process, process))
    run_engine(tmp_path, FDCACHE_HOST_MEMORY="1MiB", FD_LOG_DIR=str(tmp_path), FD_LOG_BACKUP_COUNT="2")
    kept = {path.name for path in tmp_path.iterdir()}
    assert len(kept) == 3
    assert {f"fdcache-engine-{2**22 + process}.log" for process in (3, 4)} <= kept


def test_a_service_and_its_engine_write_what_they_do(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    settings = {"FD_LOG_DIR": str(logs), "FD_LOG_LEVEL": "DEBUG"}
    with ServiceProcess(tmp_path / "s", **settings) as service:
        service.start()
        run_engine(tmp_path, FDCACHE_SERVER=service.address, **settings)
        assert service.terminate() == 0
    told = [line["message"] for line in lines_of(logs / "fdcache-serve.log")]
    assert any("registered: process" in each for each in told)
    assert any("said goodbye" in each for each in told)
    (engine,) = logs.glob("fdcache-engine-*.log")
    assert_stories(lines_of(engine))


@pytest.mark.parametrize(("program", "ends"), [(CRASH, True), (THREAD_CRASH, False)])
def test_a_crash_of_the_service_is_in_its_log_file(tmp_path: Path, program: str, ends: bool) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    texts = {name: str(value) for name, value in arguments(folder).items()}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **texts, "FD_LOG_DIR": str(tmp_path / "logs")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    file = tmp_path / "logs" / "fdcache-serve.log"
    try:
        until(lambda: file.exists() and "planted fault" in file.read_text(), "the crash is logged")
        if ends:
            assert process.wait(TIMEOUT) == 1
    finally:
        process.terminate()
        _, printed = process.communicate(timeout=TIMEOUT)
    (crash,) = [line for line in lines_of(file) if line["level"] == "CRITICAL"]
    assert "in crash" in crash["error"]
    assert crash["error"].endswith("RuntimeError: a planted fault")
    assert printed.count("a planted fault") == 1, "on standard error once"


def test_a_log_file_is_bounded_and_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("")
    path.chmod(0o644)
    handler = LogFile(path, days=2, most_bytes=1000)
    record = logging.LogRecord("fdcache", logging.INFO, "", 0, "x" * 99, (), None)
    for _ in range(100):
        handler.emit(record)
    handler.close()
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["x.log", "x.log.earlier"]
    for each in files:
        assert each.stat().st_size <= 1100
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


def test_a_log_file_that_another_program_moves_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    handler = LogFile(path, days=2, most_bytes=1000)
    record = logging.LogRecord("fdcache", logging.INFO, "", 0, "x" * 99, (), None)
    for _ in range(5):
        handler.emit(record)
    path.rename(tmp_path / "x.log.1")
    for _ in range(20):
        handler.emit(record)
    handler.close()
    assert path.stat().st_size > 0


def test_a_folder_of_logs_with_files_that_cannot_be_removed_serves_an_engine(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"fdcache-engine-99999990{number}.log").symlink_to("/nonexistent/file")
        (tmp_path / f"fdcache-engine-99999980{number}.log").mkdir()
    code = "from fdcache.settings import Settings; from fdcache.settings.logs import follow; follow(Settings.load())"
    environment = {**os.environ, "FD_LOG_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert [each for each in tmp_path.iterdir() if each.is_file()]
