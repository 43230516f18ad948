"""Whether this machine has the memory that a replay asks for."""

from __future__ import annotations

from fdcache.errors import ReplayOptionError
from fdcache.machine.memory import available_memory
from fdcache.replay.config import ReplayConfig
from fdcache.settings.kinds import readable_size
from fdcache.tiers.host import host_block_bytes


def require_memory(config: ReplayConfig) -> None:
    """Raise ``ReplayOptionError``, naming the option and what would fit, when the tiers do not fit."""
    layout, ranks = config.layout, config.layout.tp_size
    free = available_memory().nbytes
    block_bytes = sum(plane.device_stride for plane in layout.planes)
    device = config.cache.device_blocks * block_bytes * ranks
    if device > free:
        fits = free // (block_bytes * ranks)
        if not fits:
            raise ReplayOptionError(
                "--device-blocks",
                f"not one block of {readable_size(block_bytes)} on {ranks} ranks fits into the "
                f"{readable_size(free)} that are free; make --block-size, --layers, --kv-heads or --head-dim smaller",
            )
        raise ReplayOptionError(
            "--device-blocks",
            f"{config.cache.device_blocks} blocks of {readable_size(block_bytes)} on {ranks} ranks take "
            f"{readable_size(device)}, but {readable_size(free)} are free; at most {fits} would fit",
        )
    if config.cache.server is not None:
        return
    host, host_block = config.cache.host_memory, host_block_bytes(layout)
    if host > free - device:
        raise ReplayOptionError(
            "--host-memory",
            f"{readable_size(host)}, beside {readable_size(device)} of device blocks, do not fit into the "
            f"{readable_size(free)} that are free; at most {readable_size(free - device)} would fit",
        )
    if 0 < host < host_block:
        raise ReplayOptionError(
            "--host-memory",
            f"{readable_size(host)} hold no block of {readable_size(host_block)}; give at least {host_block} bytes, "
            "or 0 to do without a host tier",
        )
