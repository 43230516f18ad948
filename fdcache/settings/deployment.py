"""What the cache and its engine must agree on."""

from fdcache.settings.kinds import Integer, Memory
from fdcache.settings.variable import Group, Place, variable


class DeploymentSettings(Group):
    """Block size and ranks, which the layout must match, and the device memory given to blocks."""

    used_in = (
        Place.MANAGER,
        Place.CONTROLLER,
        Place.REPLAY,
    )

    block_size: Integer = variable("FDCACHE_BLOCK_SIZE", 64, "Tokens of a block.", ge=1, unit="tokens")
    ranks: Integer = variable(
        "FDCACHE_RANKS", 1, "Tensor-parallel ranks, each with its own device.", ge=1, le=1024, unit="ranks"
    )
    device_memory: Memory | None = variable(
        "FDCACHE_DEVICE_MEMORY",
        None,
        "Memory for blocks on each rank's device, in place of FDCACHE_DEVICE_BLOCKS; as a share, of all the device "
        "has, on the CPU of a rank's part of the machine's.",
        unit="bytes",
    )
