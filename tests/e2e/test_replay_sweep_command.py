"""``fdcache replay --sweep``: its output, exit status, pictures and errors."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fdcache.settings.cache import CacheSettings, EvictionPolicy
from tests.commands import FDCACHE, Done, run_command
from tests.e2e.test_replay_command import LINE, trace, wait_until_gone
from tests.service_help import until

DEFAULT = CacheSettings().eviction.value


def sweep(*arguments: object, **environment: str) -> Done:
    return run_command(("replay", "--requests", 60, *arguments), {**os.environ, **environment})


def points(done: Done) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return found


def test_json_is_exactly_one_object_with_every_point() -> None:
    done = sweep("--sweep", "device-blocks=100..400/x2", "--optimum", "--jobs", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert (found["axis"], found["interrupted"], found["failures"]) == ("device-blocks", False, [])
    assert found["settings"]["host_memory"] == 0
    assert "device_blocks" not in found["settings"]
    assert [point["blocks"] for point in found["points"]] == [100, 200, 400]
    assert [point["memory_bytes"] for point in found["points"]] == [8192 * n for n in (100, 200, 400)]
    for point in found["points"]:
        learned = point["policies"][DEFAULT]
        assert 0 < learned["hit_rate"] <= point["optimum"] < 1
        assert learned["hit_rate"] == pytest.approx(
            learned["hit_tokens"]["device"] / learned["prompt_tokens"], abs=1e-6
        )
        assert learned["requests"] == 60


def test_a_table_has_a_row_for_each_capacity() -> None:
    done = sweep("--sweep", "host-memory=0,1MiB,1GiB", "--device-blocks", 100, "--optimum", "--jobs", 1)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()
    assert header.split("  ")[0] == "host memory"
    assert header.split()[-3:] == ["blocks", DEFAULT, "optimum"]
    assert [row.split()[:2] for row in rows] == [["0B", "0"], ["1MiB", "126"], ["1GiB", "129,055"]]
    assert all(cell.endswith("%") for row in rows for cell in row.split()[2:])


def test_the_workload_and_the_seed_are_those_of_a_replay(tmp_path: Path) -> None:
    arguments = ("--sweep", "device-blocks=150", "--json")
    chat, again, other = (points(sweep(*arguments, "--seed", seed)) for seed in (0, 0, 1))
    assert chat == again != other
    rag = points(sweep(*arguments, "--workload", "rag"))
    assert rag[0]["policies"][DEFAULT]["prompt_tokens"] != chat[0]["policies"][DEFAULT]["prompt_tokens"]
    recorded = trace(tmp_path / "t.jsonl", *[LINE] * 3)
    (point,) = points(sweep(recorded, *arguments))
    assert point["policies"][DEFAULT]["hit_tokens"] == {"device": 2 * 896, "host": 0}


@pytest.mark.parametrize(("name", "start"), [("sizes.png", b"\x89PNG"), ("sizes.svg", b"<?xml")])
def test_a_picture_is_written(tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    done = sweep(
        "--sweep", "device-blocks=100,300", "--optimum", "--plot", tmp_path / name, "--jobs", 1, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert len(points(done)) == 2
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_failing_point_is_named_and_the_others_are_printed() -> None:
    done = sweep("--sweep", "device-blocks=3,300")
    assert done.returncode == 1
    failed, fine = done.stdout.splitlines()[1:]
    assert failed.split()[1:] == ["3", "failed"]
    assert fine.split()[2].endswith("%")
    assert done.stderr == (
        f"error: {DEFAULT}, 3 device blocks: each of the 60 requests is larger than the device tier, "
        "3 blocks of 64 tokens\n"
    )
    small = sweep("--sweep", "host-memory=1KiB,1MiB", "--jobs", 1, "--json")
    assert small.returncode == 1
    assert "less than one block of 8320 bytes" in json.loads(small.stdout)["failures"][0]["reason"]
    assert "error" in points(small)[0]["policies"][DEFAULT]


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    done = sweep(trace(tmp_path / "empty.jsonl", "", "  "), "--sweep", "device-blocks=100", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("empty.jsonl: the trace has no request, so that nothing would be checked\n")


def test_a_malformed_trace_is_reported_once(tmp_path: Path) -> None:
    path = trace(tmp_path / "bad.jsonl", LINE, "{oops")
    done = sweep(path, "--sweep", "device-blocks=100,200")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count(f"{path}, line 2, field the whole line: ") == 1


def test_verification_compares_the_reused_blocks() -> None:
    arguments = ("--sweep", "host-memory=1MiB,4MiB", "--device-blocks", 100)
    done = sweep(*arguments, "--verify", "sample", "--json")
    assert done.returncode == 0, done.stderr
    for compared, fast in zip(points(done), points(sweep(*arguments, "--json")), strict=True):
        assert compared["policies"][DEFAULT].pop("verified_blocks") > 0
        assert fast["policies"][DEFAULT].pop("verified_blocks") == 0
        assert compared == fast


@pytest.mark.parametrize(
    ("arguments", "option", "remedy"),
    [
        (["--sweep", "blocks=1"], "--sweep", "write device-blocks=VALUES or host-memory=VALUES"),
        (["--sweep", "device-blocks=1..9"], "--sweep", "A..B/xF"),
        (["--sweep", "device-blocks=9", "--device-blocks", "9"], "--device-blocks", "leave it out"),
        (["--sweep", "host-memory=9G", "--host-memory", "9G"], "--host-memory", "leave it out"),
        (["--sweep", "device-blocks=9", "--storage", "."], "--storage", "leave it out"),
        (["--sweep", "device-blocks=9", "--speed", "1"], "--speed", "leave it out"),
        (["--sweep", "device-blocks=9", "--server", "a/b"], "--server", "leave it out"),
        (["--sweep", "device-blocks=9", "--jobs", "0"], "--jobs", "greater than or equal to 1"),
        (["--sweep", "device-blocks=9", "--plot", "x.docx"], "--plot", "must end in one of"),
        (["--sweep", "device-blocks=9", "--eviction", "lru,fifo"], "--eviction", "'fifo' is not one of lru"),
        (["--optimum"], "--optimum", "--sweep"),
        (["--jobs", "2"], "--jobs", "--sweep"),
        (["--eviction", "fifo"], "--eviction", "'fifo' is not one of lru"),
    ],
)
def test_an_invalid_option_names_the_remedy(arguments: list[str], option: str, remedy: str) -> None:
    done = sweep(*arguments)
    assert done.returncode == 2
    assert option in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_any_number_of_requests_may_be_in_flight() -> None:
    done = sweep("--sweep", "device-blocks=900", "--concurrency", 5000, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"]["concurrency"] == 5000


def test_policies_come_from_the_settings() -> None:
    names = ",".join([*EvictionPolicy, EvictionPolicy.LRU])
    done = sweep("--sweep", "device-blocks=200", "--eviction", names, "--json")
    assert list(points(done)[0]["policies"]) == list(EvictionPolicy)
    (point,) = points(sweep("--sweep", "device-blocks=200", "--json", FDCACHE_EVICTION="lru"))
    assert list(point["policies"]) == ["lru"]


def test_the_environment_applies_and_storage_and_services_take_no_part(tmp_path: Path) -> None:
    done = sweep(
        "--sweep",
        "device-blocks=100",
        "--json",
        FDCACHE_HOST_MEMORY="4MiB",
        FDCACHE_SERVER=f"ipc://{tmp_path}/none.sock",
        FDCACHE_BLOCK_SIZE="32",
    )
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)["settings"]
    assert (settings["host_memory"], settings["block_size"]) == (4 << 20, 32)
    assert points(done)[0]["policies"][DEFAULT]["hit_tokens"]["host"] > 0
    assert done.stderr == ""


def test_a_bar_is_shown_on_a_terminal_unless_the_output_is_json() -> None:
    for extra in ((), ("--json",)):
        ours, theirs = pty.openpty()
        command = [FDCACHE, "replay", "--requests", "150", "--sweep", "device-blocks=100,200", *extra]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs) as process:
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # the terminal's other end is closed: the process has ended
                while part := os.read(ours, 4096):
                    shown += part
            process.communicate(timeout=120)
        os.close(ours)
        assert process.returncode == 0
        assert (b"sweep" in shown) == (not extra)


def test_an_interrupt_ends_every_process_and_prints_what_there_is(tmp_path: Path) -> None:
    endless = tmp_path / "endless.jsonl"
    os.mkfifo(endless)
    command = [
        FDCACHE,
        "replay",
        str(endless),
        "--sweep",
        "device-blocks=100..5000/200",
        "--json",
        "--jobs",
        "2",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with contextlib.suppress(BrokenPipeError), endless.open("w") as lines:
        for index in range(8_000):
            lines.write(json.dumps({**LINE, "hash_ids": [index, index % 20]}) + "\n")
    wait_for_children(process.pid, 2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err == ""
    found = json.loads(out)
    assert found["interrupted"] is True
    assert sum(bool(point["policies"]) for point in found["points"]) < 200
    wait_until_gone(process.pid)


def wait_for_children(parent: int, count: int) -> None:
    """Wait until that many processes run tasks."""

    def running() -> bool:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        names = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
        return sum(b"spawn_main" in name for name in names) >= count

    until(running, "the processes of the sweep have started")
