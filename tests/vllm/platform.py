"""vLLM's CPU platform with the attention and the operators of this package. Loaded before vLLM's backends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

_OPERATORS = torch.library.Library("_C", "FRAGMENT")


def _init_cpu_memory_env(nodes: list[int]) -> None:
    """Bind no memory to a node."""


def _silu_and_mul(out: torch.Tensor, given: torch.Tensor) -> None:
    gate, up = given.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _slot_mapping(
    starts: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    slots.fill_(-1)
    bounds = starts.tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        where = positions[begin:end].long()
        blocks = tables[row].long()[where // block_size]
        slots[begin:end] = (blocks * block_size + where % block_size).to(slots.dtype)


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1).view(-1)


for _schema, _function in (
    ("greedy_argmax(Tensor logits) -> Tensor", _greedy_argmax),
    ("init_cpu_memory_env(int[] nodes) -> ()", _init_cpu_memory_env),
    ("silu_and_mul(Tensor! out, Tensor input) -> ()", _silu_and_mul),
    (
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor tables, Tensor! slots, "
        "int block_size) -> ()",
        _slot_mapping,
    ),
):
    _OPERATORS.define(_schema)
    _OPERATORS.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")


class TestPlatform(CpuPlatform):  # type: ignore[misc]
    """A CPU without compiled kernels; it leaves asynchronous scheduling as configured."""

    __test__ = False

    @classmethod
    def get_attn_backend_cls(cls, *_: Any, **__: Any) -> str:
        return "tests.vllm.attention.TorchBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduling = vllm_config.scheduler_config
        wanted = scheduling.async_scheduling
        super().check_and_update_config(vllm_config)
        scheduling.async_scheduling = wanted

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: the wheel has no kernels for CPUs."""
