"""Operators of Mamba's layers in plain torch, by the names that vLLM's CPU kernels have."""

from __future__ import annotations

from itertools import pairwise

import torch


def _scan(
    out: torch.Tensor,
    states: torch.Tensor,
    given: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    inward: torch.Tensor,
    outward: torch.Tensor,
    skipped: torch.Tensor | None,
    gate: torch.Tensor | None,
    bounds: torch.Tensor,
) -> None:
    """Go through the tokens of each prompt; ``states`` are those before it, and then those after it."""
    per_group = given.shape[1] // inward.shape[1]
    for state, (begin, end) in zip(states, pairwise(bounds.tolist()), strict=True):
        for token in range(begin, end):
            state.copy_(
                _advanced(
                    state, given[token].float(), steps[token][:, None], decay[:, None, None], inward[token]
                )
            )
            result = state @ outward[token].float().repeat_interleave(per_group, 0)[:, :, None]
            out[token] = _shown(result.squeeze(-1), given[token], skipped, gate, token).to(out.dtype)


def _update(
    state: torch.Tensor,
    given: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    inward: torch.Tensor,
    outward: torch.Tensor,
    skipped: torch.Tensor | None,
    gate: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_softplus: bool,
    read: torch.Tensor | None,
    written: torch.Tensor | None,
    absent: int,
    out: torch.Tensor,
    accepted: torch.Tensor | None,
    bounds: torch.Tensor | None,
) -> None:
    """Go on by one token in each row, from the slot that is ``read`` to the one that is ``written``."""
    assert read is not None and accepted is None and bounds is None
    sources = read.reshape(len(given), -1)[:, 0].tolist()
    targets = sources if written is None else written.reshape(len(given), -1)[:, 0].tolist()
    per_group = given.shape[1] // inward.shape[1]
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source == absent:
            continue
        step = steps[row].float() if bias is None else steps[row].float() + bias.float()
        step = torch.nn.functional.softplus(step) if is_softplus else step
        after = _advanced(state[source].float(), given[row].float(), step, decay.float(), inward[row])
        state[target] = after.to(state.dtype)
        result = after @ outward[row].float().repeat_interleave(per_group, 0)[:, :, None]
        out[row] = _shown(result.squeeze(-1), given[row], skipped, gate, row).to(out.dtype)


def _advanced(
    state: torch.Tensor, given: torch.Tensor, step: torch.Tensor, decay: torch.Tensor, inward: torch.Tensor
) -> torch.Tensor:
    """Return the states of the heads, (heads, width, state), after one more token."""
    each = inward.float().repeat_interleave(len(given) // len(inward), 0)
    return state * torch.exp(step[:, :, None] * decay) + (step * given)[:, :, None] * each[:, None, :]


def _shown(
    result: torch.Tensor,
    given: torch.Tensor,
    skipped: torch.Tensor | None,
    gate: torch.Tensor | None,
    row: int,
) -> torch.Tensor:
    if skipped is not None:
        result = result + (skipped if skipped.dim() > 1 else skipped[:, None]) * given.float()
    return result if gate is None else result * torch.nn.functional.silu(gate[row].float())


def _convolve(
    given: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    slots: torch.Tensor | None,
    bounds: torch.Tensor | None,
    absent: int,
) -> torch.Tensor:
    """Convolve one token in each row with the inputs before it, which its slot holds."""
    assert slots is not None and bounds is None
    out, length = torch.zeros_like(given), weight.shape[1] - 1
    rows = zip(given.reshape(len(given), -1), slots.reshape(len(given), -1)[:, 0].tolist(), strict=True)
    for row, (token, slot) in enumerate(rows):
        if slot == absent:
            continue
        inputs = torch.cat([state[slot, :, :length], token[:, None].to(state.dtype)], dim=1)
        result = (inputs.to(weight.dtype) * weight).sum(1)
        result = result if bias is None else result + bias
        result = torch.nn.functional.silu(result) if activation in ("silu", "swish") else result
        out[row] = result.reshape(out[row].shape).to(out.dtype)
        state[slot, :, :length] = inputs[:, 1:]
    return out


OPERATORS = (
    (
        "mamba_chunk_scan_fwd_cpu(Tensor! out, Tensor! states, Tensor given, Tensor steps, Tensor decay, "
        "Tensor inward, Tensor outward, Tensor? skipped, Tensor? gate, Tensor bounds) -> ()",
        _scan,
    ),
    (
        "selective_state_update_cpu(Tensor! state, Tensor given, Tensor steps, Tensor decay, Tensor inward, "
        "Tensor outward, Tensor? skipped, Tensor? gate, Tensor? bias, bool is_softplus, Tensor? read, "
        "Tensor? written, int absent, Tensor! out, Tensor? accepted, Tensor? bounds) -> ()",
        _update,
    ),
    (
        "causal_conv1d_update_cpu_vec(Tensor given, Tensor! state, Tensor weight, Tensor? bias, str? activation, "
        "Tensor? slots, Tensor? bounds, int absent) -> Tensor",
        _convolve,
    ),
)
"""Schemas and what implements them."""
