"""The swap kernels on one GPU: compiled once by CuPy, which keeps the result in its cache on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fdcache import _core
from fdcache.devices.topology import import_cupy
from fdcache.errors import KernelError

_NAMES = ("fdcache_copy_in", "fdcache_copy_out", "fdcache_sum", "fdcache_copy_words")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Handles of copy_in, copy_out, sum and copy_words; ``module`` keeps them loaded."""

    handles: tuple[int, ...]
    module: Any


def load_kernels(ordinal: int, source: str | None = None) -> Kernels:
    """Compile ``source``, fdcache's own if None, or take it from the cache, for the GPU with that ordinal.

    Raises ``KernelError`` with the remedy, ``DeviceError`` without CuPy.
    """
    cupy = import_cupy()
    code = _core.swap_source() if source is None else source
    try:
        with cupy.cuda.Device(ordinal):
            module = cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")
            handles = tuple(module.get_function(name).kernel.ptr for name in _NAMES)
    except (cupy.cuda.compiler.CompileException, ImportError, OSError, RuntimeError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise KernelError(
            f"the swap kernels do not compile for GPU {ordinal}: {why}; {_remedy(cupy, error)}"
        ) from error
    return Kernels(handles, module)


def _remedy(cupy: Any, error: Exception) -> str:
    package = "nvidia-cuda-nvrtc-cu12 (-cu13 beside cupy-cuda13x)"
    if isinstance(error, cupy.cuda.compiler.CompileException):
        return f"use an NVRTC that knows this GPU: pip install --upgrade {package}"
    if isinstance(error, OSError):
        return "set CUPY_CACHE_DIR to a folder that this user can write"
    if isinstance(error, (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError)):
        return "update the GPU driver, or use an NVRTC that is not newer than it"
    return f"install NVRTC: pip install {package}, or the CUDA toolkit"
