"""Worker with a GPU as its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fdcache.devices.cuda import CudaDevice
from fdcache.layout import KVLayout
from fdcache.machine.calibration import Calibration
from fdcache.settings.cache import CopySettings
from tests.swaps import Worker


def _idle_stream(gpu: CudaDevice) -> Any:
    import cupy

    with cupy.cuda.Device(gpu.gpu.ordinal):
        return cupy.cuda.Stream(non_blocking=True)


class GpuWorker(Worker):
    """A ``Worker`` on a GPU; ``tensors`` are CuPy arrays. Copies use the default calibration.

    ``gpu`` is the device itself, or its name.
    """

    def __init__(
        self, layout: KVLayout | None = None, *, gpu: CudaDevice | str | int | None = None, **options: Any
    ) -> None:
        fields = set(CopySettings.model_fields)
        settings = {name: value for name, value in options.items() if name in fields}
        if not isinstance(gpu, CudaDevice):
            gpu = CudaDevice(gpu, settings=CopySettings(**settings), calibration=Calibration())
        self.gpu = gpu
        self.idle = _idle_stream(gpu)
        super().__init__(layout, device=gpu, **options)

    def set_block(self, slot: int, planes: Sequence[NDArray[np.uint8]]) -> None:
        import cupy

        for tensor, plane, data in zip(self.tensors, self.layout.planes, planes, strict=True):
            with tensor.device:
                tensor[slot] = cupy.asarray(data).view(tensor.dtype).reshape(plane.shape)
        with cupy.cuda.Device(self.gpu.gpu.ordinal) as device:
            device.synchronize()

    def block(self, slot: int) -> list[bytes]:
        import cupy

        return [cupy.asnumpy(cupy.ascontiguousarray(tensor[slot])).tobytes() for tensor in self.tensors]

    def bytes_of(self, tensor: Any) -> bytes:
        import cupy

        return bytes(cupy.asnumpy(cupy.ascontiguousarray(tensor)).tobytes())
