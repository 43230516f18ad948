"""SGLang's ``UnifiedRadixCache`` with its Rust core, and its own allocation, checkpoint and release functions.

Two things stand in for the rest of the engine: a request with the attributes that the cache reads, and the settings
that ``release_kv_cache`` asks for. Torchvision is not installed, because its wheels need CUDA; modules that are only
imported on the way find an empty one.

Indices of single tokens are computed by GPU kernels in production. Here torch computes them on the CPU, and the time
for that is left out.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

from benchmarks.peers.adapters.base import Adapter, OutOfBlocksError, Pool, Tokens


class EmptyTorchvision(MetaPathFinder, Loader):
    """Finds torchvision and every module in it; any name of theirs is a mock."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__.update(__version__="0.28.0", __getattr__=_mock)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _mock(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


os.environ["SGLANG_RUST_BUILD_MODE"] = "never"
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
sys.meta_path.insert(0, EmptyTorchvision())

import sglang.srt.mem_cache.common as cache_functions  # noqa: E402
import torch  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.allocation import (  # noqa: E402
    alloc_paged_token_slots_decode,
    alloc_paged_token_slots_extend,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


class SglangRequest:
    """The attributes of SGLang's ``Req`` that its cache reads and writes."""

    extra_key = cache_salt = priority = session = session_id = session_generation = None
    kv_rotation_base = finished_reason = finished_len = multimodal_inputs = None
    mamba_branching_seqlen = token_indices_to_pool = None
    skip_radix_cache_insert = False

    def __init__(self, number: int, prompt: array[int]) -> None:
        self.rid = str(number)
        self.origin_input_ids = prompt
        self.full_untruncated_fill_ids = prompt[:]
        self.output_ids = array("q")
        self.kv = ReqKvInfo()
        self.prefix_len = 0
        self.extend_end = len(prompt)
        self.last_node: Any = None
        self.lock: Any = None
        self.is_finished = False

    def finished(self) -> bool:
        return self.is_finished

    def owned_kv_len(self) -> int:
        return int(self.kv.kv_committed_len)

    def refresh_fill_ids(self) -> None:
        known = len(self.full_untruncated_fill_ids) - len(self.origin_input_ids)
        self.full_untruncated_fill_ids.extend(self.output_ids[known:])

    def _compute_max_prefix_len(self, length: int) -> int:
        return length - 1


class SglangAdapter(Adapter):
    """Takes tokens as 64-bit arrays. Finished outputs enter the tree when their request ends, as in the engine."""

    def __init__(self, pool: Pool) -> None:
        self._rows = ReqToTokenPool(pool.max_requests + 2, pool.max_tokens, "cpu", False)
        allocator = PagedTokenToKVPoolAllocator(
            pool.blocks * pool.block_size, pool.block_size, torch.bfloat16, "cpu", None, False
        )
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            setattr(allocator, name, self._leave_out(getattr(allocator, name)))
        parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=allocator,
            page_size=pool.block_size,
        )
        parameters.tree_components = (ComponentType.FULL,)
        parameters.tree_core_backend = "rust"
        self._tree = UnifiedRadixCache(parameters)
        if "Rust" not in type(self._tree.tree_core).__name__:
            raise ImportError("SGLang runs without its Rust core")

    def make_request(self, number: int, prompt: Tokens) -> SglangRequest:
        return SglangRequest(number, self.make_output(prompt))

    def make_output(self, tokens: Tokens) -> array[int]:
        return array("q", tokens.astype(np.int64).tobytes())

    def hash(self, request: SglangRequest) -> None:
        pass

    def match(self, request: SglangRequest) -> int:
        tokens = request.full_untruncated_fill_ids
        cache_functions.match_kv_cache(request, self._tree, tokens, max_prefix_len=len(tokens) - 1)
        request.lock = self._tree.lock(request.last_node)
        request.kv.cache_protected_len = request.prefix_len
        return request.prefix_len

    def allocate(self, request: SglangRequest) -> None:
        cached, last = request.prefix_len, _NO_LOCATION
        prefix = self._tree.prefix_device_indices(request) if cached else None
        self._rows.alloc([request])
        if prefix is not None:
            self._write((request.kv.req_pool_idx, slice(0, cached)), prefix)
            last = prefix[-1:]
        self._extend(request, cached, request.extend_end, last)

    def commit(self, request: SglangRequest) -> None:
        cache_functions.checkpoint_kv_cache(request, self._tree)

    def decode(self, request: SglangRequest, output: array[int]) -> None:
        request.output_ids.extend(output)
        end = request.kv.kv_allocated_len
        self._extend(
            request, end, end + len(output), self._last_locations(request.kv.req_pool_idx, [end - 1])
        )

    def decode_step(self, requests: Sequence[SglangRequest], step: list[list[int]]) -> None:
        rows = torch.tensor([request.kv.req_pool_idx for request in requests], dtype=torch.int64)
        lengths = torch.tensor([request.kv.kv_allocated_len for request in requests], dtype=torch.int64)
        last = self._last_locations(rows, lengths - 1)
        slots = alloc_paged_token_slots_decode(self._tree, lengths + 1, lengths + 1, last)
        if slots is None:
            raise OutOfBlocksError
        self._write((rows, lengths), slots)
        for request, output in zip(requests, step, strict=True):
            request.output_ids.extend(output)
            request.kv.kv_allocated_len += 1
            request.kv.kv_committed_len += 1

    def free(self, request: SglangRequest) -> None:
        request.is_finished = True
        cache_functions.release_kv_cache(request, self._tree, checkpoint=True)

    def _extend(self, request: SglangRequest, start: int, end: int, last: Any) -> None:
        starts, ends = torch.tensor([start], dtype=torch.int64), torch.tensor([end], dtype=torch.int64)
        slots = alloc_paged_token_slots_extend(self._tree, starts, starts, ends, ends, last, end - start)
        if slots is None:
            raise OutOfBlocksError(f"request {request.rid}")
        self._write((request.kv.req_pool_idx, slice(start, end)), slots)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = end

    def _write(self, where: tuple[Any, Any], slots: Any) -> None:
        since = time.perf_counter_ns()
        self._rows.write(where, slots.to(torch.int32))
        self.left_out_ns += time.perf_counter_ns() - since

    def _last_locations(self, rows: Any, positions: Any) -> Any:
        since = time.perf_counter_ns()
        locations = self._rows.req_to_token[rows, positions].to(torch.int64)
        self.left_out_ns += time.perf_counter_ns() - since
        return locations

    def _leave_out(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            since = time.perf_counter_ns()
            try:
                return call(*arguments, **named)
            finally:
                self.left_out_ns += time.perf_counter_ns() - since

        return timed


_NO_LOCATION = torch.full((1,), -1, dtype=torch.int64)


def make(pool: Pool) -> SglangAdapter:
    """Return an adapter."""
    torch.set_num_threads(1)
    cache_functions.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
    cache_functions.get_serving = lambda: SimpleNamespace(strip_thinking_cache=False)
    return SglangAdapter(pool)
