"""Ranks of a GPU for tests of hand-overs: planes with known bytes, and instances that compute on a stream.

``python -m tests.gpu.peers planes GPU BYTES BLOCKS`` fills planes and prints what a peer needs to read them; so it does
for every line of its input, with the bytes of a plane.
``python -m tests.gpu.peers read HEX BYTES BLOCKS`` reads such planes on the first GPU that is visible to it.
``python -m tests.gpu.peers publish GPU BLOCKS`` publishes shuffled blocks with ``rdma`` for every line of its input,
with the bytes of a plane, and prints its boot id, its memory and each part: first block, blocks, and places.
``python -m tests.gpu.peers prefill GPU DIRECTORY [CONNECTOR]`` answers a decode instance until its input ends.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import cupy
import numpy as np

from fdcache.devices.base import PlaneBinding
from fdcache.devices.cuda import CudaDevice
from fdcache.layout import KVLayout
from fdcache.machine.calibration import Calibration
from fdcache.manager import Request
from fdcache.metadata import Int32Array, UInt64Array
from fdcache.settings.peers import PeerSettings
from fdcache.testing.transfer import TransferConformance
from fdcache.transfer.connector import LocalPlanes, ReadEnd, ReadOrder, TransferContext
from fdcache.transfer.ipc import IpcConnector
from fdcache.transfer.packed_memory import DevicePackedMemory
from fdcache.transfer.rdma import RdmaConnector
from tests.service_help import until
from tests.transfer_help import Instance, prompt_of

KIB = 1024


def device_of(gpu: str | int | None) -> CudaDevice:
    return CudaDevice(
        int(gpu) if isinstance(gpu, str) and gpu.isdecimal() else gpu, calibration=Calibration()
    )


def layout_of(plane_bytes: int, num_layers: int = 4) -> KVLayout:
    """Return a layout of planes of that many bytes."""
    return KVLayout.uniform(
        block_size=64,
        kv_heads=1,
        head_dim=plane_bytes // 128,
        dtype="bfloat16",
        model="peers",
        revision="1",
        num_layers=num_layers,
    )


def contents(layout: KVLayout, num_blocks: int, seed: int) -> list[np.ndarray]:
    """Return the bytes of all blocks of each plane."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (num_blocks, plane.nbytes), np.uint8) for plane in layout.planes]


class GpuPeerPlanes:
    """Planes of one rank on a GPU, as ``PeerPlanes`` of the conformance suite; ``arrays`` are copies of them."""

    def __init__(self, layout: KVLayout, num_blocks: int, gpu: str | int | None = None) -> None:
        self.layout, self.num_blocks, self.boot = layout, num_blocks, os.urandom(16)
        self.device = device_of(gpu)
        self.tensors = [self.device.allocate_plane(plane, num_blocks) for plane in layout.planes]
        bindings = []
        for plane, tensor in zip(layout.planes, self.tensors, strict=True):
            view = self.device.inspect_tensor(tensor)
            bindings.append(PlaneBinding(plane, view.address, view.strides[0], num_blocks, view.owner))
        bound = self.device.bind_planes(bindings, layout.record_bytes)
        self.access = self.device.peer_access(bound)
        addresses = tuple(each.address for each in bindings)
        strides = tuple(each.stride for each in bindings)
        self.planes = LocalPlanes(layout, bound.table, num_blocks, addresses, strides, self.access)
        self.ended = threading.Event()

    @property
    def arrays(self) -> list[np.ndarray]:
        return [cupy.asnumpy(each).reshape(self.num_blocks, -1).view(np.uint8) for each in self.tensors]

    def context(self, settings: PeerSettings) -> TransferContext:
        return TransferContext(self.planes, settings, self.boot, self.ended.set)

    def fill(self, seed: int) -> None:
        with cupy.cuda.Device(self.device.gpu.ordinal) as device:
            for tensor, data in zip(self.tensors, contents(self.layout, self.num_blocks, seed), strict=True):
                tensor.set(data.view(tensor.dtype).reshape(tensor.shape))
            device.synchronize()

    def sums(self, slots: Int32Array) -> UInt64Array:
        return self.access.sums(slots)


class GpuInstance(Instance):
    """An instance whose blocks are on a GPU, and computed by its stream."""

    def __init__(
        self, role: str, directory: Path, name: str, *, gpu: str | int | None, **options: Any
    ) -> None:
        device = device_of(gpu)
        with cupy.cuda.Device(device.gpu.ordinal):
            stream = cupy.cuda.Stream(non_blocking=True)
        self.ordinal = device.gpu.ordinal
        super().__init__(role, directory, name, device=device, stream=stream, **options)

    def __enter__(self) -> Self:
        return self

    def write(self, plane: Any, slot: int, data: np.ndarray) -> None:
        with cupy.cuda.Device(self.ordinal), self.stream:
            plane[slot] = cupy.asarray(data)

    def read(self, plane: Any, slot: int) -> np.ndarray:
        with cupy.cuda.Device(self.ordinal):
            found: np.ndarray = cupy.asnumpy(plane[slot])
            return found


def end_of_read(connector: IpcConnector) -> ReadEnd:
    """Wait for the end of a read."""
    ends: list[ReadEnd] = []

    def has_ended() -> bool:
        ends.extend(connector.poll())
        return bool(ends)

    until(has_ended, "the end of a read")
    return ends[0]


class Peer:
    """A process of this module, or of another like it. ``line`` is the first that it printed."""

    def __init__(self, *arguments: object, module: str = "tests.gpu.peers", **environment: str) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        assert self.line, self.process.communicate()[1]

    def tell(self, line: str) -> str:
        """Send a line and return the answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> str:
        """End the input, and return what the process still prints."""
        return self.process.communicate()[0].strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def answer(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _read(described: str, plane_bytes: str, num_blocks: str) -> None:
    """Read all blocks of a peer on the first GPU that is visible; answer whether they are what it was filled with."""
    layout, blocks = layout_of(int(plane_bytes)), int(num_blocks)
    planes = GpuPeerPlanes(layout, blocks)
    connector = IpcConnector(planes.context(PeerSettings(connector="ipc")))
    reason = connector.connect(b"peer", bytes.fromhex(described))
    if reason is None:
        every = np.arange(blocks, dtype=np.int32)
        connector.read(ReadOrder(1, b"peer", tuple(range(blocks)), blocks, 0, 0, layout.num_planes, every))
        connector.close()
        reason = connector.poll()[0].error
        for mine, theirs in zip(planes.arrays, contents(layout, blocks, 1), strict=True):
            reason = reason or (None if np.array_equal(mine, theirs) else "other bytes")
    answer(f"read: {reason}")


def _show_planes(gpu: str, plane_bytes: str, num_blocks: str) -> None:
    for line in itertools.chain([plane_bytes], sys.stdin):
        planes = GpuPeerPlanes(layout_of(int(line)), int(num_blocks), gpu)
        planes.fill(1)
        answer(planes.access.describe().hex())


def use_nixl_for_the_stand_in() -> None:
    """Let NIXL take the memory of the stand-in, which has no GPU, for what it is."""
    if not hasattr(cupy.cuda, "MemoryAsyncPool"):
        DevicePackedMemory.kind = "DRAM"


def _publish(gpu: str, num_blocks: str) -> None:
    use_nixl_for_the_stand_in()
    answer("ready")
    lines, connector = Lines(), None
    slots = np.random.default_rng(1).permutation(int(num_blocks)).astype(np.int32)
    while (line := lines.next()) is not None:
        if line:
            planes = GpuPeerPlanes(layout_of(int(line)), int(num_blocks), gpu)
            planes.fill(1)
            connector = RdmaConnector(planes.context(PeerSettings(connector="rdma", ring=16 << 20)))
            count, first = connector.most_blocks(0, planes.layout.num_planes), 0
            parts: list[str] = []
            while (size := len(slots[first : first + count])) and len(parts) < 3:
                places = connector.publish(slots[first : first + size], 0, planes.layout.num_planes)
                assert places is not None
                TransferConformance.await_packed(connector, places)
                parts.append(":".join(map(str, (first, size, *places))))
                first += size
            answer(" ".join([planes.boot.hex(), connector.memory.hex(), *parts]))
        elif connector is not None:
            connector.poll()


def _prefill(gpu: str, directory: str, connector: str = "ipc") -> None:
    """Compute prompts: each line has a seed, blocks and cycles for which the GPU is busy before each layer."""
    from tests.gpu.test_cuda_order import spin

    use_nixl_for_the_stand_in()
    with GpuInstance(
        "prefill", Path(directory), "p", gpu=gpu, connector=connector, ring=16 << 20
    ) as instance:
        answer(instance.address)
        lines = Lines()
        while (line := lines.next()) is not None:
            if line:
                seed, blocks, cycles = map(int, line.split())
                request = Request(f"r{seed}", prompt_of(seed, blocks))
                instance.start(request)
                instance.handovers.send([(request, f"r{seed}")])
                instance.step()
                if cycles:
                    with cupy.cuda.Device(instance.ordinal):
                        spin(instance.stream, cycles)
                instance.compute(request, f"r{seed}")
                instance.manager.finish([request])
                answer("computed")
            instance.step()


class Lines:
    """Lines of the input, without waiting for them."""

    def __init__(self) -> None:
        self._read: list[str | None] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        for line in sys.stdin:
            self._read.append(line.strip())
        self._read.append(None)

    def next(self) -> str | None:
        """Return the next line, an empty one if there is none yet, None at the end."""
        if self._read:
            return self._read.pop(0)
        threading.Event().wait(0.002)
        return ""


COMMANDS: dict[str, Callable[..., None]] = {
    "planes": _show_planes,
    "read": _read,
    "publish": _publish,
    "prefill": _prefill,
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
