"""How the engine schedules requests onto blocks."""

from fdcache.settings.kinds import Flag, Integer, Number
from fdcache.settings.variable import Group, OldType, Place, variable


class SchedulingSettings(Group):
    """The block scheduler, its reserves and preemption."""

    v1: Flag = variable(
        "ENABLE_V1_KVCACHE_SCHEDULER",
        True,
        "Use the v1 block scheduler, whose kv_cache_ratio is 1.0.",
        old=OldType.INT,
        checked_against="FD_DISABLED_RECOVER",
    )
    disabled_recover: Flag = variable(
        "FD_DISABLED_RECOVER",
        False,
        "Never recompute a request when the cache is full; must be off with the v1 scheduler.",
        old=OldType.TEXT,
        checked_against="ENABLE_V1_KVCACHE_SCHEDULER",
    )
    decode_blocks: Integer = variable(
        "FD_ENC_DEC_BLOCK_NUM",
        2,
        "Blocks reserved per request for decoding.",
        old=OldType.INT,
        ge=0,
        unit="blocks",
        used_in=(Place.REPLAY, Place.PADDLE),
    )
    max_prefill: Flag = variable(
        "FD_ENABLE_MAX_PREFILL", False, "Prefill as much as fits in each step.", old=OldType.INT
    )
    disable_chunked_prefill: Flag = variable(
        "FD_DISABLE_CHUNKED_PREFILL",
        False,
        "Switch chunked prefill off, which is on by default.",
        old=OldType.BOOL,
    )
    prefill_reserve: Integer = variable(
        "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        16,
        "Blocks kept for running decodes when a new prefill is scheduled.",
        old=OldType.INT,
        ge=0,
        unit="blocks",
        used_in=(Place.REPLAY, Place.PADDLE),
    )
    prefill_reserve_decay: Number = variable(
        "FD_RESERVE_DECAY_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        0.025,
        "How much of that reserve is given up per step.",
        old=OldType.FLOAT,
        ge=0,
        used_in=(Place.REPLAY, Place.PADDLE),
    )
    prefill_reserve_minimum: Integer = variable(
        "FD_RESERVE_MIN_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
        0,
        "The floor of that reserve.",
        old=OldType.INT,
        ge=0,
        unit="blocks",
        used_in=(Place.REPLAY, Place.PADDLE),
    )
    save_preempted_output: Flag = variable(
        "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST",
        True,
        "Keep the output blocks of a preempted request in the cache.",
        old=OldType.BOOL,
        used_in=(Place.FASTDEPLOY, Place.REPLAY),
    )
