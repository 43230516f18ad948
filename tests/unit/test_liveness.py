"""Liveness of processes, seen from another."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fdcache.service.wire.liveness import LiveFile, Watch, live_processes
from tests.service_help import until

_HOLDER = """
import sys
from pathlib import Path
from fdcache.service.wire.liveness import LiveFile
import msgspec
held = LiveFile(Path(sys.argv[1]))
print(msgspec.json.encode(held.live).decode(), flush=True)
sys.stdin.read()
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_visible_process_is_watched_by_its_pid(tmp_path: Path) -> None:
    process = holder(tmp_path)
    assert process.stdout is not None
    (live,) = [live for _ in [process.stdout.readline()] for live in live_processes(tmp_path)]
    watch = Watch(live)
    assert watch.pidfd is not None
    assert not watch.is_gone()
    process.kill()
    until(watch.is_gone, "its end is seen")
    process.wait()
    watch.remove_file()
    assert list(tmp_path.iterdir()) == []


def test_a_process_of_another_container_is_watched_by_its_lock(tmp_path: Path) -> None:
    process = holder(tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    (live,) = live_processes(tmp_path)
    watch = Watch(msgspec.structs.replace(live, pid_namespace=live.pid_namespace + 1))
    assert watch.pidfd is None
    assert not watch.is_gone()
    process.kill()
    process.wait()
    assert watch.is_gone()


def test_a_reused_process_id_is_told_apart_by_its_start_time(tmp_path: Path) -> None:
    held = LiveFile(tmp_path)
    watch = Watch(msgspec.structs.replace(held.live, start_time=held.live.start_time - 1))
    assert watch.pidfd is None
    held.close()
    assert watch.is_gone()


def test_a_process_that_closed_its_file_counts_as_gone(tmp_path: Path) -> None:
    held = LiveFile(tmp_path)
    watch = Watch(held.live)
    assert not watch.is_gone()
    held.close()
    assert watch.is_gone()
    watch.close()


def test_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "fdcache-live-0123").write_bytes(b"{")
    held = LiveFile(tmp_path)
    assert [live.path for live in live_processes(tmp_path)] == [held.live.path]
    assert len(list(tmp_path.iterdir())) == 1
    held.close()


def test_a_file_in_the_making_is_not_taken_for_that_of_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, looks = fcntl.flock, [tmp_path]

    def after_a_look(*arguments: Any) -> None:
        while looks:
            assert list(live_processes(looks.pop())) == []
        flock(*arguments)

    with monkeypatch.context() as planted:
        planted.setattr(fcntl, "flock", after_a_look)
        file = LiveFile(tmp_path)
    assert list(live_processes(tmp_path)) == [file.live]
    file.close()
    assert list(tmp_path.iterdir()) == []
