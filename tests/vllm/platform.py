"""vLLM's CPU platform with the attention and the operators of this package. Loaded before vLLM's backends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from tests.vllm import mamba

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


def _prepack_experts(weight: torch.Tensor, out: torch.Tensor, isa: str) -> None:
    out.copy_(weight)


def _experts(
    out: torch.Tensor,
    given: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    skips_weights: bool,
    activation: str,
    isa: str,
) -> None:
    """Compute each token by its experts, which gpt-oss activates by pairs of lanes and others by halves."""
    out.zero_()
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            inner = gate_up[expert] @ given[token]
            inner = inner if gate_up_bias is None else inner + gate_up_bias[expert]
            if "oai" in activation:
                gate, up = inner[0::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = inner.chunk(2)
                inner = torch.nn.functional.silu(gate) * up
            result = down[expert] @ inner
            result = result if down_bias is None else result + down_bias[expert]
            out[token] += result if skips_weights else result * weights[token, place]


def _greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1).view(-1)


def _expand(
    out: torch.Tensor, given: torch.Tensor, ends: torch.Tensor, replaced: float, replacement: float
) -> None:
    each = torch.where(given == replaced, replacement, given).to(out.dtype)
    bounds = [0, *ends.tolist()]
    for value, (begin, end) in zip(each, pairwise(bounds), strict=True):
        out[begin:end] = value


def _reject_greedy(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    targets: torch.Tensor,
    bonus: torch.Tensor,
    greedy: torch.Tensor | None,
    most: int,
) -> None:
    for row, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        if greedy is not None and not greedy[row]:
            continue
        agreed = (drafts[begin:end] == targets[begin:end]).long().cumprod(0).sum().item()
        chosen = min(agreed + 1, end - begin)
        out[row, :chosen] = targets[begin : begin + chosen]
        if agreed == end - begin:
            out[row, agreed] = bonus.view(-1)[row]


def _reject_random(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    draft_probabilities: torch.Tensor | None,
    probabilities: torch.Tensor,
    bonus: torch.Tensor,
    recovered: torch.Tensor,
    uniform: torch.Tensor,
    greedy: torch.Tensor,
    most: int,
    vocabulary: int,
    are_certain: bool,
) -> None:
    for row, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        if greedy[row]:
            continue
        for place in range(begin, end):
            draft = drafts[place]
            expected = 1.0 if draft_probabilities is None else draft_probabilities[place, draft]
            if probabilities[place, draft] < uniform[place] * expected:
                out[row, place - begin] = recovered[place]
                break
            out[row, place - begin] = draft
        else:
            out[row, end - begin] = bonus.view(-1)[row]


def _recover(
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    draft_probabilities: torch.Tensor | None,
    probabilities: torch.Tensor,
    inverse: torch.Tensor,
    vocabulary: int,
    are_certain: bool,
) -> None:
    for row, (begin, end) in enumerate(pairwise([0, *ends.tolist()])):
        for place in range(begin, end):
            left = probabilities[place].clone()
            if draft_probabilities is None:
                left[drafts[place]] = 0
            else:
                left = (left - draft_probabilities[place]).clamp(min=0)
            out[place] = (left * inverse[row]).argmax()


for _schema, _function in (
    ("expand_kernel_impl(Tensor! out, Tensor given, Tensor ends, float replaced, float by) -> ()", _expand),
    (
        "rejection_greedy_sample_kernel_impl(Tensor! out, Tensor ends, Tensor drafts, Tensor targets, Tensor bonus, "
        "Tensor? greedy, int most) -> ()",
        _reject_greedy,
    ),
    (
        "rejection_random_sample_kernel_impl(Tensor! out, Tensor ends, Tensor drafts, Tensor? draft_probabilities, "
        "Tensor probabilities, Tensor bonus, Tensor recovered, Tensor uniform, Tensor greedy, int most, "
        "int vocabulary, bool are_certain) -> ()",
        _reject_random,
    ),
    (
        "sample_recovered_tokens_kernel_impl(Tensor! out, Tensor ends, Tensor drafts, Tensor? draft_probabilities, "
        "Tensor probabilities, Tensor inverse, int vocabulary, bool are_certain) -> ()",
        _recover,
    ),
    ("greedy_argmax(Tensor logits) -> Tensor", _greedy_argmax),
    ("prepack_moe_weight(Tensor weight, Tensor! out, str isa) -> ()", _prepack_experts),
    (
        "cpu_fused_moe(Tensor! out, Tensor given, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
        "Tensor? down_bias, Tensor weights, Tensor chosen, bool skips_weights, str activation, str isa) -> ()",
        _experts,
    ),
    ("init_cpu_memory_env(int[] nodes) -> ()", _init_cpu_memory_env),
    ("silu_and_mul(Tensor! out, Tensor input) -> ()", _silu_and_mul),
    (
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor tables, Tensor! slots, "
        "int block_size) -> ()",
        _slot_mapping,
    ),
    *mamba.OPERATORS,
):
    _OPERATORS.define(_schema)
    _OPERATORS.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")


class TestPlatform(CpuPlatform):  # type: ignore[misc]
    """A CPU without compiled kernels; it leaves asynchronous scheduling as configured."""

    __test__ = False

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if getattr(attn_selector_config, "use_mla", False):
            return "tests.vllm.mla.TorchMlaBackend"
        return "tests.vllm.attention.TorchBackend"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduling, cache = vllm_config.scheduler_config, vllm_config.cache_config
        wanted = (
            scheduling.async_scheduling,
            scheduling.enable_chunked_prefill,
            scheduling.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        super().check_and_update_config(vllm_config)
        scheduling.async_scheduling, scheduling.enable_chunked_prefill = wanted[:2]
        scheduling.max_num_batched_tokens, cache.enable_prefix_caching = wanted[2:]

    @classmethod
    def import_kernels(cls) -> None:
        """Import nothing: the wheel has no kernels for CPUs."""
