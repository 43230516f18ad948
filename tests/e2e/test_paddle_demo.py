"""The demo ``python -m examples.paddle_engine``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from examples.paddle_engine import __main__ as demo
from examples.paddle_engine.comparison import NEAR_TIE, Agreement, Run, show
from examples.paddle_engine.engine import Task
from examples.paddle_engine.kv_cache import FdcacheBlocks, Prompt
from examples.paddle_engine.sampling import Sample
from fdcache import _core
from fdcache.tiers.statistics import Counters
from tests.service_help import local_service, until

ROOT = Path(__file__).parent.parent.parent

TINY = [
    *("--requests", "6", "--scale", "12", "--vocab", "64", "--layers", "2", "--hidden", "32"),
    *("--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--ffn", "32"),
]


def test_the_demo_finds_equal_tokens_and_writes_its_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.png"
    assert demo.main([*TINY, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for words in ("TTFT, mean (ms)", "throughput (tokens/s)", "device", "host", "near ties: 0"):
        assert words in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_environments_deterministic_mode_sets_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_DETERMINISTIC_MODE", "1")
    for split in (8, 64):
        monkeypatch.setenv("FD_DETERMINISTIC_SPLIT_KV_SIZE", str(split))
        engine = demo.parse([*TINY])[0].engine
        assert (engine.grid, engine.split_kv, engine.settings.cache.reuse_grid) == (split, split, split)
    assert demo.parse([*TINY, "--ordinary"])[0].engine.grid == 0


def test_storage_beside_a_service_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FDCACHE_STORAGE", "local")
    monkeypatch.setenv("FDCACHE_SERVER", "ipc:///tmp/no/such.sock")
    with pytest.raises(SystemExit):
        demo.parse([*TINY])
    (line,) = capsys.readouterr().err.splitlines()
    assert "error: FDCACHE_STORAGE=local: with FDCACHE_SERVER the storage belongs to the service" in line


@pytest.mark.parametrize("mode", [[], ["--ordinary"]], ids=["deterministic", "ordinary"])
def test_a_different_token_fails_the_demo(
    mode: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admit = FdcacheBlocks.admit

    def claim_too_much(cache: FdcacheBlocks, prompt: Prompt) -> int | None:
        found = admit(cache, prompt)
        return None if found is None else min(found + 8, len(prompt.tokens) - 1)

    monkeypatch.setattr(FdcacheBlocks, "admit", claim_too_much)
    assert demo.main([*TINY, *mode]) == 1
    assert "instead of" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_storage_that_cannot_be_opened_ends_with_an_error(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--requests", "1", "--ranks", ranks, "--kv-heads", "2")
    assert demo.main([*TINY, *few, "--storage", "/proc/none"]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_ends_with_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*TINY, "--requests", "1", "--plot", str(tmp_path / "none" / "plot.png")]) == 1
    assert "error: --plot: " in capsys.readouterr().err


def test_a_second_run_finds_the_blocks_of_the_first_in_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with local_service(tmp_path) as service:
        flags = [*TINY, "--server", service.address]
        assert demo.main(flags) == 0
        assert ", 0 host," in capsys.readouterr().out
        assert demo.main(flags) == 0
        assert ", 0 host," not in capsys.readouterr().out
        until(lambda: not service.ask("clients"), "both engines have disconnected")


def test_the_environment_alone_configures_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FDCACHE_WRITE_POLICY", "write_back")
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", "48MiB")
    monkeypatch.setenv("FDCACHE_BLOCK_SIZE", "32")
    assert demo.main([*TINY]) == 0
    out = capsys.readouterr().out
    # 2 layers of keys and values, 32 tokens of one head of 16 floats each, and a slot header
    blocks = (48 << 20) // (2 * 2 * 32 * 16 * 4 + 128)
    assert f"cache: device 200 blocks; host {blocks:,} blocks of 48MiB; write_back" in out
    assert "near ties: 0" in out


def test_an_installed_package_is_preferred_to_the_source_directory(tmp_path: Path) -> None:
    """Without an editable install's finder, the checkout's fdcache would come first in the path, and it has no core."""
    installed = tmp_path / "installed"
    shutil.copytree(ROOT / "fdcache", installed / "fdcache", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_core.__file__, installed / "fdcache")
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-m", "examples.paddle_engine", *TINY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "near ties: 0" in done.stdout


@pytest.mark.parametrize(
    ("margins", "exact", "near_ties", "differences"),
    [
        ((NEAR_TIE / 2, NEAR_TIE / 2), False, 1, 0),
        ((NEAR_TIE / 2, NEAR_TIE / 2), True, 0, 1),
        ((NEAR_TIE / 2, NEAR_TIE), False, 0, 1),
        ((NEAR_TIE, NEAR_TIE / 2), False, 0, 1),
        ((1.0, 1.0), False, 0, 1),
    ],
)
def test_a_token_may_differ_in_ordinary_mode_at_a_near_tie_only(
    margins: tuple[float, float],
    exact: bool,
    near_ties: int,
    differences: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = []
    for token, margin in zip((7, 8), margins, strict=True):
        task = Task(Prompt("p", [1, 2, 3], max_tokens=3), arrival=0.0, first_token=1.0)
        task.samples = [Sample(5, 1.0), Sample(token, margin), Sample(token, 1.0)]
        runs.append(Run([task], 1.0))
    agreement = Agreement.of(*runs, exact=exact)
    # The third token is not compared: the texts have diverged.
    assert (agreement.compared, agreement.near_ties, len(agreement.differences)) == (
        2,
        near_ties,
        differences,
    )
    show(runs[0], runs[1], Counters(), agreement)
    out = capsys.readouterr().out
    assert f"tokens equal: 1 of 2; near ties: {near_ties}" in out
    assert ("p: token 1 is 8 instead of 7" in out) == bool(differences)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--latent-dim", "8", "--kv-dtype", "fp8"], "kv_dtype"),
        (["--heads", "3", "--kv-heads", "2"], "kv_heads"),
        (["--ranks", "3"], "ranks"),
        (["--kv-dtype", "int4"], "int4"),
        (["--server", "ipc:///run/none.sock", "--storage", "/tmp"], "server"),
        (["--server", "nowhere"], "address 'nowhere'"),
        (["--requests", "0"], "--requests: 0 is less than 1"),
        (["--hidden", "0"], "hidden: 0 is less than 1"),
        (["--head-dim", "3"], "head_dim: 3 is odd"),
        (["--max-positions", "64"], "max_positions: 64"),
        (["--device-blocks", "2"], "device_blocks: they hold 32 tokens"),
    ],
)
def test_invalid_flags_exit_with_2(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main([*TINY, *flags])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
