"""ReplayConfig: everything a replay is told beside its workload."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from fdcache.errors import ReplayOptionError
from fdcache.layout import KVLayout
from fdcache.replay.planes import DeviceName
from fdcache.settings.cache import CacheSettings, MooncakeSettings, StorageTierSettings, TransferSettings
from fdcache.settings.engine_serving import SchedulingSettings

PLAIN_SCHEDULING = SchedulingSettings(decode_blocks=1, prefill_reserve=0)
"""A block at a time for decodes, and no reserve for them when a new request is admitted."""

SAMPLE_EVERY = 8
"""``Verify.SAMPLE`` compares every so many blocks of a reused prefix, and its last."""


class Verify(StrEnum):
    """How many of the reused blocks are compared with what they must hold."""

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"

    @property
    def every(self) -> int:
        """The distance between compared blocks; 0 compares none."""
        return {Verify.OFF: 0, Verify.SAMPLE: SAMPLE_EVERY, Verify.ALL: 1}[self]


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """One replay. ``layout.tp_size`` ranks; ``speed`` None is as fast as possible.

    ``load_failures`` is the share of loads into the device that are made to fail, from 0 to 1.
    Raises ``ReplayOptionError`` naming the option that is out of range.
    """

    layout: KVLayout
    cache: CacheSettings
    transfer: TransferSettings = field(default_factory=TransferSettings)
    storage: StorageTierSettings = field(default_factory=StorageTierSettings)
    mooncake: MooncakeSettings = field(default_factory=MooncakeSettings)
    scheduling: SchedulingSettings = PLAIN_SCHEDULING
    concurrency: int = 16
    chunk_tokens: int = 4096
    speed: float | None = None
    verify: Verify = Verify.ALL
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
            raise ReplayOptionError("--load-failures", "failures are made on the CPU device only")
        if not 0 <= self.load_failures <= 1:
            raise ReplayOptionError("--load-failures", f"{self.load_failures} is not between 0 and 1")

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.layout.block_size)
