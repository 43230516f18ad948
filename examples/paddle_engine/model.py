"""The transformer: RMSNorm, RoPE, grouped-query or latent attention over the paged cache, gated feed-forward."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import functional

from examples.paddle_engine.batch import Batch, Span
from examples.paddle_engine.config import ModelConfig
from examples.paddle_engine.paged_kv import PagedKV

Reduce = Callable[[Tensor], Tensor]
"""Sum a tensor over the ranks."""

_SHARPNESS = 4.0
"""Random weights attend to everything a little; sharper attention makes a wrong block change the tokens."""


class Model:
    """One rank's part of the model: its heads and its share of the feed-forward; the rest is replicated."""

    def __init__(self, config: ModelConfig, rank: int, ranks: int, reduce: Reduce) -> None:
        self.config = config
        self._rank = rank
        self._ranks = ranks
        self._reduce = reduce
        self._heads = config.heads // ranks
        self._head_dim = config.latent_dim + config.rope_dim if config.latent_dim else config.head_dim
        rotary = config.rope_dim if config.latent_dim else config.head_dim
        angles = (
            np.arange(config.max_positions)[:, None] / 10000 ** (np.arange(0, rotary, 2) / rotary)[None, :]
        )
        self._cos = paddle.to_tensor(np.cos(angles).astype(np.float32))
        self._sin = paddle.to_tensor(np.sin(angles).astype(np.float32))
        self.load_weights(config.seed)

    def load_weights(self, seed: int) -> None:
        """Generate all weights from a seed; each rank keeps its part."""
        c, random = self.config, np.random.default_rng(seed)

        def matrix(rows: int, columns: int, split: int | None = None) -> Tensor:
            """Return a random matrix; ``split`` is the axis along which the ranks share it."""
            whole = (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
            part = whole if split is None else np.split(whole, self._ranks, axis=split)[self._rank]
            return paddle.to_tensor(np.ascontiguousarray(part))

        def layer() -> dict[str, Tensor]:
            query, key = self._head_dim * c.heads, self._head_dim * (1 if c.latent_dim else c.kv_heads)
            made = {"query": _SHARPNESS * matrix(c.hidden, query, 1)}
            if c.latent_dim:
                made["key"] = matrix(c.hidden, key)
                made["expand"] = matrix(c.latent_dim, c.heads * c.head_dim, 1)
            else:
                made["key"], made["value"] = (matrix(c.hidden, key, 1) for _ in range(2))
            made["output"] = matrix(c.heads * c.head_dim, c.hidden, 0)
            made["gate"], made["up"] = (matrix(c.hidden, c.ffn, 1) for _ in range(2))
            made["down"] = matrix(c.ffn, c.hidden, 0)
            return made

        self._embedding = paddle.to_tensor(random.standard_normal((c.vocab, c.hidden)).astype(np.float32))
        self._head = matrix(c.hidden, c.vocab)
        self._layers = [layer() for _ in range(c.layers + c.draft_layers)]
        self._draft_mix = matrix(2 * c.hidden, c.hidden)

    def forward(self, batch: Batch, kv: PagedKV, before_layer: Callable[[int], None]) -> Tensor:
        """Return hidden states (rows, hidden) after the main layers; ``before_layer`` waits for a layer's KV."""
        x = self._embed(batch.tokens)
        for item, rows in batch.images:
            x[rows] = self._image(item.hash)
        for layer in range(self.config.layers):
            before_layer(layer)
            x = self._layer(layer, x, batch, kv)
        return x

    def draft(
        self,
        batch: Batch,
        hidden: Tensor,
        next_tokens: Tensor,
        kv: PagedKV,
        before_layer: Callable[[int], None],
    ) -> Tensor:
        """Return the hidden states of the draft layer, which gets each row's hidden state and next token."""
        layer = self.config.layers
        before_layer(layer)
        x = paddle.concat([_norm(hidden), _norm(self._embed(next_tokens))], axis=-1) @ self._draft_mix
        return self._layer(layer, x, batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocab)."""
        return _norm(hidden) @ self._head

    def _embed(self, tokens: Tensor) -> Tensor:
        return paddle.gather(self._embedding, tokens)

    def _image(self, name: str | bytes) -> Tensor:
        """Return an embedding derived from the image's hash; stands for a vision encoder."""
        data = name.encode() if isinstance(name, str) else name
        seed = int.from_bytes(hashlib.sha256(data).digest()[:8], "little")
        return paddle.to_tensor(
            np.random.default_rng(seed).standard_normal(self.config.hidden).astype(np.float32)
        )

    def _layer(self, layer: int, x: Tensor, batch: Batch, kv: PagedKV) -> Tensor:
        weights = self._layers[layer]
        x = x + self._reduce(self._attention(layer, _norm(x), batch, kv) @ weights["output"])
        h = _norm(x)
        gated = functional.silu(h @ weights["gate"]) * (h @ weights["up"])
        return x + self._reduce(gated @ weights["down"])

    def _attention(self, layer: int, h: Tensor, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's KV to the cache, then attend to the cache.

        With MLA the cache holds one vector per token: a latent, which is key and value of all heads, and a rotary key.
        """
        weights, rows, dim = self._layers[layer], h.shape[0], self._head_dim
        query = self._rotate((h @ weights["query"]).reshape([rows, -1, dim]), batch.positions)
        key = self._rotate((h @ weights["key"]).reshape([rows, -1, dim]), batch.positions)
        value = (h @ weights["value"]).reshape(key.shape) if "value" in weights else None
        valid = paddle.to_tensor(batch.rows)
        kv.write(
            layer,
            batch.slots,
            paddle.gather(key, valid),
            None if value is None else paddle.gather(value, valid),
        )
        outputs = []
        for span in batch.spans:
            keys, values = kv.read(layer, span.blocks)
            values = keys[:, :, : self.config.latent_dim] if values is None else values
            outputs.append(_attend(query[span.first : span.last], keys, values, span))
        mixed = paddle.concat(outputs, axis=1) if len(outputs) > 1 else outputs[0]
        if self.config.latent_dim:
            mixed = mixed @ weights["expand"].reshape([-1, self._heads, self.config.head_dim]).transpose(
                [1, 0, 2]
            )
        return mixed.transpose([1, 0, 2]).reshape([rows, -1])

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply rotary position embedding to (rows, heads, dim), or to the rotary part at the end of dim."""
        cos = paddle.gather(self._cos, positions).unsqueeze(1)
        sin = paddle.gather(self._sin, positions).unsqueeze(1)
        plain = x.shape[-1] - 2 * cos.shape[-1]
        first, second = x[:, :, plain:].chunk(2, axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return paddle.concat([x[:, :, :plain], *turned] if plain else turned, axis=-1)


def _norm(x: Tensor) -> Tensor:
    return x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + 1e-6)


def _attend(query: Tensor, keys: Tensor, values: Tensor, span: Span) -> Tensor:
    """Attend from (rows, heads, dim) to (kv_heads, tokens, dim); return (heads, rows, value dim)."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[0]
    grouped = query.transpose([1, 0, 2]).reshape([kv_heads, heads // kv_heads, rows, dim])
    scores = (grouped * dim**-0.5).matmul(keys.unsqueeze(1), transpose_y=True) + span.mask
    mixed = functional.softmax(scores, axis=-1) @ values.unsqueeze(1)
    return mixed.reshape([heads, rows, -1])
