"""GPUs by UUID and ordinal, their PCI links and NUMA nodes, and errors for unknown ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fdcache.devices import topology
from fdcache.devices.topology import Gpu, find_gpu, visible_gpus
from fdcache.errors import DeviceError
from tests.gpu.conftest import missing_gpu

UUIDS = ("GPU-aaaa0000-1", "GPU-aaaa1111-2", "GPU-bbbb0000-3")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    found = [
        Gpu(ordinal, uuid, "H200", 13000, f"0000:0{ordinal}:00.0", "PCIe 5 x16", 0, 132, 1 << 37)
        for ordinal, uuid in enumerate(UUIDS)
    ]
    monkeypatch.setattr(topology, "visible_gpus", lambda: found)
    return found


@pytest.mark.parametrize(
    ("wanted", "ordinal"),
    [(None, 0), (0, 0), (2, 2), ("GPU-aaaa1111-2", 1), ("gpu-AAAA1", 1), ("GPU-b", 2)],
)
def test_a_gpu_is_found_by_uuid_its_beginning_or_ordinal(
    gpus: list[Gpu], wanted: str | int | None, ordinal: int
) -> None:
    assert find_gpu(wanted) == gpus[ordinal]


@pytest.mark.parametrize("wanted", ["GPU-aaaa", "GPU-cccc", "0", "", 3, -1])
def test_an_unknown_or_ambiguous_name_lists_the_visible_gpus(gpus: list[Gpu], wanted: str | int) -> None:
    with pytest.raises(DeviceError, match="is not one of the visible GPUs") as refused:
        find_gpu(wanted)
    assert all(f"{gpu.ordinal}: {gpu.uuid}" in str(refused.value) for gpu in gpus)


@pytest.mark.skipif(missing_gpu() is None, reason="a driver is there")
def test_a_gpu_that_the_driver_cannot_describe_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        CUDARuntimeError=OSError,
        getDeviceCount=lambda: 1,
        driverGetVersion=lambda: 13000,
        getDeviceProperties=lambda _: {"name": b"H200", "multiProcessorCount": 132},
        deviceGetPCIBusId=lambda _: "0000:01:00.0",
    )
    stand_in = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(topology, "import_cupy", lambda: stand_in)
    with pytest.raises(DeviceError, match=r"no usable GPU: .*libcuda"):
        visible_gpus()
