"""A decoder-only transformer in torch with random weights; its attention reads the paged cache only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from benchmarks.ttft.attention import attention_for
from fdcache import KVLayout


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model and of its blocks."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    block_size: int

    def layout(self) -> KVLayout:
        """Return the layout: bfloat16 keys and values of each layer."""
        return KVLayout.uniform(
            model=self.name,
            revision="random",
            block_size=self.block_size,
            num_layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype="bfloat16",
        )


LLAMA_3_8B = Shape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 64)
TINY = Shape("tiny", 3, 64, 4, 2, 16, 128, 256, 16)


class Model:
    """RMSNorm, RoPE, grouped-query attention, gated feed-forward, in bfloat16.

    ``planes``: key and value of each layer in turn, each (blocks, kv_heads, block_size, head_dim).
    """

    def __init__(self, shape: Shape, device: str, planes: list[Tensor], max_positions: int) -> None:
        self.shape = s = shape
        self.planes = planes
        self._attend_paged = attention_for(device)
        generator = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int) -> Tensor:
            made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return made.normal_(0, rows**-0.5, generator=generator)

        self.embedding = matrix(s.vocab, s.hidden)
        self.head = matrix(s.hidden, s.vocab)
        self.layers = [
            {
                "qkv": matrix(s.hidden, (s.heads + 2 * s.kv_heads) * s.head_dim),
                "out": matrix(s.heads * s.head_dim, s.hidden),
                "gate_up": matrix(s.hidden, 2 * s.ffn),
                "down": matrix(s.ffn, s.hidden),
            }
            for _ in range(s.layers)
        ]
        frequency = 500000.0 ** -(torch.arange(0, s.head_dim, 2, device=device) / s.head_dim)
        angles = torch.arange(max_positions, device=device)[:, None] * frequency[None, :]
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def prefill(self, tokens: Tensor, start: int, table: Tensor, wait: Callable[[int], None]) -> Tensor:
        """Compute tokens [start, start + n) of one sequence; return the logits (vocab,) of the last, on the device.

        ``table``: the sequence's blocks. ``wait(layer)`` makes the layer's loaded blocks readable.
        """
        s, stop = self.shape, start + len(tokens)
        positions = torch.arange(start, stop, device=tokens.device)
        blocks, offsets = table[positions // s.block_size], positions % s.block_size
        used = table[: -(-stop // s.block_size)]
        x = self.embedding[tokens]
        for layer in range(s.layers):
            wait(layer)
            query, key, value = self._project(layer, x, positions)
            keys, values = self.planes[2 * layer], self.planes[2 * layer + 1]
            keys[blocks, :, offsets], values[blocks, :, offsets] = key, value
            context = [
                plane[used].transpose(0, 1).reshape(1, s.kv_heads, -1, s.head_dim)[:, :, :stop]
                for plane in (keys, values)
            ]
            mixed = self._attend(query.transpose(0, 1)[None], *context)
            x = self._finish(layer, x, mixed[0].transpose(0, 1).reshape(len(tokens), -1))
        return self._logits(x[-1:])[0]

    def decode(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """Compute one token of each sequence and return the next tokens. Works on tensors in place, so it can be
        captured into a CUDA graph. ``tables``: (sequences, blocks).
        """
        s = self.shape
        blocks = tables.gather(1, (positions // s.block_size)[:, None])[:, 0]
        offsets = positions % s.block_size
        x = self.embedding[tokens]
        for layer in range(s.layers):
            query, key, value = self._project(layer, x, positions)
            keys, values = self.planes[2 * layer], self.planes[2 * layer + 1]
            keys[blocks, :, offsets], values[blocks, :, offsets] = key, value
            mixed = self._attend_paged(query, keys, values, tables, positions)
            x = self._finish(layer, x, mixed.reshape(len(tokens), -1))
        return self._logits(x).argmax(-1)

    def _project(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        heads = (_norm(x) @ self.layers[layer]["qkv"]).view(len(x), -1, s.head_dim)
        query, key, value = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, context = query.shape[2], key.shape[2]
        bias: Any = causal_lower_right(length, context)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)

    def _finish(self, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        weights = self.layers[layer]
        x = x + mixed @ weights["out"]
        gate, up = (_norm(x) @ weights["gate_up"]).chunk(2, dim=-1)
        return x + (functional.silu(gate) * up) @ weights["down"]

    def _logits(self, x: Tensor) -> Tensor:
        return _norm(x) @ self.head


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
