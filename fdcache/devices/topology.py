"""Visible GPUs and their place in the machine, identified by UUID and PCI address."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdcache import _core
from fdcache.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU that this process may use. ``ordinal`` counts the GPUs visible to this process only."""

    ordinal: int
    uuid: str
    name: str
    driver: int
    pci_address: str
    link: str
    numa_node: int | None
    multiprocessors: int
    memory_bytes: int

    @property
    def topology(self) -> str:
        """Description of everything but GPU and driver that the speed of copies depends on."""
        node = "unknown" if self.numa_node is None else str(self.numa_node)
        return f"{self.pci_address}, {self.link}, NUMA node {node}"


def import_cupy() -> Any:
    """Import CuPy. Raises ``DeviceError`` naming the package to install, or the folder that CuPy cannot create."""
    _refuse_replaced_zlib()
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"the CUDA device needs CuPy, which cannot be imported ({error}); "
            "install fdcache[cuda12] or fdcache[cuda13]"
        ) from error
    except OSError as error:
        raise DeviceError(
            f"CuPy cannot create its folder of compiled kernels ({error}); set CUPY_CACHE_DIR to a writable folder"
        ) from error
    return cupy


def _refuse_replaced_zlib() -> None:
    """Raise ``DeviceError`` where the functions of zlib, which CuPy uses, are those that Paddle before 3.0 exports.

    They replace those of a zlib module that is loaded later, and calling them ends the process.
    """
    paddle = sys.modules.get("paddle")
    if paddle is None or not str(getattr(paddle, "__version__", "")).startswith("2."):
        return
    if "zlib" in sys.builtin_module_names:
        return
    first = next(name for name in sys.modules if name == "zlib" or name.startswith("paddle."))
    if first != "zlib":
        raise DeviceError(
            f"Paddle {paddle.__version__} was imported before zlib and replaces its functions, which would end this "
            "process; import fdcache.integrations.paddle or zlib before paddle, or install Paddle 3.0 or newer"
        )


def visible_gpus() -> list[Gpu]:
    """Return the GPUs visible to this process, in CUDA's order. Raises ``DeviceError`` when CUDA cannot be used."""
    runtime = import_cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
        driver = runtime.driverGetVersion()
        return [_describe(runtime, ordinal, driver) for ordinal in range(count)]
    except (runtime.CUDARuntimeError, _core.CudaError) as error:
        raise DeviceError(f"no usable GPU: {error}") from error


def find_gpu(wanted: str | int | None) -> Gpu:
    """Return the GPU with this UUID (or a unique beginning of one) or ordinal; the first one for None.

    Raises ``DeviceError`` naming the GPUs that are visible.
    """
    gpus = visible_gpus()
    if isinstance(wanted, str):
        found = [gpu for gpu in gpus if gpu.uuid.lower().startswith(wanted.lower())]
    else:
        found = [gpu for gpu in gpus if gpu.ordinal == (wanted or 0)]
    if len(found) != 1:
        shown = ", ".join(f"{gpu.ordinal}: {gpu.uuid}" for gpu in gpus) or "none"
        raise DeviceError(f"device {wanted!r} is not one of the visible GPUs ({shown})")
    return found[0]


def _describe(runtime: Any, ordinal: int, driver: int) -> Gpu:
    properties = runtime.getDeviceProperties(ordinal)
    address = runtime.deviceGetPCIBusId(ordinal)
    address = (address.decode() if isinstance(address, bytes) else str(address)).lower()
    folder = Path("/sys/bus/pci/devices") / address
    return Gpu(
        ordinal=ordinal,
        # CuPy's properties truncate a UUID at its first zero byte.
        uuid=f"GPU-{uuid.UUID(bytes=_core.device_uuid(ordinal))}",
        name=properties["name"].decode(),
        driver=driver,
        pci_address=address,
        link=link_of(folder),
        numa_node=numa_node_of(folder),
        multiprocessors=properties["multiProcessorCount"],
        memory_bytes=properties["totalGlobalMem"],
    )


def link_of(folder: Path) -> str:
    """Describe the PCI link of a device, from its folder in sysfs."""
    speed, width = _read(folder / "max_link_speed"), _read(folder / "max_link_width")
    return f"PCIe {speed} x{width}" if speed and width else "PCIe link unknown"


def numa_node_of(folder: Path) -> int | None:
    """Return the NUMA node of a PCI device, from its folder in sysfs; None when unknown."""
    text = _read(folder / "numa_node")
    return int(text) if text and int(text) >= 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
