"""``fdcache replay``: its output and exit status."""

import contextlib
import importlib.util
import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fdcache._core import PatternModel
from fdcache.replay import models
from tests.commands import FDCACHE, Done, run_command
from tests.service_help import until

REQUIRED = {
    "requests": int,
    "rejected": int,
    "prompt_tokens": int,
    "hit_tokens": dict,
    "hit_rate": float,
    "verified_blocks": int,
    "corrupt_blocks": int,
    "leaked_slots": int,
    "leaked_pins": int,
    "preemptions": int,
    "evictions": int,
    "swap": dict,
    "manager_us": dict,
    "wall_seconds": float,
    "peak_rss_bytes": int,
}
LINE = {"timestamp": 5, "input_length": 900, "output_length": 30, "hash_ids": [1, 2]}


def fdcache(*arguments: object, **environment: str) -> Done:
    return run_command(("replay", *arguments), {**os.environ, **environment})


def trace(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_json_is_exactly_one_object_with_every_field() -> None:
    done = fdcache("--requests", 60, "--device-blocks", 300, "--write-policy", "write_through", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    report = json.loads(done.stdout)
    for field, kind in REQUIRED.items():
        assert isinstance(report[field], kind), field
    assert set(report["hit_tokens"]) == {"device", "host", "storage"}
    for direction in ("h2d", "d2h"):
        assert set(report["swap"][direction]) == {"bytes", "seconds"}
    for call in ("match", "allocate", "commit", "finish"):
        assert 0 < report["manager_us"][call]["p50"] <= report["manager_us"][call]["p99"]
    assert report["requests"] == 60
    assert report["corrupt_blocks"] == report["leaked_slots"] == report["leaked_pins"] == 0
    assert report["verified_blocks"] > 0
    assert report["wall_seconds"] > 0
    assert report["peak_rss_bytes"] > 10 << 20


def test_without_a_terminal_a_table_is_printed_and_no_bar() -> None:
    done = fdcache("--requests", 20)
    assert done.returncode == 0, done.stderr
    assert "corrupt blocks" in done.stdout
    assert "hit rate" not in done.stderr


def test_a_bar_is_shown_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [FDCACHE, "replay", "--requests", "100", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed: the process has ended
            while part := os.read(ours, 4096):
                shown += part
        out, _ = process.communicate(timeout=120)
    os.close(ours)
    assert process.returncode == 0
    assert json.loads(out)["finished"] == 100
    assert b"/100" in shown
    assert b"hit rate" in shown


def test_repeated_blocks_of_a_trace_are_hits(tmp_path: Path) -> None:
    done = fdcache(trace(tmp_path / "t.jsonl", *[LINE] * 3), "--concurrency", 1, "--json")
    report = json.loads(done.stdout)
    assert report["requests"] == 3
    assert report["prompt_tokens"] == 2700
    assert report["hit_tokens"]["device"] == 2 * 896


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({**LINE, "hash_ids": "x"}, "hash_ids"),
        ({"timestamp": 5}, "input_length"),
        ("{oops", "the whole line"),
    ],
)
def test_a_malformed_line_names_file_line_and_field(tmp_path: Path, line: object, field: str) -> None:
    path = trace(tmp_path / "bad.jsonl", LINE, line)
    done = fdcache(path, "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{path}, line 2, field {field}: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "option", "remedy"),
    [
        (["--host-memory", "9000TiB"], "--host-memory", "below"),
        (["--host-memory", "1KiB"], "--host-memory", "at least 8320 bytes"),
        (["--host-memory", "much"], "--host-memory", "write 512MiB"),
        (["--device-blocks", "2000000000"], "--device-blocks", "would fit"),
        (["--kv-heads", "1000000000"], "--device-blocks", "smaller"),
        (["--host-memory", "0", "--write-policy", "write_back"], "--write-policy", "set --host-memory"),
        (["--ranks", "1", "--host-memory", "0", "--storage", "."], "--storage", "(command line)"),
        (["--chunk-tokens", "3"], "--chunk-tokens", "at least 16"),
        (["--dtype", "float12"], "--dtype", "use one of"),
        (["--layers", "100000000"], "--layers", "1024"),
        (["--seed", "-1"], "--seed", "0"),
        (["--plot", "no/such/folder.png"], "--plot", "does not exist"),
    ],
)
def test_an_invalid_option_names_the_remedy(arguments: list[str], option: str, remedy: str) -> None:
    done = fdcache(*arguments)
    assert done.returncode == 2
    assert option in done.stderr
    assert remedy in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_tier_too_small_for_any_request_ends_with_status_1() -> None:
    done = fdcache("--device-blocks", 3, "--requests", 20, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["rejected"] == 20
    assert "raise --device-blocks (FDCACHE_DEVICE_BLOCKS)" in done.stderr


@pytest.mark.parametrize(
    ("memory", "status", "said"),
    [
        ("900000GiB", 78, "error: FDCACHE_DEVICE_MEMORY (environment): "),
        ("10KiB", 1, "raise FDCACHE_DEVICE_MEMORY\n"),
    ],
)
def test_without_an_option_the_variable_is_named(memory: str, status: int, said: str) -> None:
    done = fdcache("--requests", 2, "--json", FDCACHE_DEVICE_MEMORY=memory, FDCACHE_HOST_MEMROY="1GiB")
    assert done.returncode == status
    assert said in done.stderr
    assert "--device-blocks" not in done.stderr
    assert "warning: FDCACHE_HOST_MEMROY (environment): there is no such setting" in done.stderr


def test_the_environment_applies_without_an_option() -> None:
    arguments = ("--requests", 5, "--json", "--block-size", 32)
    done = fdcache(*arguments, FDCACHE_DEVICE_BLOCKS="777", FDCACHE_BLOCK_SIZE="16")
    settings = json.loads(done.stdout)["settings"]
    assert (settings["device_blocks"], settings["block_size"]) == (777, 32)


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "replay.png"
    assert fdcache("--requests", 30, "--plot", picture).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    done = fdcache("--plot", "x.png")
    assert done.returncode == 2
    assert "pip install 'fdcache[plot]'" in done.stderr


class WrongModel:
    """Model that writes a wrong byte into every layer."""

    def __init__(self, *arguments: Any) -> None:
        self.model = PatternModel(*arguments)
        self.planes = arguments[0]

    def run_layer(self, layer: int) -> Any:
        differing = self.model.run_layer(layer)
        self.planes[1][:, 5] = 77
        return differing

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_corrupt_blocks_end_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PatternModel", WrongModel)
    done = fdcache("--requests", 30, "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["corrupt_blocks"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_ends_with_the_report_so_far(tmp_path: Path, ranks: int) -> None:
    endless = tmp_path / "endless.jsonl"
    os.mkfifo(endless)
    before = shared_memory()
    command = [FDCACHE, "replay", str(endless), "--ranks", str(ranks), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with contextlib.suppress(BrokenPipeError), endless.open("w") as lines:
        for index in range(1_000_000):
            lines.write(json.dumps({**LINE, "hash_ids": [index, index + 1]}) + "\n")
            lines.flush()
            if index == 1500:  # a pipe holds fewer lines, so some have been replayed
                os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["requests"] > 0
    assert report["leaked_slots"] == report["leaked_pins"] == report["corrupt_blocks"] == 0
    until(lambda: shared_memory() <= before, "it leaves no memory; that of other tests goes with them")
    wait_until_gone(process.pid)


def shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("fdcache*"))


def test_ranks_end_when_the_scheduler_is_killed(tmp_path: Path) -> None:
    endless = tmp_path / "endless.jsonl"
    os.mkfifo(endless)
    command = [FDCACHE, "replay", str(endless), "--ranks", "2", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    with contextlib.suppress(BrokenPipeError), endless.open("w") as lines:
        for index in range(1_000_000):
            lines.write(json.dumps({**LINE, "hash_ids": [index, index + 1]}) + "\n")
            lines.flush()
            if index == 1000:
                process.kill()
    process.wait(timeout=120)
    wait_until_gone(process.pid)


def wait_until_gone(group: int) -> None:
    """Wait for the last process of a group; multiprocessing's own helper ends a moment after its parent."""

    def is_gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    until(is_gone, "every process of the replay is gone")


def test_a_replay_without_its_service_prints_a_note_and_runs(tmp_path: Path) -> None:
    done = fdcache("--requests", 20, "--server", f"ipc://{tmp_path}/none.sock", "--json")
    assert done.returncode == 0, done.stderr
    assert f"no service at ipc://{tmp_path}/none.sock" in done.stderr
    assert json.loads(done.stdout)["hit_tokens"]["host"] == 0


def test_groups_are_replayed_and_those_out_of_range_or_place_refused() -> None:
    done = fdcache("--groups", "state,all/32,last:256/16", "--requests", 20, "--device-blocks", 900, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["settings"]["write_policy"] == "write_through"
    assert report["settings"]["groups"] == ["state/64", "all/32", "last:256/16"]
    assert report["verified_blocks"] > 0 == report["corrupt_blocks"]
    for arguments, message in (
        (("--groups", "states"), "'states' is no group"),
        (("--groups", "state,all", "--sweep", "device-blocks=9,10"), "leave it out"),
        (("--groups", "state,all", "--pd"), "a --pd does not have it"),
    ):
        refused = fdcache(*arguments, "--requests", 1)
        assert refused.returncode == 2
        assert "--groups" in refused.stderr and message in " ".join(
            refused.stderr.replace("\u2502", " ").split()
        )
