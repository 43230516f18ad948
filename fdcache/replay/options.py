"""From options as a user gives them to a ``ReplayConfig``: settings, layout, and defaults for a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fdcache.errors import LayoutError, ReplayOptionError
from fdcache.layout import KVLayout, LayoutOptions
from fdcache.settings import Settings
from fdcache.settings.engine_model import AttentionBackend, AttentionSettings

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}
"""Short names of element types; the full names of ``KVLayout`` serve as well."""

PLAIN_VALUES: Mapping[str, int | str] = {
    "FD_ENC_DEC_BLOCK_NUM": 1,
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": 0,
}
"""A block at a time for decodes, and no reserve for them, where the environment asks for nothing else."""

LAPTOP_DEFAULTS: Mapping[str, int | str] = {
    "FDCACHE_DEVICE_BLOCKS": 1024,
    "FDCACHE_HOST_MEMORY": "64MiB",
    "FDCACHE_STORAGE_SIZE": "1GiB",
    **PLAIN_VALUES,
}
"""What holds for a replay where neither an option nor the environment says otherwise."""

MOST_LAYERS = 1024
"""Main or draft layers of a replay; every plane of every layer is a tensor of its own."""


class LayoutName(StrEnum):
    """The layouts that a replay can build."""

    UNIFORM = "uniform"
    MLA = "mla"
    FP8 = "fp8"


def layout_of(attention: AttentionSettings) -> LayoutName:
    """Choose the planes that the engine's attention backend keeps."""
    return LayoutName.MLA if attention.backend is AttentionBackend.MLA_ATTN else LayoutName.UNIFORM


@dataclass(frozen=True, slots=True)
class Shape:
    """A small model: how many layers and how large. ``mla`` caches one latent of ``head_dim`` a token."""

    layout: LayoutName = LayoutName.UNIFORM
    layers: int = 2
    draft_layers: int = 0
    kv_heads: int = 1
    head_dim: int = 16
    dtype: str = "bf16"

    def build(self, block_size: int, ranks: int) -> KVLayout:
        """The layout of one rank. Raises ``ReplayOptionError`` for a shape that cannot be."""
        dtype = DTYPES.get(self.dtype, self.dtype)
        common = LayoutOptions(
            model="replay",
            revision="1",
            num_layers=self.layers,
            num_draft_layers=self.draft_layers,
            tp_size=ranks,
        )
        try:
            if self.layout is LayoutName.FP8:
                return KVLayout.block_fp8(
                    block_size=block_size, kv_heads=self.kv_heads, head_dim=self.head_dim, **common
                )
            if self.layout is LayoutName.MLA:
                latent_dim = self.kv_heads * self.head_dim
                return KVLayout.mla(block_size=block_size, latent_dim=latent_dim, dtype=dtype, **common)
            return KVLayout.uniform(
                block_size=block_size, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=dtype, **common
            )
        except LayoutError as error:
            raise ReplayOptionError("--dtype" if "dtype" in str(error) else "--layout", str(error)) from error


def load_settings(given: Mapping[str, object]) -> Settings:
    """The settings in force: options given, the environment, then defaults for a laptop.

    ``given`` maps variable names to the options' values, None where an option was left out, as for
    ``Settings.load``. Raises ``SettingsError`` for values out of range.
    """
    return Settings.load(arguments=given, defaults=LAPTOP_DEFAULTS)
