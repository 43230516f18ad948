"""Settings of the engine's model: weights, attention, experts, kernels, sampling, hardware."""

from __future__ import annotations

from enum import StrEnum

from fdcache.settings.kinds import FilePath, Flag, Integer, Integers, Megabytes, PowerOfTwo, Text, TextList
from fdcache.settings.variable import Component, EngineChoice, Group, OldType, variable


class ModelSource(EngineChoice):
    """Hub from which models are downloaded."""

    AISTUDIO = "AISTUDIO"
    MODELSCOPE = "MODELSCOPE"
    HUGGINGFACE = "HUGGINGFACE"


class ModelSettings(Group):
    """Model source, weights and plug-ins."""

    source: ModelSource = variable(
        "FD_MODEL_SOURCE", ModelSource.AISTUDIO, "Hub from which models are downloaded.", old=OldType.TEXT
    )
    cache: FilePath | None = variable(
        "FD_MODEL_CACHE", None, "Folder to which models are downloaded.", old=OldType.TEXT
    )
    use_hf_tokenizer: Flag = variable(
        "FD_USE_HF_TOKENIZER", False, "Use the Hugging Face tokenizer.", old=OldType.BOOL
    )
    torch_format: Flag = variable(
        "FD_FOR_TORCH_MODEL_FORMAT", False, "Read weights in the PyTorch format.", old=OldType.BOOL
    )
    enable_cache: Flag = variable(
        "FD_ENABLE_MODEL_CACHE", False, "Keep loaded models in a cache.", old=OldType.BOOL
    )
    enable_load_cache: Flag = variable(
        "FD_ENABLE_MODEL_LOAD_CACHE",
        False,
        "Store quantised weights for the next start.",
        old=OldType.BOOL,
    )
    enable_v1_update: Flag = variable(
        "FD_ENABLE_V1_UPDATE_WEIGHTS", False, "Update weights by control messages.", old=OldType.BOOL
    )
    use_fastsafetensor: Flag = variable(
        "FD_USE_FASTSAFETENSOR",
        False,
        "Load weights with fastsafetensors.",
        old=OldType.BOOL,
        undeclared=True,
    )
    align_training: Flag = variable(
        "FD_ENABLE_RL", False, "Align the precision of inference with training.", old=OldType.INT
    )
    plugins: TextList | None = variable(
        "FD_PLUGINS",
        None,
        "Plug-ins to load, such as `fdcache`. Unset, none is loaded.",
        old=OldType.LIST,
    )


class AttentionBackend(StrEnum):
    """Attention implementation, which also determines the cache layout."""

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
        "Attention implementation, which also determines the cache layout.",
        old=OldType.TEXT,
        used_in=(Component.FASTDEPLOY, Component.REPLAY),
        acts="the planes of the FastDeploy adapter's layout, and of `fdcache replay` without `--layout`",
    )
    deterministic: Flag = variable(
        "FD_DETERMINISTIC_MODE",
        False,
        "Compute prefills on an aligned grid, for results that repeat bit by bit.",
        old=OldType.BOOL,
        used_in=(Component.MANAGER,),
        acts="prefixes are reused in steps of `FD_DETERMINISTIC_SPLIT_KV_SIZE`, if `FDCACHE_REUSE_GRID` is 0 or not "
        "set; the grid of the example engine",
    )
    split_kv_size: PowerOfTwo = variable(
        "FD_DETERMINISTIC_SPLIT_KV_SIZE",
        16,
        "Grid of deterministic mode, a power of two. Reused prefixes are rounded down to it.",
        old=OldType.INT,
        unit="tokens",
        used_in=(Component.MANAGER,),
        checked_against="FDCACHE_BLOCK_SIZE",
        acts="the grid of deterministic mode, in tokens",
    )
    deterministic_log: Flag = variable(
        "FD_DETERMINISTIC_LOG_MODE",
        False,
        "Log digests of intermediate results.",
        old=OldType.BOOL,
        used_in=(Component.PADDLE,),
        acts="the example engine writes a digest of all logits; fdcache itself computes no logits",
    )


class MoeBackend(EngineChoice):
    """Expert kernel."""

    CUTLASS = "cutlass"
    MARLIN = "marlin"
    TRITON = "triton"
    FLASHINFER_CUTLASS = "flashinfer-cutlass"
    FLASHINFER_CUTEDSL = "flashinfer-cutedsl"
    FLASHINFER_TRTLLM = "flashinfer-trtllm"


class Mxfp4Backend(EngineChoice):
    """The expert kernel for MXFP4 weights."""

    FLASHINFER = "flashinfer"


class MoeSettings(Group):
    """Expert kernels and expert parallelism."""

    backend: MoeBackend = variable("FD_MOE_BACKEND", MoeBackend.CUTLASS, "Expert kernel.", old=OldType.TEXT)
    mxfp4_backend: Mxfp4Backend = variable(
        "FD_MOE_MXFP4_BACKEND",
        Mxfp4Backend.FLASHINFER,
        "The expert kernel for MXFP4 weights.",
        old=OldType.TEXT,
    )
    prob_in_advance: Flag = variable(
        "FD_MOE_PROB_IN_ADVANCE", False, "Probe the routing ahead and fuse the activation.", old=OldType.BOOL
    )
    use_pfcc_deep_ep: Flag = variable(
        "FD_USE_PFCC_DEEP_EP", False, "Use the alternative expert-parallel library.", old=OldType.BOOL
    )
    use_phi_topk: Flag = variable(
        "FD_USE_PHI_MOE_TOPK", False, "Use the phi top-k kernel, for noaux_tc only.", old=OldType.BOOL
    )
    use_phi_permute: Flag = variable(
        "FD_USE_PHI_MOE_PERMUTE", False, "Use the phi permutation kernel.", old=OldType.BOOL
    )


class Nvfp4GemmBackend(EngineChoice):
    """The GEMM for NVFP4 weights."""

    FLASHINFER_CUTLASS = "flashinfer-cutlass"
    FLASHINFER_TRTLLM = "flashinfer-trtllm"
    FLASHINFER_CUDNN = "flashinfer-cudnn"


class KernelSettings(Group):
    """GEMM backends, quantisation and kernel launch."""

    nvfp4_gemm_backend: Nvfp4GemmBackend | None = variable(
        "FD_NVFP4_GEMM_BACKEND",
        None,
        "GEMM for NVFP4 weights. Unset, the engine chooses.",
        old=OldType.TEXT,
        alias="FD_NVFP4_MOE_BACKEND",
    )
    nvfp4_leave_blockscale: Flag = variable(
        "FD_NVFP4_LOAD_BLOCKSCALE_LEAVE",
        False,
        "Load interleaved NVFP4 block scales as they are.",
        old=OldType.BOOL,
    )
    use_machete: Flag = variable(
        "FD_USE_MACHETE", True, "Use the Machete kernel for dense layers with int4 weights.", old=OldType.TEXT
    )
    use_deep_gemm: Flag = variable(
        "FD_USE_DEEP_GEMM", False, "Use DeepGEMM for block-wise fp8 experts.", old=OldType.BOOL
    )
    use_blackwell_gemm: Flag = variable(
        "FD_USE_BLACKWELL_GEMM", False, "Use the Blackwell GEMM kernels.", old=OldType.BOOL
    )
    use_phi_fp8_quant: Flag = variable(
        "FD_USE_PHI_FP8_QUANT", True, "Use the phi fp8 quantisation kernel.", old=OldType.BOOL
    )
    use_phi_rmsnorm: Flag = variable(
        "FD_USE_PHI_RMSNORM", False, "Use the phi RMSNorm kernel.", old=OldType.BOOL
    )
    use_phi_swiglu: Flag = variable(
        "FD_SiluAndMul_USE_PHI_SWIGLU", False, "Use the phi SwiGLU kernel.", old=OldType.BOOL
    )
    fp8_power_of_two_scale: Flag = variable(
        "FD_FP8_QUANT_WITH_POW2SCALE",
        False,
        "Quantise to fp8 with scales that are powers of two.",
        old=OldType.BOOL,
    )
    triton_cache: FilePath | None = variable(
        "FD_TRITON_KERNEL_CACHE_DIR",
        None,
        "Folder of compiled Triton kernels.",
        old=OldType.TEXT,
    )
    dependent_launch: Flag = variable(
        "FD_ENABLE_PDL", True, "Launch dependent kernels early.", old=OldType.INT
    )


class SamplingClass(EngineChoice):
    """Sampling implementation."""

    BASE = "base"
    BASE_NON_TRUNCATED = "base_non_truncated"
    AIR = "air"
    REJECTION = "rejection"
    TRITON = "triton"


class SamplingSettings(Group):
    """Stop sequences, sampling and guided decoding."""

    max_stop_sequences: Integer = variable(
        "FD_MAX_STOP_SEQS_NUM", 5, "Maximum number of stop sequences of a request.", old=OldType.INT, ge=0
    )
    stop_sequence_length: Integer = variable(
        "FD_STOP_SEQS_MAX_LEN", 8, "Maximum length of a stop sequence.", old=OldType.INT, ge=0, unit="tokens"
    )
    implementation: SamplingClass = variable(
        "FD_SAMPLING_CLASS", SamplingClass.BASE, "Sampling implementation.", old=OldType.TEXT
    )
    thinking_cut_text: Text = variable(
        "FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR",
        "</think>",
        "Text inserted where thinking is truncated.",
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


class HardwareSettings(Group):
    """Devices, build targets and vendor switches."""

    visible_devices: TextList | None = variable(
        "CUDA_VISIBLE_DEVICES",
        None,
        "GPUs visible to a process.",
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
