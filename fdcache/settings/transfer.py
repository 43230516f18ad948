"""What the worker side is told: how blocks are copied."""

from enum import StrEnum

from fdcache.settings.kinds import HomePath, Integer, Seconds, Size
from fdcache.settings.variable import Group, Place, variable


class SwapMethod(StrEnum):
    """How blocks travel between GPU and host memory."""

    AUTO = "auto"
    DMA = "dma"
    KERNEL = "kernel"
    STAGED = "staged"


class Verify(StrEnum):
    """Which blocks are compared with their checksum."""

    OFF = "off"
    STORAGE = "storage"
    ALL = "all"


class TransferSettings(Group):
    """Settings of ``CacheController``. It reads no environment."""

    used_in = (Place.CONTROLLER,)

    first_group_layers: Integer = variable(
        "FDCACHE_FIRST_GROUP_LAYERS", 1, "Layers in the first group of a load.", ge=1, unit="layers"
    )
    group_layers: Integer = variable(
        "FDCACHE_GROUP_LAYERS", 4, "Layers in each later group of a load.", ge=1, unit="layers"
    )
    loads_ahead: Size = variable(
        "FDCACHE_LOADS_AHEAD",
        1 << 29,
        "Bytes of loads that are put on the device behind the one being copied, so that it never runs dry. Later "
        "loads wait, and go together in batches of up to as much; one that a layer is waited for goes at once.",
        ge=1,
        unit="bytes",
    )
    copy_threads: Integer = variable(
        "FDCACHE_COPY_THREADS", 1, "CPU copy threads per direction.", ge=1, le=64, unit="threads"
    )
    layer_timeout: Seconds = variable(
        "FDCACHE_LAYER_TIMEOUT", 30.0, "How long wait_for_layer waits by default.", gt=0, unit="s"
    )
    drain_timeout: Seconds = variable(
        "FDCACHE_SWAP_DRAIN_TIMEOUT",
        30.0,
        "How long shutdown waits for copies in flight.",
        gt=0,
        unit="s",
    )
    swap_method: SwapMethod = variable(
        "FDCACHE_SWAP_METHOD",
        SwapMethod.AUTO,
        "How blocks travel between GPU and host memory: copy engines alone (dma), copy engines and a staging "
        "ring (staged), a kernel that reads host memory in place (kernel), or what was measured as fastest.",
    )
    swap_ctas: Integer = variable(
        "FDCACHE_SWAP_CTAS",
        0,
        "Thread blocks of the kernel that copies scattered blocks, within the budget of multiprocessors; 0 takes the "
        "calibrated number.",
        ge=0,
        le=1024,
        unit="thread blocks",
    )
    swap_sm_budget: Integer = variable(
        "FDCACHE_SWAP_SM_BUDGET",
        40,
        "Most multiprocessors that the threads of a copy kernel may fill, be they spread over more of them; 0 leaves "
        "copies to the copy engines, and to kernels only checksums and tables of blocks.",
        ge=0,
        unit="multiprocessors",
    )
    verify: Verify = variable(
        "FDCACHE_VERIFY",
        Verify.STORAGE,
        "Which blocks are compared with their checksum: off checks what an earlier process left at its first read, "
        "storage every read from storage, all loads into the device too.",
        used_in=(Place.CONTROLLER, Place.SERVE),
    )
    calibration_dir: HomePath = variable(
        "FDCACHE_CALIBRATION_DIR",
        "~/.cache/fdcache/calibration",
        "Where `fdcache init` keeps what it measured of each GPU.",
        used_in=(Place.CONTROLLER, Place.INIT),
    )
