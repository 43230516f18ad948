"""Sizes of the model and limits of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fdcache import KVLayout
from fdcache.integrations.fastdeploy.model_variables import AttentionSettings
from fdcache.integrations.fastdeploy.serving_variables import SchedulingSettings
from fdcache.replay.config import PLAIN_SCHEDULING, PLAIN_VALUES
from fdcache.settings import Settings


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with random weights derived from ``seed``.

    Attributes:
        latent_dim: above 0 selects MLA: one latent of that size and a rotary part of ``rope_dim`` per token instead of
            keys and values per head.
        kv_dtype: float32, bfloat16, or fp8 with a scale per head and token.
        draft_layers: 0, or 1 for a multi-token-prediction layer that proposes the token after the next.
    """

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    latent_dim: int = 0
    rope_dim: int = 16
    draft_layers: int = 0
    kv_dtype: str = "float32"
    max_positions: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        for name in ("rope_dim",) if self.latent_dim else ("head_dim",):
            if getattr(self, name) % 2:
                raise ValueError(f"{name}: {getattr(self, name)} is odd, and rotation takes pairs")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.draft_layers not in (0, 1):
            raise ValueError(f"draft_layers must be 0 or 1, got {self.draft_layers}")
        if self.latent_dim and self.kv_dtype == "fp8":
            raise ValueError(
                "kv_dtype: fp8 is for keys and values per head; use float32 or bfloat16 with latent_dim"
            )

    def layout(self, block_size: int, ranks: int) -> KVLayout:
        """Return the layout for fdcache: the planes of one block on one rank."""
        if self.heads % ranks or (not self.latent_dim and self.kv_heads % ranks):
            raise ValueError(f"ranks: {ranks} do not divide {self.heads} heads and {self.kv_heads} kv_heads")
        common: dict[str, Any] = {
            "model": "paddle-engine",
            "revision": f"{self}",
            "block_size": block_size,
            "num_layers": self.layers,
            "num_draft_layers": self.draft_layers,
            "tp_size": ranks,
        }
        if self.latent_dim:
            return KVLayout.mla(latent_dim=self.latent_dim + self.rope_dim, dtype=self.kv_dtype, **common)
        heads: dict[str, Any] = {"kv_heads": self.kv_heads // ranks, "head_dim": self.head_dim}
        if self.kv_dtype == "fp8":
            return KVLayout.block_fp8(dtype="float8_e4m3fn", **heads, **common)
        return KVLayout.uniform(dtype=self.kv_dtype, **heads, **common)


DEFAULTS = {
    "FDCACHE_BLOCK_SIZE": 16,
    "FDCACHE_DEVICE_BLOCKS": 200,
    "FDCACHE_HOST_MEMORY": "64MiB",
    "FDCACHE_WRITE_POLICY": "write_through",
    "FDCACHE_RPC_TIMEOUT": "5s",
    "FDCACHE_STORAGE_SIZE": "256MiB",
    "FDCACHE_PREFETCH_POLICY": "wait_complete",
}
"""Defaults for variables that neither a flag nor the environment sets."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of fdcache and limits of the engine, equal in every rank's process. Make one with ``load``.

    Attributes:
        grid: above 0 selects deterministic mode: tokens are computed in padded chunks of ``grid`` rows, each token at
            the row of its position on that grid, so it gets the same bits whatever is computed with it. Reuse is cut
            to the grid. 0 selects ordinary mode: all rows of a step in one batch.
        split_kv: number of keys that attention reads at a time; divides ``grid``.
        scheduling: blocks that a decode takes at a time, and blocks reserved for decodes after a preemption.
        log_digests: write a digest of all logits to standard error.
        idle_seconds: how long a step without tokens waits for copies.
    """

    layout: KVLayout
    settings: Settings
    max_running: int = 8
    step_tokens: int = 128
    grid: int = 32
    split_kv: int = 16
    scheduling: SchedulingSettings = PLAIN_SCHEDULING
    log_digests: bool = False
    idle_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.grid % self.split_kv:
            raise ValueError(f"grid: {self.grid} is not a multiple of split_kv {self.split_kv}")
        reuse_grid = self.settings.cache.reuse_grid
        if self.grid and reuse_grid % self.grid:
            raise ValueError(
                f"FDCACHE_REUSE_GRID: {reuse_grid} is not a multiple of the engine's grid {self.grid}"
            )
        if self.settings.cache.lookahead_tokens < self.layout.num_draft_layers:
            raise ValueError(
                "FDCACHE_LOOKAHEAD_TOKENS: a draft layer is fed the next token, so it is 1 or more"
            )
        if self.server and self.settings.storage_tier.is_on:
            connector = self.settings.storage_tier.connector
            raise ValueError(
                f"FDCACHE_STORAGE={connector}: with FDCACHE_SERVER the storage belongs to the service; set it for "
                "`fdcache serve` instead, or leave --server out"
            )

    @classmethod
    def load(
        cls,
        model: ModelConfig,
        arguments: Mapping[str, object] | None = None,
        *,
        grid: int = 32,
        **limits: int,
    ) -> EngineConfig:
        """Load the settings: ``arguments`` by variable name, then the environment, then ``DEFAULTS``.

        ``FD_DETERMINISTIC_MODE`` with its split size replaces a ``grid`` above 0.
        """
        engine = {"FDCACHE_REUSE_GRID": grid, "FDCACHE_LOOKAHEAD_TOKENS": model.draft_layers}
        settings = Settings.load(arguments=arguments, defaults={**PLAIN_VALUES, **DEFAULTS, **engine})
        attention = settings.group(AttentionSettings)
        if grid and attention.deterministic:
            grid = limits["split_kv"] = attention.split_kv_size
        layout = model.layout(settings.deployment.block_size, settings.deployment.ranks)
        follows = {
            "scheduling": settings.group(SchedulingSettings),
            "log_digests": attention.deterministic_log,
        }
        return cls(layout, settings, grid=grid, **follows, **limits)  # type: ignore[arg-type]

    @property
    def block_size(self) -> int:
        """Number of tokens in a block."""
        return self.layout.block_size

    @property
    def ranks(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.layout.tp_size

    @property
    def server(self) -> str | None:
        """Address of the service whose host tier is used, or None."""
        return self.settings.cache.server

    @property
    def device_blocks(self) -> int:
        """Number of device blocks of every rank."""
        return self.settings.cache_for(self.layout, self.device_bytes).device_blocks

    def device_bytes(self) -> int:
        """Return the memory of one rank's device in bytes."""
        from fdcache.integrations.paddle import device_bytes

        return device_bytes(self.ranks)
