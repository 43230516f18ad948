"""A worker with the interface of FastDeploy's, and a model whose KV identifies the tokens it was computed from.

The KV of a token is a checksum of all tokens up to it, so a prefill detects blocks
of other prompts. Batches arrive as from FastDeploy's queue; tokens return as over its message queue.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import paddle

PREEMPTED = -9
"""Token that FastDeploy's workers sample for a preempted or aborted request."""

_MODULUS = 65521
_VOCABULARY = 50


def checksums(tokens: Sequence[int], start: int = 0, before: int = 1) -> np.ndarray[Any, Any]:
    """Return the checksum up to each token from ``start`` on; ``before`` is the checksum up to the previous token."""
    values = np.empty(len(tokens) - start, np.float32)
    for index in range(start, len(tokens)):
        before = (before * 33 + tokens[index] + 1) % _MODULUS
        values[index - start] = before
    return values


def token_after(value: float) -> int:
    """Return the token that the model samples for this value of the last token's KV."""
    return int(value) % _VOCABULARY + 3


def answer_to(prompt: Sequence[int], length: int) -> list[int]:
    """Return the model's answer if all KV that it reads is right."""
    tokens = list(prompt)
    value = float(checksums(tokens)[-1])
    for _ in range(length):
        tokens.append(token_after(value))
        value = float(checksums(tokens, len(tokens) - 1, int(value))[-1])
    return tokens[len(prompt) :]


class Copier(Protocol):
    """Copies blocks: a cache controller, or a stand-in for FastDeploy's own on a CPU."""

    def initialize(self, num_blocks: int) -> list[Any]:
        """Make the tensors, key and value of each layer."""

    def submit(self, batch: Any) -> Any:
        """Submit a batch's copies; return a layer counter or None."""

    def sleep(self) -> None:
        """Release the tensors."""

    def close(self) -> None:
        """Release everything."""


class FastDeployCopier:
    """Copies as FastDeploy's own controller orders them, all before the step; its operators need a GPU."""

    def __init__(self, shape: Sequence[int], planes: int, host_blocks: int) -> None:
        self._shape = list(shape)
        self._planes = planes
        self._host = [np.zeros([host_blocks, *shape], np.float32) for _ in range(planes)]
        self._device: list[np.ndarray[Any, Any]] = []

    def initialize(self, num_blocks: int) -> list[Any]:
        tensors = [paddle.zeros([num_blocks, *self._shape]) for _ in range(self._planes)]
        self._device = [np.from_dlpack(tensor) for tensor in tensors]
        return tensors

    def submit(self, batch: Any) -> None:
        for swap, source, target in (
            (batch.cache_evict_metadata, self._device, self._host),
            (batch.cache_swap_metadata, self._host, self._device),
        ):
            if swap is not None:
                for copied, written in zip(source, target, strict=True):
                    written[swap.dst_block_ids] = copied[swap.src_block_ids]

    def sleep(self) -> None:
        self._device = []

    def close(self) -> None:
        pass


class ControllerCopier:
    """The cache controller that the plug-in installed in FastDeploy's worker."""

    def __init__(self, config: Any, rank: int, **parts: Any) -> None:
        from fastdeploy.cache_manager import v1

        self.controller = v1.CacheController(config, rank, rank, **parts)
        self._config = config

    def initialize(self, num_blocks: int) -> list[Any]:
        tensors: list[Any] = list(self.controller.initialize_kv_cache(_backend(self._config), num_blocks))
        speculative = self._config.speculative_config
        if speculative.method == "mtp":
            blocks = int(num_blocks * speculative.num_gpu_block_expand_ratio)
            layers = self._config.model_config.num_hidden_layers
            tensors += self.controller.initialize_mtp_kv_cache(_backend(self._config), blocks, 1, layers)
        return tensors

    def submit(self, batch: Any) -> Any:
        self.controller.submit_swap_tasks(batch.cache_evict_metadata, batch.cache_swap_metadata)
        return self.controller.swap_layer_done_counter

    def sleep(self) -> None:
        self.controller.free_gpu_cache()

    def close(self) -> None:
        self.controller.shutdown()


def _backend(config: Any) -> Any:
    model, cache = config.model_config, config.cache_config

    def shape(max_num_blocks: int, kv_cache_quant_type: str | None = None) -> tuple[list[int], list[int]]:
        one = [max_num_blocks, model.num_key_value_heads, cache.block_size, model.head_dim]
        return one, list(one)

    return SimpleNamespace(get_kv_cache_shape=shape)


@dataclass(frozen=True)
class WrongRead:
    """Wrong KV that a prefill found in its blocks."""

    rank: int
    request_id: str
    layer: int
    first_token: int
    blocks: frozenset[int]


@dataclass
class Slot:
    """One request in the worker's batch. ``computed`` of its tokens have KV, ``prefill`` are to be computed next."""

    request_id: str
    tokens: list[int]
    table: list[int]
    limit: int
    computed: int = 0
    prefill: int = 0
    preempted: bool = False
    misread: int = 0
    values: list[float] = field(default_factory=list)


class Worker:
    """Worker of one rank. ``wrong`` lists the wrong KV that prefills found."""

    def __init__(
        self, rank: int, copier: Copier, num_layers: int, block_size: int, num_blocks: int, drafts: bool
    ) -> None:
        self.rank = rank
        self.copier = copier
        self.wrong: list[WrongRead] = []
        self.checked = 0
        self._layers = num_layers
        self._drafts = drafts
        self._block = block_size
        self._slots: dict[int, Slot] = {}
        self._counter: Any = None
        self.wake(num_blocks)

    def wake(self, num_blocks: int) -> None:
        self._tensors = self.copier.initialize(num_blocks)
        self._planes = [np.from_dlpack(tensor) for tensor in self._tensors]

    def sleep(self) -> None:
        self._slots.clear()
        self._planes = []
        self._tensors = []
        self.copier.sleep()

    def drop_requests(self) -> None:
        """Drop every request; the engine recomputes all of them."""
        self._slots.clear()

    def limit_to_first_token(self) -> None:
        """End every request with its first token, as a prefill instance does."""
        for slot in self._slots.values():
            slot.limit = 0

    def has(self, index: int) -> bool:
        """Return True while the request of a slot goes on."""
        return index in self._slots

    def insert(self, data: bytes) -> None:
        """Insert a batch from the queue."""
        from fastdeploy.engine.request import BatchRequest, RequestType

        batch, _, _ = BatchRequest.from_tasks([pickle.loads(data)])  # noqa: S301 - our own bytes
        self._counter = self.copier.submit(batch)
        for task in batch:
            kind = task.task_type.value
            if kind == RequestType.PREFILL.value:
                self._slots[task.idx] = self._prefill(task)
            elif kind == RequestType.DECODE.value:
                if task.idx in self._slots:
                    self._slots[task.idx].table = list(task.block_tables)
            elif task.idx in self._slots:
                self._slots[task.idx].preempted = True
            else:
                self._slots[task.idx] = Slot(task.request_id, [], [], 0, preempted=True)

    def _prefill(self, task: Any) -> Slot:
        tokens = [*task.prompt_token_ids, *task.output_token_ids]
        limit = len(task.prompt_token_ids) + task.sampling_params.max_tokens
        return Slot(
            task.request_id,
            tokens,
            list(task.block_tables),
            limit,
            task.prefill_start_index,
            task.prefill_end_index,
        )

    @property
    def busy(self) -> bool:
        """Return True if a step would compute anything."""
        return any(slot.preempted or slot.prefill or slot.computed for slot in self._slots.values())

    def step(self) -> dict[int, tuple[str, list[int]]]:
        """Compute one step; return the sampled tokens by slot and request."""
        sampled: dict[int, tuple[str, list[int]]] = {}
        work: list[tuple[int, Slot, int, int]] = []
        for index, slot in list(self._slots.items()):
            if slot.preempted:
                sampled[index] = (slot.request_id, [PREEMPTED])
                del self._slots[index]
            elif slot.prefill:
                work.append((index, slot, slot.computed, slot.prefill))
            elif slot.computed and len(slot.table) * self._block >= len(slot.tokens) + self._drafts:
                work.append((index, slot, slot.computed, len(slot.tokens)))
        for layer in range(self._layers + self._drafts):
            if self._counter is not None:
                self._counter.wait_for_layer(layer)
            for _, slot, start, stop in work:
                self._write(layer, slot, start, stop)
            for _, slot, start, _ in work:  # as attention does, after the whole batch has written its KV
                if slot.prefill and start:
                    self._check(layer, slot, start)
        for index, slot, _, stop in work:
            was_prefill, slot.computed, slot.prefill = bool(slot.prefill), stop, 0
            if was_prefill and stop < len(slot.tokens):
                slot.computed = 0  # the next chunk is a task of its own
                continue
            tokens = self._sample(slot)
            sampled[index] = (slot.request_id, tokens)
            if len(slot.tokens) >= slot.limit:
                del self._slots[index]
        return sampled

    def _sample(self, slot: Slot) -> list[int]:
        """Sample one token, or two if a draft is accepted, from the KV in the blocks."""
        tokens: list[int] = []
        at = len(slot.tokens) - 1
        value = float(self._planes[0][slot.table[at // self._block], 0, at % self._block, 0])
        tokens.append(token_after(value - 7 * self.rank + slot.misread))
        slot.tokens.append(tokens[0])
        if self._drafts:
            self._write_draft(slot, at)
        return tokens

    def _expected(self, slot: Slot, stop: int) -> np.ndarray[Any, Any]:
        known = len(slot.values)
        if known < stop:
            before = int(slot.values[-1]) if slot.values else 1
            slot.values += checksums(slot.tokens[:stop], known, before).tolist()
        return np.array(slot.values[:stop], np.float32)

    def _write(self, layer: int, slot: Slot, start: int, stop: int) -> None:
        values = self._expected(slot, stop)
        for kind in range(2):
            plane = self._planes[2 * layer + kind]
            for block in range(start // self._block, -(-stop // self._block)):
                first, last = max(start, block * self._block), min(stop, (block + 1) * self._block)
                written = values[first:last] + self._offset(layer, kind)
                if layer == self._layers:
                    following = [*slot.tokens[first + 1 : last + 1], *([0] * (last + 1 - len(slot.tokens)))]
                    written = written + np.array(following[: last - first], np.float32)
                rows = slice(first - block * self._block, last - block * self._block)
                plane[slot.table[block], :, rows, :] = written[None, :, None]

    def _offset(self, layer: int, kind: int) -> int:
        """Return an offset that differs between planes and ranks."""
        return 2 * layer + kind + 7 * self.rank

    def _write_draft(self, slot: Slot, at: int) -> None:
        for kind in range(2):
            plane = self._planes[2 * self._layers + kind]
            value = (
                self._expected(slot, at + 1)[at]
                + 2 * self._layers
                + kind
                + 7 * self.rank
                + slot.tokens[at + 1]
            )
            plane[slot.table[at // self._block], :, at % self._block, :] = value

    def _check(self, layer: int, slot: Slot, start: int) -> None:
        """Compare the KV that a prefill reads, in every plane of a layer, with the expected values."""
        blocks = -(-start // self._block)
        self.checked += start
        for kind in range(2):
            plane = self._planes[2 * layer + kind]
            read = plane[slot.table[:blocks]].transpose(0, 2, 1, 3).reshape(blocks * self._block, -1)[:start]
            expected = self._expected(slot, start) + self._offset(layer, kind)
            if layer == self._layers:
                expected = expected + np.array(slot.tokens[1 : start + 1], np.float32)
            differing = np.flatnonzero((read != expected[:, None]).any(axis=1))
            if len(differing):
                slot.misread += 1
                found = frozenset(slot.table[index // self._block] for index in differing.tolist())
                self.wrong.append(WrongRead(self.rank, slot.request_id, layer, int(differing[0]), found))
