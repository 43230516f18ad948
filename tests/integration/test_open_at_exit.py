"""Processes that end with a controller open, as after an exception: it is closed in order, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_build import ROOT

PROGRAM = """
import sys, threading
from pathlib import Path
from fdcache.settings.cache import StorageTierSettings
from fdcache.storage.connector import ConnectorContext
from fdcache.storage.factory import open_storage
from tests.swaps import Worker, plan, uniform_layout

how, directory = sys.argv[1:]

def serve(end):
    worker = Worker(uniform_layout(), device_blocks=64, host_blocks=64)
    tier = StorageTierSettings(connector="local", directory=Path(directory), size=1 << 24)
    storage = open_storage(ConnectorContext(worker.layout, 0, tier))
    worker.controller.initialize_storage(storage)
    worker.run(plan(1, backup=[(slot, slot) for slot in range(64)]))
    for number in range(2, 6):
        worker.controller.submit_swap_tasks(plan(number, load=[(slot, slot) for slot in range(64)]))
    end(worker)

def fail(worker):
    raise ValueError("the engine has a bug")

def in_a_thread():
    began = threading.Event()
    def stay(worker):
        began.set()
        threading.Event().wait()
    threading.Thread(target=serve, args=(stay,), daemon=True).start()
    began.wait()

if how == "raises":
    serve(fail)
elif how == "forgets":
    serve(lambda worker: None)
else:
    in_a_thread()
print("END")
"""


@pytest.mark.parametrize("how", ["raises", "forgets", "is in a thread that never ends"])
def test_a_process_that_ends_with_its_controller_open_says_nothing_of_leaks(tmp_path: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "nanobind" not in done.stderr, done.stderr
    if how == "raises":
        assert done.returncode == 1 and done.stderr.endswith("ValueError: the engine has a bug\n")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "END\n", "")


KEPT = """
import sys, threading
from fdcache import CacheManager, CacheSettings, _core
from tests.swaps import uniform_layout

if sys.argv[1] == "on":
    _core.set_leak_warnings(True)
manager = CacheManager(CacheSettings(device_blocks=64, host_memory="1MiB"), uniform_layout())
threading.Thread(target=lambda kept: threading.Event().wait(), args=(manager,), daemon=True).start()
raise ValueError("the engine has a bug")
"""

REPLAYED = """
import sys
from fdcache import _core
from fdcache_cli.main import run

_core.set_leak_warnings(True)
sys.argv = ["fdcache", "replay", "--requests", "20", "--storage", sys.argv[1], "--storage-size", "1MiB"]
run()
"""


def ends(program: str, argument: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, argument],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_error_is_the_last_line_though_a_thread_keeps_a_manager() -> None:
    done = ends(KEPT, "off")
    assert "nanobind" not in done.stderr
    assert done.stderr.endswith("ValueError: the engine has a bug\n")


def test_what_is_left_at_the_end_is_reported_on_demand() -> None:
    done = ends(KEPT, "on")
    assert "nanobind: leaked" in done.stderr and "fdcache._core" in done.stderr


def test_a_replay_leaves_no_native_object(tmp_path: Path) -> None:
    done = ends(REPLAYED, str(tmp_path))
    assert (done.returncode, "nanobind" in done.stderr) == (0, False), done.stderr
