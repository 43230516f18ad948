"""Streams and events of a GPU: fdcache's own and the engine's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fdcache import _core
from fdcache.devices.base import (
    Stream,
)
from fdcache.devices.calibration import STAGING_SLOT_BYTES, STAGING_SLOTS
from fdcache.devices.cuda_memory import CudaMemory
from fdcache.devices.topology import Gpu, import_cupy
from fdcache.errors import DeviceError, StreamError
from fdcache.tasks import Event

_BACKGROUND_PRIORITY = 0
_PRIORITY = -5
"""CUDA clips priorities to the GPU's range; lower numbers run first."""


_WAITING = "waiting for the layers of a plan"


def _refused(error: _core.CudaError, call: str, consequence: str) -> DeviceError:
    if str(error).startswith("cuStreamIsCapturing"):
        return DeviceError(f"{call}: the stream cannot be used: {error}")
    return DeviceError(f"{consequence}: {error}")


def _captured(call: str) -> StreamError:
    return StreamError(
        f"{call}: the stream is being captured into a CUDA graph, which would wait for this plan's "
        "events in every replay; before the graph is launched call wait_all(stream=...) instead"
    )


class ExternalStream:
    """Stream of the engine: used, never owned; ``owner`` keeps it alive."""

    def __init__(self, handle: int, owner: object) -> None:
        self.handle = handle
        self._owner = owner

    def record(self, event: _core.CudaEvent) -> None:
        """Record an event after the stream's current work. Raises ``StreamError`` during a capture."""
        try:
            recorded = event.record_unless_captured(self.handle)
        except _core.CudaError as error:
            raise _refused(error, "submit_swap_tasks", "nothing can wait for the compute stream") from error
        if not recorded:
            raise _captured("submit_swap_tasks")

    def wait_event(self, event: Event) -> None:
        """Make later operations wait for the event. Raises ``StreamError`` during a capture."""
        try:
            holds = core_event(event).hold_unless_captured(self.handle)
        except _core.CudaError as error:
            raise _refused(error, _WAITING, "a stream cannot wait for an event") from error
        if not holds:
            raise _captured(_WAITING)

    def retire(self) -> None:
        """Do nothing: the stream keeps no memory of fdcache alive."""

    def close(self) -> None:
        """Do nothing: the engine owns the stream."""


class CudaStream:
    """Stream of one direction and purpose: one stream for kernels, one for the copy engine, and a staging ring.

    ``submitter`` submits work; on a background stream its own thread submits every copy.
    """

    def __init__(self, gpu: Gpu, context: _core.CudaContext, memory: CudaMemory, *, background: bool) -> None:
        cupy = import_cupy()
        priority = _BACKGROUND_PRIORITY if background else _PRIORITY
        with cupy.cuda.Device(gpu.ordinal):
            self._streams = [cupy.cuda.Stream(non_blocking=True, priority=priority) for _ in range(2)]
        self._context = context
        self._memory = memory
        self._ring: Any = None
        self._lane: _core.CudaLane | None = None
        self._after: list[_core.CudaEvent] = []
        """Events that the next operation waits for."""
        self.handle: int = self._streams[0].ptr
        try:
            self.submitter = _core.CudaSubmitter(context, self.handle, background)
        except RuntimeError as error:
            raise DeviceError(
                f"the thread that submits copies cannot be started: {error}; raise the limit of threads (ulimit -u, "
                "docker run --pids-limit)"
            ) from error
        self._process = os.getpid()

    def lane(self) -> _core.CudaLane:
        """Return the streams and the ring for the native module; the ring is allocated at the first use.

        Raises ``DeviceError`` when the GPU has no memory for the ring, or has failed.
        """
        if self._lane is None:
            self._ring = self._memory.reserve(STAGING_SLOTS * STAGING_SLOT_BYTES)
            main, copy = self._streams
            self._lane = _core.CudaLane(
                self._context, main.ptr, copy.ptr, self._ring.ptr, STAGING_SLOT_BYTES, STAGING_SLOTS
            )
        return self._lane

    def enqueue(
        self, batch: _core.CudaSwap, owner: object, ranges: Sequence[tuple[int, int]]
    ) -> list[_core.CudaEvent]:
        """Enqueue ranges of planes of a batch, which keeps ``owner`` alive; return an event after each."""
        events = self.submitter.enqueue(batch, owner, self.lane(), ranges, self._after)
        self._after = []
        return events

    def refuse(self, batch: _core.CudaSwap, owner: object, reason: str) -> None:
        """End a batch that cannot be copied, in its turn."""
        self._wait()
        self.submitter.refuse(batch, owner, reason)

    def record(self, event: _core.CudaEvent) -> None:
        """Record an event after everything submitted so far."""
        self._wait()
        self.submitter.record(event)

    def wait_event(self, event: Event) -> None:
        """Make later operations wait for the event. A wait that the driver refuses fails the next batch."""
        self._after.append(core_event(event))

    def _wait(self) -> None:
        after, self._after = self._after, []
        for event in after:
            self.submitter.wait(event)

    def retire(self) -> None:
        """Release the memory that finished copies kept alive."""
        self.submitter.retire()

    def close(self) -> None:
        """Wait for submitted work, unless the GPU has failed, then release everything. Do nothing in a forked child."""
        if os.getpid() != self._process:
            return
        for end in self.submitter.ends():
            _core.wait_cuda_events([end], None)
        self.submitter.close()
        self._lane = None
        self._ring = None

    def __del__(self) -> None:
        # Copies in flight, and those not submitted yet, must not outlive the memory that they refer to.
        if hasattr(self, "_process"):
            self.close()


def handle_of(stream: Any) -> int:
    """Return the driver's handle of a stream of any framework. Raises ``TypeError`` for anything else."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    base = getattr(stream, "stream_base", None)
    for attribute in ("raw_stream", "cuda_stream"):  # Paddle's, the latter before 3.0
        handle = getattr(base, attribute, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(
        f"a {type(stream).__name__} is not a CUDA stream; pass a torch, CuPy or Paddle stream or its handle"
    )


def cuda_stream(stream: Stream) -> CudaStream:
    """Return a stream that fdcache made. Raises ``TypeError`` for any other."""
    if not isinstance(stream, CudaStream):
        raise TypeError(f"copies run on fdcache's own streams, got {type(stream).__name__}")
    return stream


def core_event(event: Event) -> _core.CudaEvent:
    """Return an event of a GPU. Raises ``TypeError`` for any other."""
    if not isinstance(event, _core.CudaEvent):
        raise TypeError(f"expected an event of the CUDA device, got {type(event).__name__}")
    return event
