"""The machine: devices, builds and vendors."""

from fdcache.settings.kinds import Flag, Integer, Integers, Megabytes, Text, TextList
from fdcache.settings.variable import Group, OldType, variable


class HardwareSettings(Group):
    """Devices, build targets and vendor switches."""

    visible_devices: TextList | None = variable(
        "CUDA_VISIBLE_DEVICES",
        None,
        "The GPUs that a process may see.",
        old=OldType.TEXT,
        checked_against="FDCACHE_RANKS",
    )
    building_archs: Integers = variable(
        "FD_BUILDING_ARCS", (), "The GPU architectures to build for.", old=OldType.TEXT, old_default="[]"
    )
    group_id_offset: Integer = variable(
        "FD_TP_GROUP_GID_OFFSET", 1000, "The offset of tensor-parallel group ids.", old=OldType.INT, ge=0
    )
    all_reduce_buffer: Megabytes = variable(
        "FD_CUSTOM_AR_MAX_SIZE_MB",
        8,
        "The size of the custom all-reduce buffer.",
        old=OldType.INT,
        ge=1,
        unit="MiB",
    )
    cpu_bf16: Flag = variable(
        "FD_CPU_USE_BF16", False, "Compute in bf16 on the CPU.", old=OldType.TEXT, old_flag=("False", "True")
    )
    hpu_chunk: Integer = variable(
        "FD_HPU_CHUNK_SIZE",
        64,
        "Tokens per group of experts on an HPU.",
        old=OldType.INT,
        ge=1,
        unit="tokens",
    )
    hpu_measurement: Flag = variable(
        "FD_HPU_MEASUREMENT_MODE", False, "Calibrate fp8 on an HPU.", old=OldType.TEXT
    )
    xpu_quant_map: Text = variable(
        "FD_XPU_MOE_FFN_QUANT_TYPE_MAP", "", "The quantisation of expert layers on an XPU.", old=OldType.TEXT
    )
    xpu_mixed_ep: Flag = variable(
        "FD_XPU_ENABLE_MIXED_EP_MODE",
        False,
        "Use the low-latency mode in mixed deployments on an XPU.",
        old=OldType.BOOL,
    )
