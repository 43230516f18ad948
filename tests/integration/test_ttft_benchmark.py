"""The TTFT benchmark on a tiny model: it serves from every tier and counts what it moves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
ttft = pytest.importorskip("benchmarks.ttft")


def test_all_parts_run_on_a_tiny_model(tmp_path: Path) -> None:
    found = tmp_path / "ttft.json"
    flags = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--lengths",
        "64",
        "128",
        "--rounds",
        "1",
        "--sequences",
        "2",
    ]
    picture = tmp_path / "ttft.png"
    assert (
        ttft.main(
            [
                *flags,
                "--context",
                "40",
                "--storage",
                str(tmp_path),
                "--json",
                str(found),
                "--plot",
                str(picture),
            ]
        )
        == 0
    )
    data = json.loads(found.read_text())
    assert [row["prompt"] for row in data["ttft"]] == [64, 128]
    assert all(row["host ms"] > 0 and row["storage ms"] > 0 for row in data["ttft"])
    assert data["decode"]["sequences"] == 2
    assert [row["policy"] for row in data["overhead"]] == ["write_through_selective", "write_through"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_hits_come_from_the_tier_that_they_are_named_after(tmp_path: Path) -> None:
    server = ttft.Server(
        ttft.TINY, "cpu", device_blocks=16, host_blocks=32, max_positions=200, storage=tmp_path
    )
    text = ttft.prompt(ttft.TINY, 100, 1)
    first = server.first_token(text)[1]
    assert server.first_token(text)[1] == first
    assert server.manager.get_stats().counters.device_hit_tokens == 96
    server.forget_device()
    assert server.first_token(text)[1] == first
    assert server.manager.get_stats().counters.host_hit_tokens == 96
    server.forget_all_but_storage()
    assert server.first_token(text)[1] == first
    assert server.manager.get_stats().counters.storage_hit_tokens == 96
    server.close()


def test_visitors_load_and_back_up_all_the_time() -> None:
    server = ttft.Server(ttft.TINY, "cpu", device_blocks=4 * 8, host_blocks=100, max_positions=200)
    visitors = ttft.Visitors(server, blocks=4, count=6)
    before = server.manager.get_stats().counters
    for _ in range(12):
        visitors.visit()
    visitors.leave()
    after = server.manager.get_stats().counters
    assert after.blocks_loaded - before.blocks_loaded >= 12 * 2
    assert ttft.blocks_moved(after) - ttft.blocks_moved(before) >= 12 * 6
    server.close()


def test_decoding_token_by_token_is_prefilling() -> None:
    """The batched decode computes what a prefill of the same tokens does."""
    import torch

    server = ttft.Server(ttft.TINY, "cpu", device_blocks=16, host_blocks=0, max_positions=200)
    text = ttft.prompt(ttft.TINY, 40, 1)
    table = np.arange(4, dtype=np.int32)
    said = [server.prefill(text, 0, table)]
    tables = torch.arange(4)[None] + 4
    server.prefill(text, 0, table + 4)
    tokens, position = torch.tensor(said), 40
    for step in range(6):
        expected = server.prefill(np.append(text, said), 0, table)
        tokens = server.model.decode(tokens, torch.tensor([position + step]), tables)
        said.append(int(tokens))
        assert said[-1] == expected
    server.close()
