"""The attention backend and deterministic mode."""

from enum import StrEnum

from fdcache.settings.kinds import Flag, PowerOfTwo
from fdcache.settings.variable import Group, OldType, Place, variable


class AttentionBackend(StrEnum):
    """The attention implementation, which also decides the cache layout."""

    NATIVE_ATTN = "NATIVE_ATTN"
    APPEND_ATTN = "APPEND_ATTN"
    MLA_ATTN = "MLA_ATTN"
    DSA_ATTN = "DSA_ATTN"
    FLASH_ATTN = "FLASH_ATTN"
    FLASH_MASK_ATTN = "FLASH_MASK_ATTN"
    BLOCK_ATTN = "BLOCK_ATTN"
    PLAS_ATTN = "PLAS_ATTN"
    HPU_ATTN = "HPU_ATTN"


class AttentionSettings(Group):
    """The attention backend and deterministic mode."""

    backend: AttentionBackend = variable(
        "FD_ATTENTION_BACKEND",
        AttentionBackend.APPEND_ATTN,
        "The attention implementation, which also decides the cache layout.",
        old=OldType.TEXT,
        used_in=(Place.FASTDEPLOY, Place.REPLAY),
    )
    deterministic: Flag = variable(
        "FD_DETERMINISTIC_MODE",
        False,
        "Compute prefills on an aligned grid, so that results repeat bit by bit.",
        old=OldType.BOOL,
        used_in=(Place.MANAGER,),
    )
    split_kv_size: PowerOfTwo = variable(
        "FD_DETERMINISTIC_SPLIT_KV_SIZE",
        16,
        "The grid of deterministic mode, a power of two; reuse is cut to it as well.",
        old=OldType.INT,
        unit="tokens",
        used_in=(Place.MANAGER,),
        checked_against="FDCACHE_BLOCK_SIZE",
    )
    deterministic_log: Flag = variable(
        "FD_DETERMINISTIC_LOG_MODE",
        False,
        "Log digests of intermediate results.",
        old=OldType.BOOL,
        used_in=(Place.PADDLE,),
    )
