"""Layers that go to decode while prefill computes those behind them, in one step of vLLM's engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from fdcache.errors import TransferNotFoundError
from fdcache.integrations.vllm.connector import FdcacheConnector
from fdcache.integrations.vllm.handover import ASKED_OF_PREFILL, TRANSFER_ID
from fdcache.integrations.vllm.layers import layers_of_planes
from fdcache.manager import Request
from fdcache.manager.requests import PeerSource
from fdcache.manager.results import LoadStatus
from fdcache.transfer.nixl import find_nixl
from tests.handover_engine import Engine
from tests.vllm.engine import BLOCK_SIZE, connector_config, running_engine
from tests.vllm.observed import Observed

try:
    find_nixl()
except TransferNotFoundError:
    pytest.skip(
        "vLLM's memory on a CPU is read through NIXL, which is not installed", allow_module_level=True
    )

_STEP = 64
"""Tokens that the engine computes in a step."""


@pytest.fixture(scope="module")
def prefill(model: Path) -> Iterator[Observed]:
    transfer = connector_config(FDCACHE_HOST_MEMORY="16MiB", FDCACHE_TRANSFER="rdma")
    with running_engine(model, transfer | {"kv_role": "kv_producer"}, max_num_batched_tokens=_STEP) as llm:
        yield Observed(llm)


@pytest.fixture
def decode(prefill: Observed, tmp_path: Path) -> Iterator[Engine]:
    """The hand-overs of a decode engine with the same layout."""
    with Engine("decode", tmp_path, "d", layout=prefill.manager.layout, connector="rdma") as made:
        yield made


class LayersOfSteps:
    """Holds up prefill before its last layer until decode has what a test waits for."""

    def __init__(self, prefill: Observed, decode: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decode, self._layout = decode, prefill.manager.layout
        connector = prefill.worker_connector
        planes = layers_of_planes(connector._vllm_config, connector._kv_cache_config)
        self._last = max(planes, key=planes.__getitem__)
        self.read: list[int] = []
        """Bytes that decode had before the last layer of each step."""
        self.wanted: list[int] = []
        monkeypatch.setattr(FdcacheConnector, "wait_for_layer_load", self._before)

    @property
    def bytes_read(self) -> int:
        stats = self._decode.controller.transfer_stats()
        assert stats is not None
        return stats.connector.read_bytes

    def _before(self, layer_name: str) -> None:
        if layer_name == self._last and len(self.read) < len(self.wanted):
            self._decode.until(lambda: self.bytes_read >= self.wanted[len(self.read)])
            self.read.append(self.bytes_read)


def ask(prefill: Observed, decode: Engine, name: str, length: int) -> tuple[Request, Any]:
    """Ask decode for a prompt that prefill is asked for next; return decode's request and its blocks."""
    chosen = random.Random(name)
    prompt = [chosen.randrange(3, 500) for _ in range(length)]
    request = Request(f"d-{name}", prompt)
    address = prefill.worker.address
    assert address is not None
    decode.handovers.fetch(request, PeerSource(name, (address,), is_ahead=True))
    into = decode.allocate(decode.manager.match(request, 0).num_tokens)
    decode.manager.load(request, into)
    decode.step()
    transfer = {"kv_transfer_params": {**ASKED_OF_PREFILL, TRANSFER_ID: name}}
    parameters = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, ignore_eos=True, extra_args=transfer
    )
    prefill.core.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    return request, into


@pytest.mark.parametrize("length", [60, _STEP, 150], ids=["a part of a step", "a step", "three steps"])
def test_decode_has_the_first_layer_before_prefill_computes_the_last(
    length: int, prefill: Observed, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, name = prefill.manager.layout, f"r-{length}"
    assert prefill.worker._controller is not None
    assert prefill.worker._controller.announced_layers[0] == 0
    layers = LayersOfSteps(prefill, decode, monkeypatch)
    first, whole = layout.layer_planes(0)[0].nbytes, layout.payload_bytes
    done = 0
    for end in range(_STEP, length + _STEP, _STEP):
        blocks = end // BLOCK_SIZE if end < length else -(-length // BLOCK_SIZE)
        layers.wanted.append(done * whole + (blocks - done) * first)
        done = blocks
    request, _ = ask(prefill, decode, name, length)
    prefill.finish()
    assert len(layers.read) == len(layers.wanted)
    assert layers.read[-1] < done * whole
    decode.until(lambda: decode.outcomes)
    assert [each.status for each in decode.outcomes] == [LoadStatus.CONFIRMED]
    assert layers.bytes_read == done * whole
    decode.manager.finish([request])
    decode.until(lambda: decode.is_clean)
    prefill.assert_nothing_is_held()
