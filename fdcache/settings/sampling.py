"""How tokens are sampled and constrained."""

from fdcache.settings.kinds import Flag, Integer, Text
from fdcache.settings.variable import EngineChoice, Group, OldType, variable


class SamplingClass(EngineChoice):
    """The sampling implementation."""

    BASE = "base"
    BASE_NON_TRUNCATED = "base_non_truncated"
    AIR = "air"
    REJECTION = "rejection"
    TRITON = "triton"


class SamplingSettings(Group):
    """Stop sequences, sampling and guided decoding."""

    max_stop_sequences: Integer = variable(
        "FD_MAX_STOP_SEQS_NUM", 5, "Most stop sequences of a request.", old=OldType.INT, ge=0
    )
    stop_sequence_length: Integer = variable(
        "FD_STOP_SEQS_MAX_LEN", 8, "The longest stop sequence.", old=OldType.INT, ge=0, unit="tokens"
    )
    implementation: SamplingClass = variable(
        "FD_SAMPLING_CLASS", SamplingClass.BASE, "The sampling implementation.", old=OldType.TEXT
    )
    thinking_cut_text: Text = variable(
        "FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR",
        "</think>",
        "The text inserted when thinking is cut.",
        old=OldType.TEXT,
    )
    bitmask_batch: Integer = variable(
        "FD_FILL_BITMASK_BATCH", 4, "Requests per batch of guided decoding.", old=OldType.INT, ge=1
    )
    guidance_disable_additional: Flag = variable(
        "FD_GUIDANCE_DISABLE_ADDITIONAL",
        True,
        "Let guided decoding refuse additional properties.",
        old=OldType.BOOL,
    )
    guidance_log_level: Integer = variable(
        "FD_LLGUIDANCE_LOG_LEVEL", 0, "The log level of the guidance library.", old=OldType.INT, ge=0
    )
