"""Two engines on Paddle, of which one hands its blocks to the other, generate the tokens of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from examples.paddle_engine.config import ModelConfig
from fdcache.manager.requests import PeerSource
from tests.paddle_help import ENGINE, MODELS, Server, assert_as_without_cache, prompt, tokens


class Pair:
    """A prefill and a decode engine in one process."""

    def __init__(self, model: ModelConfig, folder: Path, device_blocks: int = 64) -> None:
        self.model = model
        self.prefill, self.decode = (
            Server(model, replace(ENGINE, peers=(role, folder), device_blocks=device_blocks))
            for role in ("prefill", "decode")
        )

    def step(self) -> None:
        self.prefill.engine.step()
        self.decode.engine.step()

    def serve(self, count: int) -> None:
        source = tuple(self.prefill.worker.addresses())
        texts = [tokens(seed, 70 + 31 * seed, self.model.vocab) for seed in range(count)]
        names = [f"p{seed}" for seed in range(count)]
        asked = [
            prompt(name, text, source=PeerSource(name, source))
            for name, text in zip(names, texts, strict=True)
        ]
        self.prefill.submit(*(replace(each, max_tokens=1, source=None, hands_over=True) for each in asked))
        tasks = self.decode.submit(*asked)
        while self.decode.engine.waiting or self.decode.engine.running:
            self.step()
        assert_as_without_cache(self.decode, tasks)
        while self.prefill.fdcache.manager.get_stats().sending_blocks:
            self.step()
        self.prefill.finish()
        self.decode.finish()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_decode_generates_the_same_bits_from_blocks_of_prefill(model: ModelConfig, tmp_path: Path) -> None:
    pair = Pair(model, tmp_path)
    pair.serve(3)
    counts = pair.decode.fdcache.manager.get_stats().handovers
    assert [(each.result, each.transfers) for each in counts] == [("done", 3)]
    assert sum(each.blocks for each in counts) >= 15
    pair.close()


def test_requests_that_find_no_room_at_decode_are_tried_again(tmp_path: Path) -> None:
    pair = Pair(MODELS["gqa"], tmp_path, device_blocks=16)
    pair.serve(4)
    pair.close()


def test_a_name_is_free_again_once_its_blocks_are_handed_over(tmp_path: Path) -> None:
    pair = Pair(MODELS["gqa"], tmp_path)
    source = PeerSource("p", tuple(pair.prefill.worker.addresses()))
    asked = prompt("p", tokens(0, 70, pair.model.vocab), source=source)
    pair.prefill.submit(replace(asked, max_tokens=1, source=None, hands_over=True))
    while pair.prefill.engine.waiting or pair.prefill.engine.running:
        pair.prefill.engine.step()
    assert pair.prefill.fdcache.is_sending("p")
    pair.decode.submit(asked)
    while pair.prefill.fdcache.is_sending("p"):
        pair.step()
    pair.close()
