"""The device of an engine's torch tensors."""

from __future__ import annotations

import torch

from fdcache.devices.base import Device
from fdcache.devices.cpu import CpuDevice
from fdcache.errors import ConfigurationError
from fdcache.settings.cache import CopySettings


def device_of(device: torch.device, settings: CopySettings) -> Device:
    """Return the device of an engine's tensors. Raises ``ConfigurationError`` for kinds that fdcache does not have."""
    if device.type == "cpu":
        return CpuDevice.of(settings)
    if device.type == "cuda":
        from fdcache.devices.cuda import CudaDevice

        return CudaDevice(device.index or 0, settings=settings)
    raise ConfigurationError(f"the engine's cache is on {device.type}; supported are cpu and cuda")
