"""The control of the benchmark that only copies: what it copies, and which prompts it finds."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.vllm.least import Copies, LeastConnector, Loads
from benchmarks.vllm.shapes import BLOCK
from fdcache.controller.cache_controller import CacheController
from fdcache.devices.cpu import CpuDevice
from fdcache.layout import KVLayout
from fdcache.settings.cache import CopySettings

BLOCKS, LAYERS = 12, 3


@pytest.fixture
def pages() -> list[torch.Tensor]:
    rng = np.random.default_rng(3)
    return [torch.from_numpy(rng.integers(0, 256, (BLOCKS, 4096), np.uint8)) for _ in range(LAYERS)]


@pytest.fixture
def copies(pages: list[torch.Tensor]) -> Iterator[Copies]:
    layout = KVLayout.uniform(
        model="least",
        revision="1",
        num_layers=LAYERS,
        block_size=BLOCK,
        kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
    )
    settings = CopySettings()
    controller = CacheController(settings, layout, device=CpuDevice.of(settings))
    controller.register_kv_cache([page[:, at : at + 2048] for page in pages for at in (0, 2048)])
    made = Copies(controller, 6, on_gpu=False)
    yield made
    made.close()


def test_a_load_copies_the_records_of_the_host_into_the_blocks(
    copies: Copies, pages: list[torch.Tensor]
) -> None:
    kept = [page.clone() for page in pages]
    for page in pages:
        page.zero_()
    copies.begin("r", [9, 2, 7])
    assert copies.ended() == {"r"}
    assert copies.ended() == set()
    for page, before in zip(pages, kept, strict=True):
        assert torch.equal(page[[9, 2, 7]], before[:3])
        assert not page[[0, 1, 3, 4, 5, 6, 8, 10, 11]].any()


def test_a_prompt_is_found_once_an_earlier_one_began_alike_and_its_last_block_is_computed() -> None:
    connector: Any = LeastConnector.__new__(LeastConnector)
    connector._known, connector._begun = set(), Loads()
    first = SimpleNamespace(request_id="a", prompt_token_ids=list(range(50)), num_prompt_tokens=50)
    assert connector.get_num_new_matched_tokens(first, 0) == (0, False)
    connector.request_finished(first, [])
    other = SimpleNamespace(request_id="b", prompt_token_ids=list(range(20)) + [5] * 45, num_prompt_tokens=65)
    assert connector.get_num_new_matched_tokens(other, 16) == (48, True)
    connector.update_state_after_alloc(other, SimpleNamespace(get_block_ids=lambda: ([4, 6, 1, 8, 3],)), 48)
    assert connector.build_connector_meta(None).blocks == {"b": [6, 1, 8]}
    assert connector.build_connector_meta(None).blocks == {}
