"""The TTFT benchmark on a tiny model serves from every tier and counts its copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from benchmarks.ttft import __main__ as ttft
from benchmarks.ttft import recompute_model
from benchmarks.ttft.attention import attend_gathered
from benchmarks.ttft.decode import Visitors, blocks_moved
from benchmarks.ttft.model import TINY
from benchmarks.ttft.prefill import NEAR_TIE, judge
from benchmarks.ttft.server import FirstToken, Server, prompt

ON_CPU = ["--shape", "tiny", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_all_parts_run_on_a_tiny_model(tmp_path: Path) -> None:
    found, picture = tmp_path / "ttft.json", tmp_path / "ttft.png"
    flags = [*ON_CPU, "--lengths", "64", "128", "--rounds", "1", "--sequences", "2", "--context", "40"]
    files = ["--storage", str(tmp_path), "--json", str(found), "--plot", str(picture)]
    assert ttft.main([*flags, *files]) == 0
    data = json.loads(found.read_text())
    assert [row["prompt"] for row in data["ttft"]] == [64, 128]
    assert all(row["host ms"] > 0 and row["storage ms"] > 0 for row in data["ttft"])
    assert [(row["prompts"], row["differ"]) for row in data["ttft"]] == [(2, 0), (2, 0)]
    swapped = [(row["a visitor"], row["blocks a step"]) for row in data["decode"]]
    assert [visitor for visitor, _ in swapped] == ["none", "each 4 steps", "each step"] * 2
    assert all(count == 0 if visitor == "none" else count > 6 for visitor, count in swapped)
    policies = ["write_through_selective", "write_through"]
    assert [(row["prompt"], row["policy"]) for row in data["overhead"]] == [
        (length, policy) for length in (64, 128) for policy in policies
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_three_ways_are_measured_from_each_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_model, "LEARNING_SECONDS", 0.0)
    found = tmp_path / "ttft.json"
    flags = [*ON_CPU, "--part", "recompute", "--lengths", "64", "--rounds", "2", "--slowed", "0.01", "0"]
    assert ttft.main([*flags, "--storage", str(tmp_path), "--json", str(found)]) == 0
    rows = json.loads(found.read_text())["recompute"]
    assert {row["disk by"] for row in rows} == {"fio" if shutil.which("fio") else "threads"}
    assert [(row["from"], row["storage GB/s"]) for row in rows] == [
        ("storage", "own"),
        ("storage", 0.01),
        ("host and storage", 0.01),
        ("host", "own"),
    ]
    assert all(row["always reuses"] == 0.75 for row in rows)  # the last block is computed
    assert all(row["samples"] == "2/2/2" for row in rows)
    assert not list(tmp_path.glob("64/*.kv"))


def test_a_different_token_fails_unless_it_is_a_near_tie() -> None:
    sure, torn = FirstToken(7, 2 * NEAR_TIE), FirstToken(8, NEAR_TIE / 2)
    assert judge([sure, sure]) == judge([torn, torn]) == "equal"
    assert judge([sure, torn]) == "near tie"
    assert judge([sure, FirstToken(8, 2 * NEAR_TIE)]) == "differ"


def test_a_wrong_block_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Server.compute

    def over_another_block(server: Server, request: Any, text: Any, counters: Any = ()) -> FirstToken:
        if request.num_cached_tokens:
            for plane in server.model.planes:
                plane[int(request.block_table[0])] = 1.0
        return compute(server, request, text, counters)

    monkeypatch.setattr(Server, "compute", over_another_block)
    assert ttft.main([*ON_CPU, "--part", "ttft", "--lengths", "64", "--rounds", "3"]) == 1


def test_hits_come_from_the_named_tier(tmp_path: Path) -> None:
    server = Server(TINY, "cpu", device_blocks=16, host_blocks=32, max_positions=200, storage=tmp_path)
    text = prompt(TINY, 100, 1)
    first = server.first_token(text)[1].token
    assert server.first_token(text)[1].token == first
    assert server.manager.get_stats().counters.device_hit_tokens == 96
    server.forget_device()
    assert server.first_token(text)[1].token == first
    assert server.manager.get_stats().counters.host_hit_tokens == 96
    server.forget_all_but_storage()
    assert server.first_token(text)[1].token == first
    assert server.manager.get_stats().counters.storage_hit_tokens == 96
    server.close()


def test_visitors_load_and_back_up_blocks_at_every_step() -> None:
    server = Server(TINY, "cpu", device_blocks=4 * 8, host_blocks=100, max_positions=200)
    visitors = Visitors(server, blocks=4, count=6)
    before = server.manager.get_stats().counters
    for _ in range(12):
        visitors.expect(1)
        visitors.visit()
    visitors.leave()
    after = server.manager.get_stats().counters
    assert after.blocks_loaded - before.blocks_loaded >= 12 * 2
    assert blocks_moved(after) - blocks_moved(before) >= 12 * 6
    server.close()


def test_decoding_gives_the_same_logits_as_prefilling() -> None:
    """The batched decode computes what a prefill of the same tokens does."""
    server = Server(TINY, "cpu", device_blocks=16, host_blocks=0, max_positions=200)
    text = prompt(TINY, 40, 1)
    table = np.arange(4, dtype=np.int32)
    said = [server.prefill(text, 0, table).token]
    tables = torch.arange(4)[None] + 4
    server.prefill(text, 0, table + 4)
    tokens, position = torch.tensor(said), 40
    for step in range(6):
        expected = server.prefill(np.append(text, said), 0, table).token
        tokens = server.model.decode(tokens, torch.tensor([position + step]), tables)
        said.append(int(tokens))
        assert said[-1] == expected
    server.close()


@pytest.mark.gpu
def test_the_kernel_equals_plain_torch_attention() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from benchmarks.ttft.paged_kernel import attend_in_place

    random = torch.Generator("cuda").manual_seed(0)

    def make(*shape: int) -> Any:
        return torch.randn(shape, generator=random, device="cuda").bfloat16()

    keys, values, query = make(100, 8, 64, 128), make(100, 8, 64, 128), make(5, 32, 128)
    tables = torch.randperm(100, generator=random, device="cuda")[:80].reshape(5, 16)
    positions = torch.tensor([0, 63, 64, 700, 1023], device="cuda")
    expected = attend_gathered(query, keys, values, tables, positions).float()
    found = attend_in_place(query, keys, values, tables, positions).float()
    assert float((found - expected).norm() / expected.norm()) < 1e-2
