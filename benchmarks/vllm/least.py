"""The least that a connector can do: it copies blocks of a prompt to the device as fdcache does, and nothing else.

It hashes, stores and evicts nothing. A prompt whose first block an earlier request had is found whole, and whatever the
host memory holds is copied into its blocks. What decodes beside it lose is the price of the copies, and of a connector
in vLLM; what they lose more beside fdcache's own is that of its bookkeeping.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from benchmarks.copies import swap
from benchmarks.vllm.shapes import BLOCK
from fdcache.controller.cache_controller import CacheController
from fdcache.integrations.vllm.config import layout_from_config
from fdcache.integrations.vllm.planes import planes_of
from fdcache.integrations.vllm.settings import load_settings
from fdcache.integrations.vllm.worker import device_of
from fdcache.metadata import SwapPurpose, TransferPlan


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The device blocks of each request whose load begins with a step."""

    blocks: dict[str, Sequence[int]] = field(default_factory=dict)


class Copies:
    """In a worker: copies out of host memory that holds the records of one prompt, whatever their bytes are."""

    def __init__(self, controller: CacheController, num_blocks: int, on_gpu: bool) -> None:
        self._controller = controller
        self._on_gpu = on_gpu
        self._numbers = itertools.count()
        self._requests: dict[int, str] = {}
        self._stream = controller.device.as_stream(torch.cuda.Stream()) if on_gpu else None
        self._slots: NDArray[np.int32] = np.arange(num_blocks, dtype=np.int32)
        controller.initialize_host_cache(num_blocks)
        self._submit(SwapPurpose.BACKUP, self._slots)
        for report in controller.wait_reports(60.0):
            if not all(result.success for result in report.results):
                raise RuntimeError(f"the host memory was not filled: {report}")

    def begin(self, request_id: str, blocks: Sequence[int]) -> None:
        """Copy into the blocks of a request."""
        self._requests[self._submit(SwapPurpose.LOAD, np.asarray(blocks, np.int32))] = request_id

    def _submit(self, purpose: SwapPurpose, device: NDArray[np.int32]) -> int:
        number = next(self._numbers)
        copies = swap(purpose, device, self._slots[: len(device)])
        is_load = purpose is SwapPurpose.LOAD
        loads, backups = (copies, None) if is_load else (None, copies)
        plan = TransferPlan(plan_id=number, loads=loads, backups=backups)
        counter = self._controller.submit_swap_tasks(plan, self._stream)
        if not self._on_gpu:
            counter.wait_all()
        return number

    def ended(self) -> set[str]:
        """Return the requests whose copies have ended since the last call."""
        if not self._requests:
            return set()
        return {self._requests.pop(report.plan_id) for report in self._controller.poll()}

    def close(self) -> None:
        """End the copies."""
        self._controller.shutdown()


class LeastConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Finds each prompt that was there before, and copies as many bytes into its blocks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._known: set[tuple[int, ...]] = set()
        self._begun = Loads()
        self._copies: Copies | None = None
        self._longest = vllm_config.model_config.max_model_len // BLOCK

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make a controller as fdcache's connector does, over the same planes."""
        layout = layout_from_config(self._vllm_config, self._kv_cache_config)
        pages = planes_of(self._kv_cache_config, kv_caches)
        settings = load_settings(self._vllm_config, layout.block_size)
        device = pages[0].device
        controller = CacheController.from_settings(
            layout, settings, rank=0, device=lambda settings: device_of(device, settings)
        )
        controller.register_kv_cache(pages)
        num_blocks = min(self._longest, self._kv_cache_config.num_blocks)
        self._copies = Copies(controller, num_blocks, device.type == "cuda")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the copies of a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._copies is not None and isinstance(connector_metadata, Loads):
            for request_id, blocks in connector_metadata.blocks.items():
                self._copies.begin(request_id, blocks)

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Do nothing: the copies have begun."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step needs what is still being copied."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: nothing is stored."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is stored."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose copies have ended."""
        return None, (self._copies.ended() or None) if self._copies is not None else None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Find the whole prompt but for its last block, if its first block was there before."""
        found = (request.num_prompt_tokens - 1) // BLOCK * BLOCK - num_computed_tokens
        is_found = self._head(request) in self._known and found > 0
        return (found, True) if is_found else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Have the blocks of a prompt that was found copied with the next step."""
        if num_external_tokens > 0:
            (table,) = blocks.get_block_ids()
            stop = (request.num_prompt_tokens - 1) // BLOCK
            self._begun.blocks[request.request_id] = table[stop - num_external_tokens // BLOCK : stop]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the loads that begin with the step."""
        begun, self._begun = self._begun, Loads()
        return begun

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Remember the prompt."""
        self._known.add(self._head(request))
        return False, None

    @staticmethod
    def _head(request: Any) -> tuple[int, ...]:
        return tuple(request.prompt_token_ids[:BLOCK])

    def shutdown(self) -> None:
        """End the copies."""
        if self._copies is not None:
            self._copies.close()
