"""How mixture-of-experts layers are computed."""

from fdcache.settings.kinds import Flag
from fdcache.settings.variable import EngineChoice, Group, OldType, variable


class MoeBackend(EngineChoice):
    """The expert kernel."""

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

    backend: MoeBackend = variable(
        "FD_MOE_BACKEND", MoeBackend.CUTLASS, "The expert kernel.", old=OldType.TEXT
    )
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
