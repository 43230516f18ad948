"""What the worker side is told: how blocks are copied."""

from fdcache.settings.kinds import Integer, Seconds
from fdcache.settings.variable import Group, variable


class TransferSettings(Group):
    """Settings of ``CacheController``. It reads no environment."""

    first_group_layers: Integer = variable(
        "FDCACHE_FIRST_GROUP_LAYERS", 1, "Layers in the first group of a load.", ge=1, unit="layers"
    )
    group_layers: Integer = variable(
        "FDCACHE_GROUP_LAYERS", 4, "Layers in each later group of a load.", ge=1, unit="layers"
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
