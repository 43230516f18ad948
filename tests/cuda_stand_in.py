"""A GPU for processes without one: ``tests/cuda_driver.c`` as the driver and, of CuPy, what fdcache calls.

Its memory is the host's and its kernels are C, so what is tested with it is everything around them: what is asked of
the driver, what becomes of its refusals, and that everything taken is given back once.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from fdcache.devices.calibration import Calibration
from fdcache.settings.transfer import TransferSettings
from tests import preload
from tests.swaps import Worker

ROOT = Path(__file__).parent.parent
LIBRARY = "libcuda.so.1"
REFUSED, LOST = 1, 719
"""Errors of the driver: an argument that is invalid, and a kernel that failed, after which nothing works."""


def build(folder: Path) -> Path:
    """Make the driver in ``folder``, which is then for ``run_python``."""
    shutil.copy(preload.build("cuda_driver", folder), folder / LIBRARY)
    return folder


def run_python(driver: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds this driver before any other."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class Driver:
    """The counts and faults of the driver that this process loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def fail(self, call: str, *, after: int = 0, code: int = REFUSED, every: int = 0) -> None:
        """Let that call fail once it was made ``after`` times more, and every so many times from then on."""
        self._library.stand_in_fail(call.encode(), after, code, every)

    def recover(self) -> int:
        """No more failures, and a GPU that is there again; how often the call had failed."""
        return int(self._library.stand_in_recover())

    def capture(self, stream: int) -> None:
        """Let that stream be captured into a graph; 0 lets none."""
        self._library.stand_in_capture(ctypes.c_void_p(stream))

    def disown(self, stream: int) -> None:
        """Let that stream be another GPU's."""
        self._library.stand_in_disown(ctypes.c_void_p(stream))

    def held(self) -> dict[str, int]:
        """What is taken and not given back, and how often something was given back that was not taken."""
        names = ("events", "registered", "contexts", "pushed", "unknown")
        return {name: getattr(self._library, f"stand_in_{name}")() for name in names}


class Memory:
    """Bytes of the GPU: a CuPy memory, array and pointer at once. ``made`` counts them."""

    made = 0

    def __init__(self, nbytes: int) -> None:
        Memory.made += 1
        self.bytes = np.zeros(nbytes, np.uint8)
        self.ptr = self.bytes.ctypes.data
        self.data = self

    def set(self, values: Any) -> None:
        """Fill it from the host."""
        self.bytes[:] = values

    def memset(self, value: int, nbytes: int) -> None:
        """Fill its beginning."""
        self.bytes[:nbytes] = value

    def view(self, dtype: Any) -> Any:
        """The same, as elements."""
        return self.bytes.view(dtype)


class _Values(np.ndarray):
    """What indexing a tensor gives; ``get`` brings it to the host."""

    def get(self) -> Any:
        return np.asarray(self)


class _Gpu:
    """The device that is current within it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """All of it has been done."""


class Tensor:
    """An array of the GPU: it shows itself by ``__cuda_array_interface__`` alone."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.dtype, self.shape = array.dtype, array.shape
        self.device = _Gpu()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shown = self._array.__array_interface__
        return {"version": 3, **{key: shown[key] for key in ("data", "shape", "typestr", "strides")}}

    def __getitem__(self, index: Any) -> Any:
        return self._array[index].view(_Values)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array[index] = value


class _CudaError(RuntimeError):
    """What CuPy raises for errors of the runtime and the driver."""


def install() -> None:
    """Be the CuPy of this process."""
    handles = count(0x1000)

    def raw_module(**_: Any) -> Any:
        names = ("fdcache_copy_in", "fdcache_copy_out", "fdcache_sum", "fdcache_copy_words")
        kernels = {name: SimpleNamespace(kernel=SimpleNamespace(ptr=1 + i)) for i, name in enumerate(names)}
        return SimpleNamespace(get_function=kernels.__getitem__)

    def as_strided(flat: Any, shape: Any, strides: Any) -> Tensor:
        return Tensor(np.lib.stride_tricks.as_strided(flat, shape, strides))

    runtime = SimpleNamespace(
        CUDARuntimeError=_CudaError,
        getDeviceCount=lambda: 1,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda _: {"name": b"stand-in", "multiProcessorCount": 132},
        deviceGetPCIBusId=lambda _: "ffff:ff:1f.0",
        pointerGetAttributes=lambda address: SimpleNamespace(device=0, devicePointer=address),
    )
    cuda = SimpleNamespace(
        Device=lambda _ordinal: _Gpu(),
        Memory=Memory,
        MemoryPointer=lambda memory, _offset: memory,
        Stream=lambda **_: SimpleNamespace(ptr=next(handles)),
        alloc_pinned_memory=Memory,
        memory=SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})),
        compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
        driver=SimpleNamespace(CUDADriverError=_CudaError),
        runtime=runtime,
    )
    sys.modules["cupy"] = SimpleNamespace(  # type: ignore[assignment]
        cuda=cuda,
        ndarray=lambda shape, dtype, memptr: memptr,
        asarray=np.asarray,
        uint8=np.uint8,
        dtype=np.dtype,
        lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=as_strided)),
        RawModule=raw_module,
    )


class StandInWorker(Worker):
    """A worker whose device is the GPU that stands in. Copies go by the default calibration."""

    def __init__(self, layout: Any = None, **options: Any) -> None:
        from fdcache.devices.cuda import CudaDevice

        settings = {name: value for name, value in options.items() if name in TransferSettings.model_fields}
        self.gpu = CudaDevice(settings=TransferSettings(**settings), calibration=Calibration())
        super().__init__(layout, device=self.gpu, **options)
