"""Configuration of a replay: the model shape, the settings, the options, and the memory they need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fdcache.errors import LayoutError, ReplayOptionError
from fdcache.groups import CacheGroup, Reach
from fdcache.integrations.fastdeploy.model_variables import AttentionBackend, AttentionSettings
from fdcache.integrations.fastdeploy.serving_variables import SchedulingSettings
from fdcache.layout import KVLayout, LayoutOptions
from fdcache.machine.memory import available_memory
from fdcache.replay.devices import DeviceName
from fdcache.settings import Settings
from fdcache.settings.cache import CacheSettings, CopySettings, StorageTierSettings
from fdcache.settings.kinds import readable_size
from fdcache.settings.variable import Group
from fdcache.tiers.host import host_block_bytes

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}
"""Short names of element types; the full names of ``KVLayout`` work too."""

PLAIN_SCHEDULING = SchedulingSettings(decode_blocks=1, prefill_reserve=0)
"""Decodes get one block at a time, and admission keeps no reserve for them."""

PLAIN_VALUES: Mapping[str, int | str] = {
    "FD_ENC_DEC_BLOCK_NUM": 1,
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": 0,
}
"""``PLAIN_SCHEDULING`` as defaults of variables."""

LAPTOP_DEFAULTS: Mapping[str, int | str] = {
    "FDCACHE_DEVICE_BLOCKS": 1024,
    "FDCACHE_HOST_MEMORY": "64MiB",
    "FDCACHE_STORAGE_SIZE": "1GiB",
    **PLAIN_VALUES,
}
"""Defaults of a replay for variables that neither an option nor the environment sets."""

WHOLE_DEFAULTS: Mapping[str, int | str] = {**LAPTOP_DEFAULTS, "FDCACHE_WRITE_POLICY": "write_through"}
"""Those of a replay in which every block is copied to the host.

With groups of layers, what left the device in part cannot be stored at a later hit; and nodes read from each other what
only one of them has seen.
"""

_GROUP = re.compile(r"(all|last|chunk|state)(?::(\d+))?(?:/(\d+))?")

MOST_LAYERS = 1024
"""Maximum number of main or draft layers; every plane of every layer is a tensor of its own."""

SAMPLE_EVERY = 8
"""``Verify.SAMPLE`` compares every 8th block of a reused prefix, and its last block."""


class LayoutName(StrEnum):
    """Layouts that a replay can build."""

    UNIFORM = "uniform"
    MLA = "mla"
    FP8 = "fp8"


class VerifyBytes(StrEnum):
    """Share of the reused blocks whose bytes are compared."""

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"

    @property
    def every(self) -> int:
        """Distance between compared blocks; 0 compares none."""
        return {VerifyBytes.OFF: 0, VerifyBytes.SAMPLE: SAMPLE_EVERY, VerifyBytes.ALL: 1}[self]


def parse_groups(text: str, page: int) -> tuple[CacheGroup, ...]:
    """Return the groups of layers that a text such as ``all,last:1024/16,chunk:512,state`` lists.

    Each has a reach, its tokens for a window or a chunk, and the tokens of a block, which are a ``page`` if left out.
    Raises ``ReplayOptionError``.
    """
    groups = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        if found is None:
            raise ReplayOptionError(
                "--groups",
                f"{part!r} is no group; list groups with commas: all, last:TOKENS, chunk:TOKENS or state, each with "
                "/TOKENS for blocks smaller than a page",
            )
        reach, tokens, block = found.groups()
        groups.append(CacheGroup(int(block or page), Reach(reach), int(tokens or 0)))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a small model. ``mla`` caches one latent of ``kv_heads * head_dim`` elements per token.

    ``groups``: its groups of layers as for ``parse_groups``; ``layers`` are then those of each group.
    """

    layout: LayoutName = LayoutName.UNIFORM
    layers: int = 2
    draft_layers: int = 0
    kv_heads: int = 1
    head_dim: int = 16
    dtype: str = "bf16"
    groups: str | None = None

    def build(self, block_size: int, ranks: int) -> KVLayout:
        """Build the layout of one rank. Raises ``ReplayOptionError`` for an invalid shape."""
        dtype = DTYPES.get(self.dtype, self.dtype)
        common = LayoutOptions(
            model="replay",
            revision="1",
            num_layers=self.layers,
            num_draft_layers=self.draft_layers,
            tp_size=ranks,
        )
        if self.groups is not None and (groups := parse_groups(self.groups, block_size)) != (
            CacheGroup(block_size),
        ):
            common["groups"] = groups
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
            option = next((each for each in ("dtype", "groups") if each in str(error)), "layout")
            raise ReplayOptionError(f"--{option}", str(error)) from error


MOST_RANKS = 64
"""Ranks of one replay, each of which is a process."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Options of one replay.

        layout = Shape(layers=4).build(block_size=64, ranks=1)
        config = ReplayConfig(layout, CacheSettings(device_blocks=512, host_memory=1 << 30))

    The replay runs ``layout.tp_size`` ranks. Raises ``ReplayOptionError`` naming an option that is out of range.

    Attributes:
        concurrency: maximum number of running requests.
        chunk_tokens: maximum number of tokens computed in one step.
        speed: clock of the workload relative to the wall clock; None runs as fast as possible.
        load_failures: share of loads into the device that fail, from 0 to 1.
    """

    layout: KVLayout
    cache: CacheSettings
    transfer: CopySettings = field(default_factory=CopySettings)
    storage: StorageTierSettings = field(default_factory=StorageTierSettings)
    storage_options: Group | None = None
    """The settings of the storage connector's own."""

    scheduling: SchedulingSettings = PLAIN_SCHEDULING
    concurrency: int = 16
    chunk_tokens: int = 4096
    speed: float | None = None
    verify: VerifyBytes = VerifyBytes.ALL
    seed: int = 0
    load_failures: float = 0.0
    device: DeviceName = DeviceName.CPU

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ReplayOptionError("--concurrency", f"{self.concurrency} is below 1")
        if self.chunk_tokens < self.concurrency:
            raise ReplayOptionError(
                "--chunk-tokens",
                f"{self.chunk_tokens} cannot give {self.concurrency} running requests a token each step; "
                f"use at least {self.concurrency} or a lower --concurrency",
            )
        if self.speed is not None and not 0 < self.speed < math.inf:
            raise ReplayOptionError(
                "--speed", f"{self.speed} is not above 0 and finite; leave it out for full speed"
            )
        if self.seed < 0:
            raise ReplayOptionError("--seed", f"{self.seed} is below 0")
        if self.load_failures and self.device is not DeviceName.CPU:
            raise ReplayOptionError("--load-failures", "failures can be injected on the CPU device only")
        if not 0 <= self.load_failures <= 1:
            raise ReplayOptionError("--load-failures", f"{self.load_failures} is not between 0 and 1")

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.layout.block_size)

    def device_blocks_for(self, tokens: int) -> int:
        """Return the number of device blocks that a request of ``tokens`` tokens holds while it computes all of them.

        With groups of layers a block of ``blocks_for`` is a page, with device blocks for each group.
        """
        return self.blocks_for(tokens) * (self.layout.page_records + self.layout.num_states)


def layout_of(attention: AttentionSettings) -> LayoutName:
    """Return the layout of the engine's attention backend."""
    return LayoutName.MLA if attention.backend is AttentionBackend.MLA_ATTN else LayoutName.UNIFORM


def load_settings(
    given: Mapping[str, object], defaults: Mapping[str, int | str] = LAPTOP_DEFAULTS
) -> Settings:
    """Load the settings: options first, then the environment, then ``defaults``.

    ``given`` maps variable names to option values, None for an option that was left out. Raises ``SettingsError`` for
    values out of range.
    """
    return Settings.load(arguments=given, defaults=defaults)


def device_block_bytes(layout: KVLayout) -> int:
    """Return the device memory of one block on all ranks."""
    return layout.tp_size * sum(plane.device_stride for plane in layout.planes)


def require_machine(config: ReplayConfig) -> None:
    """Raise ``ReplayOptionError`` for more ranks than may be processes, and if the tiers do not fit in memory.

    It names the option and a number or size that fits.
    """
    layout, ranks = config.layout, config.layout.tp_size
    if ranks > MOST_RANKS:
        raise ReplayOptionError(
            "--ranks", f"{ranks} ranks would be as many processes; use at most {MOST_RANKS}"
        )
    free = available_memory().nbytes
    block_bytes = device_block_bytes(layout)
    device = config.cache.device_blocks * block_bytes
    if device > free:
        fits = free // block_bytes
        if not fits:
            raise ReplayOptionError(
                "--device-blocks",
                f"not one block of {readable_size(block_bytes // ranks)} on {ranks} ranks fits into the "
                f"{readable_size(free)} that are free; make --block-size, --layers, --kv-heads or --head-dim smaller",
            )
        raise ReplayOptionError(
            "--device-blocks",
            f"{config.cache.device_blocks} blocks of {readable_size(block_bytes // ranks)} on {ranks} ranks take "
            f"{readable_size(device)}, but {readable_size(free)} are free; at most {fits} would fit",
        )
    if config.cache.server is not None:
        return
    host, host_block = config.cache.host_memory, host_block_bytes(layout)
    if host > free - device:
        raise ReplayOptionError(
            "--host-memory",
            f"{readable_size(host)}, beside {readable_size(device)} of device blocks, do not fit into the "
            f"{readable_size(free)} that are free; at most {readable_size(free - device)} would fit",
        )
    if 0 < host < host_block:
        raise ReplayOptionError(
            "--host-memory",
            f"{readable_size(host)} hold no block of {readable_size(host_block)}; give at least {host_block} bytes, "
            "or 0 to do without a host tier",
        )
