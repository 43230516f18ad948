"""Which kernels dense layers and quantisation use."""

from fdcache.settings.kinds import FilePath, Flag
from fdcache.settings.variable import EngineChoice, Group, OldType, variable


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
        "The GEMM for NVFP4 weights; none lets the engine choose.",
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
        "The folder that compiled Triton kernels are kept in.",
        old=OldType.TEXT,
    )
    dependent_launch: Flag = variable(
        "FD_ENABLE_PDL", True, "Launch dependent kernels early.", old=OldType.INT
    )
