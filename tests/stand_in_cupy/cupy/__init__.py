"""The part of CuPy that fdcache and the GPU tests call, on the stand-in driver.

Its memory is the host's, its kernels are C++, its streams are threads. What a test does to arrays within ``with
stream:`` is done in the order of that stream; outside of it at once. ``STAND_IN_GPUS`` says how many GPUs there are,
``STAND_IN_DELAYS`` how many microseconds every copy takes to be asked for and, on average, to be done.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from . import driver
from .arrays import arange, array_equal, as_strided, asarray, ascontiguousarray, asnumpy, ndarray, zeros
from .memory import Device, Memory, MemoryPointer, OutOfMemoryError, Pinned, current
from .streams import RawKernel, RawModule, Stream

__all__ = [
    "RawKernel", "RawModule", "arange", "array_equal", "asarray", "ascontiguousarray", "asnumpy", "cuda", "dtype",
    "get_default_memory_pool", "lib", "ndarray", "uint8", "uint16", "zeros",
]  # fmt: skip

uint8, uint16, dtype = np.uint8, np.uint16, np.dtype

_TOTAL_BYTES = 1 << 36


class CudaError(RuntimeError):
    """CuPy's error of the runtime and the driver."""


def get_default_memory_pool() -> Any:
    """Of a pool that gives everything back."""
    return SimpleNamespace(free_all_blocks=lambda: None, used_bytes=lambda: Memory.used)


lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided))
cuda = SimpleNamespace(
    Device=Device,
    Memory=Memory,
    MemoryPointer=MemoryPointer,
    Stream=Stream,
    alloc_pinned_memory=Pinned,
    get_current_stream=lambda: getattr(current, "stream", None) or SimpleNamespace(ptr=0),
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
    driver=SimpleNamespace(CUDADriverError=CudaError),
    runtime=SimpleNamespace(
        CUDARuntimeError=CudaError,
        getDevice=lambda: Device().id,
        getDeviceCount=driver.visible,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda _: {
            "name": b"stand-in",
            "multiProcessorCount": 132,
            "totalGlobalMem": _TOTAL_BYTES,
        },
        deviceGetPCIBusId=lambda ordinal: f"ffff:ff:1f.{driver.gpu(ordinal)}",
        deviceSynchronize=driver.synchronize_all,
        memGetInfo=lambda: (_TOTAL_BYTES - Memory.used, _TOTAL_BYTES),
        pointerGetAttributes=lambda address: SimpleNamespace(
            device=driver.owner(address), devicePointer=address
        ),
    ),
)
