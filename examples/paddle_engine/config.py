"""Sizes of the model and limits of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdcache import KVLayout
from fdcache.replay.config import PLAIN_SCHEDULING
from fdcache.replay.options import PLAIN_VALUES
from fdcache.settings import Settings
from fdcache.settings.scheduling import SchedulingSettings
from fdcache.settings.storage_tier import StorageTierSettings


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with random weights that follow from ``seed``.

    ``latent_dim`` > 0 makes it MLA: one latent of that size and a rotary part of ``rope_dim`` per token instead of
    keys and values per head. ``kv_dtype``: float32, bfloat16, or fp8 with a scale per head and token.
    ``draft_layers``: 0, or 1 for a multi-token-prediction layer that proposes the token after the next.
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
        """What fdcache has to know of the model: the planes of one block on one rank."""
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


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the engine.

    ``grid`` > 0 is deterministic mode: tokens are computed in padded chunks of ``grid`` rows, each at the row that its
    position has on that grid, so a token gets the same bits whatever was computed with it; reuse is cut to the grid,
    a multiple of ``split_kv``, the number of keys that attention reads at a time. 0: ordinary mode, all rows of
    a step in one batch. ``storage``: a folder in which blocks outlive the process. ``server``: the address of a service
    whose host tier is used instead of an own one of ``host_blocks``. ``scheduling``: the blocks that a decode takes
    at a time, and those kept for decodes after a preemption. ``log_digests``: write a digest of all logits.
    """

    block_size: int = 16
    device_blocks: int = 256
    host_blocks: int = 0
    max_running: int = 8
    step_tokens: int = 128
    grid: int = 32
    split_kv: int = 16
    ranks: int = 1
    write_policy: str = "write_through"
    storage: Path | None = None
    server: str | None = None
    scheduling: SchedulingSettings = PLAIN_SCHEDULING
    log_digests: bool = False

    def __post_init__(self) -> None:
        if self.grid % self.split_kv:
            raise ValueError(f"grid: {self.grid} is not a multiple of split_kv {self.split_kv}")
        if self.server and self.storage:
            raise ValueError("server: a service has storage of its own; leave storage out")

    @staticmethod
    def engine_variables() -> dict[str, Any]:
        """What the variables of the engine say, as fields."""
        settings = Settings.load(defaults=PLAIN_VALUES)
        return {"scheduling": settings.scheduling, "log_digests": settings.attention.deterministic_log}

    @property
    def storage_tier(self) -> StorageTierSettings:
        """Local files for each rank, which a request waits for, or none."""
        if self.storage is None:
            return StorageTierSettings()
        return StorageTierSettings(
            connector="local", directory=self.storage, size="256MiB", prefetch_policy="wait_complete"
        )
