"""Hits of the connector with vLLM's scheduler and without a model, as the benchmark of steps counts them."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.vllm.shapes import BLOCK, LOADS, model_folder
from benchmarks.vllm.steps import SHAPE, Engine, converse


@pytest.mark.skipif(not version("vllm").startswith("0.26."), reason="the benchmark is for vLLM 0.26")
def test_every_block_that_a_former_turn_computed_is_found(tmp_path: Path) -> None:
    """The last token of a reply is sampled and never computed."""
    load = replace(LOADS["full"], turns=2)
    engine = Engine("fdcache", model_folder(SHAPE, tmp_path))
    converse(engine, load)
    engine.close()
    computed = load.first_turn + load.reply - 1
    assert engine.times.hit_tokens == load.conversations * (computed - computed % BLOCK)
    assert engine.times.beyond == 0
