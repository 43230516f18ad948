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


def _selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    starts: torch.Tensor | None,
    slots: torch.Tensor | None,
    has_state: torch.Tensor | None,
    states: torch.Tensor,
    null_slot: int,
    *_: Any,
) -> None:
    """Scan each request from the state in its slot, and leave its last state there."""
    assert starts is not None
    assert slots is not None
    step = delta.float() if bias is None else delta.float() + bias.float()[:, None]
    step = torch.nn.functional.softplus(step) if softplus else step
    heads = u.shape[0] // b.shape[0]
    wide_b, wide_c = (each.float().repeat_interleave(heads, dim=0) for each in (b, c))
    out = torch.zeros_like(step)
    for row, (begin, end) in enumerate(pairwise(starts.tolist())):
        slot = int(slots[row])
        if slot == null_slot:
            continue
        goes_on = has_state is not None and bool(has_state[row])
        state = states[slot].float() if goes_on else torch.zeros_like(states[slot], dtype=torch.float32)
        for at in range(begin, end):
            decay = torch.exp(step[:, at, None] * a.float())
            state = decay * state + (step[:, at] * u[:, at].float())[:, None] * wide_b[..., at]
            out[:, at] = (state * wide_c[..., at]).sum(-1)
        states[slot].copy_(state)
    if d is not None:
        out += d.float()[:, None] * u.float()
    if gate is None:
        delta.copy_(out)
    else:
        gate.copy_(out * torch.nn.functional.silu(gate.float()))


def _update_convolution(
    given: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    slots: torch.Tensor | None,
    starts: torch.Tensor | None,
    null_slot: int,
) -> torch.Tensor:
    """Convolve the next token of each request with those that its slot keeps, and keep it in their place."""
    out = torch.zeros_like(given)
    for row in range(len(given)):
        slot = row if slots is None else int(slots[row])
        if slot == null_slot:
            continue
        window = torch.cat((states[slot], given[row].to(states.dtype)[:, None]), dim=-1)[
            :, -weight.shape[-1] :
        ]
        summed = (window.float() * weight.float()).sum(-1)
        summed = summed if bias is None else summed + bias.float()
        out[row] = torch.nn.functional.silu(summed) if activation else summed
        states[slot].copy_(window[:, -states.shape[-1] :])
    return out


def _update_state(
    states: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    sources: torch.Tensor | None,
    targets: torch.Tensor | None,
    null_slot: int,
    out: torch.Tensor,
    *_: Any,
) -> None:
    """Let the state of each request go on by a token, from its source slot into its target slot."""
    for row in range(len(x)):
        source = row if sources is None else int(sources.view(-1)[row])
        target = source if targets is None else int(targets.view(-1)[row])
        if source == null_slot:
            continue
        delta = step[row].float() if bias is None else step[row].float() + bias.float()
        delta = torch.nn.functional.softplus(delta) if softplus else delta
        heads = x.shape[1] // b.shape[1]
        wide_b, wide_c = (each[row].float().repeat_interleave(heads, dim=0)[:, None, :] for each in (b, c))
        state = torch.exp(delta[..., None] * a.float()) * states[source].float()
        state += (delta * x[row].float())[..., None] * wide_b
        value = (state * wide_c).sum(-1)
        value = value if d is None else value + d.float() * x[row].float()
        out[row] = value if gate is None else value * torch.nn.functional.silu(gate[row].float())
        states[target].copy_(state)


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
    (
        "causal_conv1d_update_cpu_vec(Tensor given, Tensor! states, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? slots, Tensor? starts, int null_slot) -> Tensor",
        _update_convolution,
    ),
    (
        "selective_state_update_cpu(Tensor! states, Tensor x, Tensor step, Tensor a, Tensor b, Tensor c, Tensor? d, "
        "Tensor? gate, Tensor? bias, bool softplus, Tensor? sources, Tensor? targets, int null_slot, Tensor! out, "
        "Tensor? accepted, Tensor? starts) -> ()",
        _update_state,
    ),
    (
        "selective_scan_fwd(Tensor u, Tensor! delta, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor!? gate, "
        "Tensor? bias, bool softplus, Tensor? starts, Tensor? slots, Tensor? has_state, Tensor! states, int null_slot, "
        "int block_size, Tensor? first, Tensor? last, Tensor? initial, Tensor? chunks, Tensor? ends) -> ()",
        _selective_scan,
    ),
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
