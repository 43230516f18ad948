"""The causal convolutions of SGLang's short-convolution layers in plain torch: its kernels are for GPUs alone."""

from __future__ import annotations

from typing import Any

import torch

PAD = -1


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    **options: Any,
) -> torch.Tensor:
    """Convolve sequences of tokens, shape (channels, tokens), each from its state on, and keep their last tokens."""
    assert query_start_loc is not None and cache_indices is not None and conv_states is not None
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        tokens = x[:, starts[i] : starts[i + 1]]
        if slot == PAD or not tokens.shape[1]:
            continue
        state = conv_states[slot]
        is_known = has_initial_state is not None and bool(has_initial_state[i])
        before = state if is_known else torch.zeros_like(state)
        out[:, starts[i] : starts[i + 1]] = _convolved(before, tokens, weight, bias, activation, state)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Convolve one token of each sequence, shape (sequences, channels)."""
    assert conv_state_indices is not None
    out = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        if slot != PAD:
            state = conv_state[slot]
            out[i] = _convolved(state, x[i, :, None], weight, bias, activation, state)[:, 0]
    return out


def _convolved(
    before: torch.Tensor,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    state: torch.Tensor,
) -> torch.Tensor:
    whole = torch.cat((before.to(tokens.dtype), tokens), dim=1)
    convolved = torch.nn.functional.conv1d(whole[None], weight[:, None], bias, groups=weight.shape[0])[0]
    state.copy_(whole[:, whole.shape[1] - state.shape[1] :])
    return torch.nn.functional.silu(convolved) if activation in ("silu", "swish") else convolved
