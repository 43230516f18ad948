"""LMCache#4463 in LMCache's own code, which it runs where a machine has no accelerator.

pip install --target FOLDER --no-deps lmcache==0.5.2 sortedcontainers aiofile aiofiles caio nvtx redis py-cpuinfo
PYTHONPATH=FOLDER python -m tests.vllm --version 0.26.0 tests/vllm/test_peers.py
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

try:
    LMCACHE = version("lmcache")
except PackageNotFoundError:
    LMCACHE = ""
if LMCACHE not in ("0.5.2", "0.5.3"):
    pytest.skip("LMCache 0.5.2 is not installed, see the first lines of this file", allow_module_level=True)

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
import lmcache.c_ops as ops
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import (
    get_block_size,
    get_head_size,
    get_num_blocks,
    normalize_kv_and_discover_format,
)

LAYERS, BLOCKS, HEADS, BLOCK, DIM = 2, 8, 2, 16, 8


def moved(tensors: list[torch.Tensor], kind: ops.EngineKVFormat) -> bool:
    """Copy blocks 2 and 3 to the host and back into 5 and 6; return True if they came back and no other changed."""
    before = [tensor.clone() for tensor in tensors]
    size = get_block_size(tensors, kind)
    host = torch.zeros(2, LAYERS, 2 * size, HEADS * DIM)
    places = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    for first, direction in ((2, ops.TransferDirection.D2H), (5, ops.TransferDirection.H2D)):
        slots = torch.arange(first * size, (first + 2) * size)
        ops.multi_layer_kv_transfer(
            host,
            places,
            slots,
            torch.device("cpu"),
            get_num_blocks(tensors, kind) * size,
            direction,
            kind,
            block_size=size,
            head_size=get_head_size(tensors, kind),
        )
    source = {5: 2, 6: 3}
    return all(
        torch.equal(now[block], old[source.get(block, block)])
        for now, old in zip(tensors, before, strict=True)
        for block in range(BLOCKS)
    )


def test_lmcache_4463_is_seen_in_lmcache() -> None:
    """vLLM packs keys and values of a head side by side: other bytes come back, and into other blocks as well.

    Those that have halves of a block of their own, as vLLM packed them before, come back right.
    """
    before = [torch.randn(BLOCKS, 2, BLOCK, HEADS, DIM) for _ in range(LAYERS)]
    assert moved(before, ops.EngineKVFormat.NL_X_NB_TWO_BS_NH_HS)
    packed = [torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM) for _ in range(LAYERS)]
    kind, tensors = normalize_kv_and_discover_format(packed, EngineType.VLLM)
    assert tensors[0].data_ptr() == packed[0].data_ptr()
    assert not moved(tensors, kind)
