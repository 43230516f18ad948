"""The swap kernels on one GPU: compiled once by CuPy, which keeps the result in its cache on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fdcache import _core
from fdcache.devices.topology import import_cupy

_NAMES = ("fdcache_copy_in", "fdcache_copy_out", "fdcache_sum")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Handles of copy_in, copy_out and sum; ``module`` keeps them loaded."""

    handles: tuple[int, int, int]
    module: Any


def load_kernels(ordinal: int) -> Kernels:
    """Compile, or take from the cache, for the GPU with that ordinal."""
    cupy = import_cupy()
    with cupy.cuda.Device(ordinal):
        module = cupy.RawModule(code=_core.swap_source(), options=("-std=c++17",), backend="nvrtc")
        copy_in, copy_out, checksum = (module.get_function(name).kernel.ptr for name in _NAMES)
    return Kernels((copy_in, copy_out, checksum), module)
