"""``python -m examples.paddle_engine``."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.paddle_engine.kv_cache import FdcacheBlocks, Prompt

demo = pytest.importorskip("examples.paddle_engine.__main__")


TINY = [
    *("--requests", "6", "--scale", "12", "--vocab", "64", "--layers", "2", "--hidden", "32"),
    *("--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--ffn", "32"),
]


def test_the_demo_finds_all_tokens_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    assert demo.main([*TINY, "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for words in ("TTFT, mean (ms)", "throughput (tokens/s)", "device", "host", "near ties: 0"):
        assert words in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_demo_fails_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admit = FdcacheBlocks.admit

    def claim_too_much(cache: FdcacheBlocks, prompt: Prompt) -> int | None:
        found = admit(cache, prompt)
        return None if found is None else min(found + 8, len(prompt.tokens) - 1)

    monkeypatch.setattr(FdcacheBlocks, "admit", claim_too_much)
    assert demo.main(TINY) == 1
    assert "instead of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--latent-dim", "8", "--kv-dtype", "fp8"], "kv_dtype"),
        (["--heads", "3", "--kv-heads", "2"], "kv_heads"),
        (["--ranks", "3"], "ranks"),
        (["--kv-dtype", "int4"], "int4"),
        (["--server", "ipc:///run/none.sock", "--storage", "/tmp"], "server"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        demo.main([*TINY, *flags])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
