"""The attention backend and deterministic mode."""

from enum import StrEnum

from fdcache.settings.kinds import Flag, PowerOfTwo
from fdcache.settings.variable import Group, OldType, variable


class AttentionBackend(StrEnum):
    """The attention implementation, which also decides the cache layout."""

    NATIVE_ATTN = "NATIVE_ATTN"
    APPEND_ATTN = "APPEND_ATTN"
    MLA_ATTN = "MLA_ATTN"


class AttentionSettings(Group):
    """The attention backend and deterministic mode."""

    backend: AttentionBackend = variable(
        "FD_ATTENTION_BACKEND",
        AttentionBackend.APPEND_ATTN,
        "The attention implementation, which also decides the cache layout.",
        old=OldType.TEXT,
    )
    deterministic: Flag = variable(
        "FD_DETERMINISTIC_MODE",
        False,
        "Compute prefills on an aligned grid, so that results repeat bit by bit.",
        old=OldType.BOOL,
    )
    split_kv_size: PowerOfTwo = variable(
        "FD_DETERMINISTIC_SPLIT_KV_SIZE",
        16,
        "The grid of deterministic mode, a power of two; reuse is cut to it as well.",
        old=OldType.INT,
        unit="tokens",
    )
    deterministic_log: Flag = variable(
        "FD_DETERMINISTIC_LOG_MODE", False, "Log digests of intermediate results.", old=OldType.BOOL
    )
