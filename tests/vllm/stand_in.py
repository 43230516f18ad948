"""vLLM's scheduler and both sides of the connector, with a stand-in for the model: one that writes and checks bytes.

A token's bytes, and those of a state, follow from all tokens up to it. Before a token is computed, the stand-in reads
what each layer needs of those before it, in the blocks that vLLM gave, and counts what differs. So a model runs here
whose kernels this machine lacks, with the cache that vLLM makes for its layers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_planning
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
    iter_layer_specs,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from fdcache.integrations.vllm.connector import FdcacheConnector
from tests.service_help import TIMEOUT
from tests.vllm.engine import connector_config, make_model

_MASK = (1 << 63) - 1


class StandIn:
    """An engine whose layers keep what ``specs`` say. ``wrong`` counts the bytes read that are others' or stale.

    With several ranks each has states of its own; what layers keep of tokens is alike on all, as latents are.
    """

    def __init__(
        self,
        model: Path,
        specs: Sequence[KVCacheSpec],
        *,
        num_blocks: int,
        block_size: int = 16,
        broken: Callable[[StandIn, Any], None] | None = None,
        kv_layout: str = "LBNHC",
        role: str = "kv_both",
        drafts: int = 0,
        ranks: int = 1,
        **settings: Any,
    ) -> None:
        """``drafts``: tokens that the last layer proposes in each step, as the layer of EAGLE or MTP does."""
        init_none_hash(sha256)
        has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        self.config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=block_size,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            enable_prefix_caching=True,
            num_gpu_blocks_override=num_blocks,
            async_scheduling=False,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else None,
            speculative_config=_speculative(model, drafts) if drafts else None,
            kv_transfer_config=connector_config(FDCACHE_VERIFY="all", **settings) | {"kv_role": role},
        ).create_engine_config()
        self.config.cache_config.kv_cache_layout = kv_layout
        self.config.cache_config.mamba_cache_mode = "align" if has_states else "none"
        self.config.cache_config.block_size = block_size
        by_name = {f"layer.{number}": spec for number, spec in enumerate(specs)}
        groups = kv_cache_planning.get_kv_cache_groups(self.config, by_name)
        self.cache = kv_cache_planning.get_kv_cache_config_from_groups(self.config, groups, 1 << 40)
        for_scheduler = generate_scheduler_kv_cache_config([self.cache])
        size, self.hash_size = resolve_kv_cache_block_sizes(for_scheduler, self.config)
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.workers = [self._worker_of(rank) for rank in range(ranks)]
        self.memories = [
            torch.zeros(self.cache.kv_cache_tensors[0].size, dtype=torch.int8) for _ in self.workers
        ]
        self.rank = 0
        """The rank that computes."""
        for worker, raw in zip(self.workers, self.memories, strict=True):
            worker.register_kv_caches(self._views(raw))
        self.scheduler = Scheduler(
            self.config,
            for_scheduler,
            StructuredOutputManager(self.config),
            block_size=size,
            hash_block_size=self.hash_size,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata(
            {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self._outputs = KVOutputAggregator(ranks)
        self.tables: dict[str, list[list[int]]] = {}
        self.requests: dict[str, Request] = {}
        self.wrong = self.steps = self.preemptions = 0
        self.answers: dict[str, list[int]] = {}
        self.parameters: dict[str, dict[str, Any] | None] = {}
        """Parameters for another engine, of requests that have ended."""
        self._drafts = drafts
        self._draft_layer = f"layer.{len(specs) - 1}" if drafts else None
        self.accepted = self.rejected = 0
        """Drafts that were the right tokens, and that were not."""
        self._chosen = random.Random(7)
        self._places_of_states: list[dict[str, int]] = [{} for _ in self.workers]
        self._broken = broken
        self._hasher = get_request_block_hasher(self.hash_size, sha256)
        self._places = {
            name: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
            for tensor in self.cache.kv_cache_tensors
            for number, name in enumerate(tensor.layers)
        }
        self._layers = [
            [(name, spec) for name, spec in zip(group.layer_names, _specs_of(group), strict=True)]
            for group in self.cache.kv_cache_groups
        ]

    def _worker_of(self, rank: int) -> FdcacheConnector:
        self.config.parallel_config.rank = rank
        made = FdcacheConnector(self.config, KVConnectorRole.WORKER, self.cache)
        self.config.parallel_config.rank = 0
        return made

    @property
    def worker(self) -> FdcacheConnector:
        """The connector in the rank that computes."""
        return self.workers[self.rank]

    @property
    def bytes(self) -> Any:
        """The device memory of the rank that computes."""
        return self.memories[self.rank].numpy().view(np.uint8)

    @property
    def _running(self) -> dict[str, int]:
        """The place in the table of the block with the last state of each request that goes on."""
        return self._places_of_states[self.rank]

    def _views(self, raw: torch.Tensor) -> dict[str, Any]:
        views: dict[str, Any] = {}
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        specs = {
            name: spec
            for group in self.cache.kv_cache_groups
            for name, spec in zip(group.layer_names, _specs_of(group), strict=True)
        }
        for tensor in self.cache.kv_cache_tensors:
            spec = specs[tensor.layers[0]]
            if isinstance(spec, MambaSpec):
                for number, name in enumerate(tensor.layers):
                    begin, half = (
                        tensor.offset + number * tensor.layer_stride,
                        spec.state_content_size_bytes // 2,
                    )
                    views[name] = [
                        torch.as_strided(raw, (self.cache.num_blocks, half), (tensor.block_stride, 1), at)
                        for at in (begin, begin + half)
                    ]
                continue
            made = create_kv_cache_views(raw, spec, self.cache.num_blocks, layout, tensor)
            views |= dict(zip(tensor.layers, made, strict=True))
        return views

    # --- requests -----------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int = 8,
        transfer: dict[str, Any] | None = None,
    ) -> None:
        """Let a request arrive; ``transfer`` is what a router says of its hand-over."""
        extra = None if transfer is None else {"kv_transfer_params": dict(transfer)}
        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
        made = Request(name, list(prompt), parameters, None, block_hasher=self._hasher)
        self.requests[name] = made
        self.scheduler.add_request(made)

    def abort(self, name: str) -> None:
        """Let the client of a request go."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self) -> None:
        """Step until every request has ended and nothing is copied."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            self.step()
            if not self.scheduler.has_unfinished_requests() and not self.connector.has_pending_push_work():
                return
        raise AssertionError("the requests never end")

    def step(self) -> None:
        """Schedule a step, execute it, and take its result."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self._follow(output)
        made = self._outputs.aggregate([self._execute(output, rank) for rank in range(len(self.workers))])
        self.rank = 0
        if self._broken is not None:
            self._broken(self, made.kv_connector_output)
        ended = self.scheduler.update_from_output(output, made)
        if self._drafts:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(made.req_ids, [self._propose(name) for name in made.req_ids])
            )
        for each in (each for outputs in ended.values() for each in outputs.outputs):
            if each.finish_reason is not None:
                self.parameters[each.request_id] = each.kv_transfer_params
        for name, tokens in zip(made.req_ids, made.sampled_token_ids, strict=True):
            self.answers.setdefault(name, []).extend(tokens)

    def _execute(self, output: Any, rank: int) -> ModelRunnerOutput:
        """Execute a step on one rank."""
        self.rank = rank
        for block in output.new_block_ids_to_zero or ():
            self._fill(block, 0)
        for copy in output.kv_cache_block_copies or ():
            for place, stride in self._places.values():
                target, source = place + copy.dst_block_id * stride, place + copy.src_block_id * stride
                self.bytes[target : target + stride] = self.bytes[source : source + stride]
        worker = self.worker
        worker.handle_preemptions(output.kv_connector_metadata)
        worker.bind_connector_metadata(output.kv_connector_metadata)
        drafted = output.scheduled_spec_decode_tokens
        sampled = [
            self._compute(name, count, drafted.get(name, ()))
            for name, count in output.num_scheduled_tokens.items()
        ]
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=made,
        )

    def _follow(self, output: Any) -> None:
        """Follow the block tables as vLLM's workers do."""
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            for places in self._places_of_states:
                places.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(each) for each in ids]
            elif ids is not None:
                for table, more in zip(self.tables[name], ids, strict=True):
                    table.extend(more)

    # --- the model ----------------------------------------------------------------------------------------

    def _compute(self, name: str, count: int, drafts: Sequence[int]) -> list[int]:
        """Check what the tokens of a step need, and write them; return those that follow the last one known."""
        request = self.requests[name]
        # The scheduler counts the tokens of the step as computed already.
        stop = request.num_computed_tokens
        start = stop - count
        known = list(request.all_token_ids)
        marks = _marks([*known, *drafts])
        sampled = self._sample(marks, len(known), drafts) if stop >= len(known) else []
        right = stop - len(drafts) + max(len(sampled) - 1, 0)
        following = _marks([*known, *sampled])
        for table, layers in zip(self.tables[name], self._layers, strict=True):
            for layer, spec in layers:
                if isinstance(spec, MambaSpec):
                    self._go_on(name, layer, spec, table, marks[: stop + 1], start, len(drafts))
                elif layer == self._draft_layer:
                    self._attend(layer, spec, table, following[2:], start, right)
                else:
                    self._attend(layer, spec, table, marks[1:], start, stop)
        self._keep_states(name, stop, len(drafts), right)
        return sampled

    def _sample(self, marks: list[int], known: int, drafts: Sequence[int]) -> list[int]:
        """Return the token after those known, and those after the drafts that are right."""
        sampled = [_next(marks[known])]
        for number, draft in enumerate(drafts, start=known + 1):
            if draft != sampled[-1]:
                break
            sampled.append(_next(marks[number]))
        self.accepted += len(sampled) - 1
        self.rejected += len(drafts) - len(sampled) + 1
        return sampled

    def _propose(self, name: str) -> list[int]:
        """Return tokens that may follow those known: each is right two times in three."""
        tokens = list(self.requests[name].all_token_ids)
        known = len(tokens)
        for _ in range(self._drafts):
            tokens.append(_next(_marks(tokens)[-1]) if self._chosen.random() < 2 / 3 else 1)
        return tokens[known:]

    def _attend(
        self, layer: str, spec: Any, table: list[int], marks: list[int], start: int, stop: int
    ) -> None:
        first = 0
        if isinstance(spec, SlidingWindowSpec):
            first = max(start - spec.sliding_window + 1, 0)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            first = start // spec.attention_chunk_size * spec.attention_chunk_size
        for token in range(first, start):
            self.wrong += not (self._token(layer, spec, table, token) == _row(marks[token])).all()
        for token in range(start, stop):
            self._token(layer, spec, table, token)[:] = _row(marks[token])

    def _token(self, layer: str, spec: Any, table: list[int], token: int) -> Any:
        block = table[token // spec.block_size]
        size = spec.real_page_size_bytes // spec.block_size
        place, stride = self._places[layer]
        begin = place + block * stride + token % spec.block_size * size
        return self.bytes[begin : begin + size][:8]

    def _go_on(
        self, name: str, layer: str, spec: Any, table: list[int], marks: list[int], start: int, drafts: int
    ) -> None:
        """Take the state before the step out of its block, and leave that after it in the block of its last token.

        With drafts those after each of them lie in the blocks behind it.
        """
        now = -(-(len(marks) - 1) // spec.block_size) - 1
        if start:
            place = self._running.get(name, (start - 1) // spec.block_size)
            before = self._state(layer, spec, table[place])
            self.wrong += not (before == np.resize(self._row_of_state(marks[start]), len(before))).all()
        for number in range(drafts + 1):
            after = self._state(layer, spec, table[now + number])
            after[:] = np.resize(self._row_of_state(marks[len(marks) - 1 - drafts + number]), len(after))

    def _keep_states(self, name: str, stop: int, drafts: int, right: int) -> None:
        """Keep the states at the end of a block that the right tokens of a step reach; see vLLM's ``mamba_utils``."""
        for table, layers in zip(self.tables[name], self._layers, strict=True):
            for layer, spec in layers:
                if not isinstance(spec, MambaSpec):
                    continue
                size, first = spec.block_size, stop - drafts
                now, end = -(-stop // size) - 1, right // size * size
                kept = end // size - 1
                self._running[name] = now + right - first
                if end >= first and kept != now + end - first:
                    self._state(layer, spec, table[kept])[:] = self._state(
                        layer, spec, table[now + end - first]
                    )
                    if kept == now:
                        self._running[name] = now

    def _state(self, layer: str, spec: Any, block: int) -> Any:
        assert block, "a state is in vLLM's placeholder"
        place, stride = self._places[layer]
        begin = place + block * stride
        return self.bytes[begin : begin + spec.state_content_size_bytes]

    def _row_of_state(self, mark: int) -> np.ndarray:
        return _row(mark + self.rank & _MASK)

    def _fill(self, block: int, value: int) -> None:
        for group in self._layers:
            for layer, spec in group:
                place, stride = self._places[layer]
                begin = place + block * stride
                self.bytes[begin : begin + spec.page_size_bytes] = value

    @property
    def manager(self) -> Any:
        """The manager of the scheduler's side."""
        return self.connector._scheduler.manager

    def close(self) -> None:
        """End both sides; nothing may be pinned or in flight."""
        assert self.connector._scheduler.inconsistencies == 0
        self.manager.check_integrity()
        stats = self.manager.get_stats()
        assert (stats.plans_in_flight, stats.live_requests) == (0, 0)
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def _specs_of(group: Any) -> list[Any]:
    specs = list(iter_layer_specs(group.kv_cache_spec))
    return specs if len(specs) == len(group.layer_names) else specs * len(group.layer_names)


def _marks(tokens: Sequence[int]) -> list[int]:
    """Return a number for each prefix."""
    marks = [1]
    for token in tokens:
        marks.append((marks[-1] * 6364136223846793005 + token + 1442695040888963407) & _MASK)
    return marks


def _next(mark: int) -> int:
    return mark % 500 + 3


def _speculative(model: Path, drafts: int) -> dict[str, Any]:
    """Return vLLM's configuration of a draft model that shares the cache."""
    draft = make_model(model.parent / "draft", num_layers=1)
    return {"method": "eagle", "model": str(draft), "num_speculative_tokens": drafts}


def _row(mark: int) -> np.ndarray:
    return np.frombuffer(mark.to_bytes(8, "little"), np.uint8)
