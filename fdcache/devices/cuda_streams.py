"""Streams and events of a GPU: fdcache's own, and those of the engine."""

from __future__ import annotations

import os
from typing import Any, Protocol

from fdcache import _core
from fdcache.devices.base import Event, Stream
from fdcache.devices.cuda_memory import CudaMemory
from fdcache.devices.policy import STAGING_SLOT_BYTES, STAGING_SLOTS
from fdcache.devices.topology import Gpu, import_cupy
from fdcache.errors import DeviceError, StreamError

_BACKGROUND_PRIORITY = 0
_PRIORITY = -5
"""CUDA clips priorities to what the GPU has; lower numbers go first."""


class CudaEvent:
    """A point in a stream of a GPU. Its driver event is used again once nobody holds this object."""

    def __init__(self, core: _core.CudaEvent) -> None:
        self.core = core

    def record(self, stream: Stream) -> None:
        """Let it be reached when the stream has done everything enqueued so far."""
        gpu_stream(stream).record(self.core)

    def query(self) -> bool:
        """Whether it was reached; on a GPU that has failed every event is."""
        return self.core.query()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds, None for ever; whether it was reached."""
        return _core.wait_cuda_events([self.core], timeout)


class ExternalStream:
    """A stream of the engine. It is used, never owned; ``owner`` keeps it alive."""

    def __init__(self, context: _core.CudaContext, handle: int, owner: object) -> None:
        self._context = context
        self.handle = handle
        self._owner = owner

    def _check_not_captured(self, call: str) -> None:
        try:
            captured = self._context.is_capturing(self.handle)
        except _core.CudaError as error:
            raise DeviceError(f"{call}: the stream cannot be used: {error}") from error
        if captured:
            raise StreamError(
                f"{call}: the stream is being captured into a CUDA graph, which would wait for this plan's "
                "events in every replay; before the graph is launched call wait_all(stream=...) instead"
            )

    def record(self, event: _core.CudaEvent) -> None:
        """Record an event behind what the stream holds now. Raises ``StreamError`` during a capture."""
        self._check_not_captured("submit_swap_tasks")
        try:
            event.record(self.handle)
        except _core.CudaError as error:
            raise DeviceError(f"nothing can wait for the compute stream: {error}") from error

    def wait_event(self, event: Event) -> None:
        """Hold later operations until the event is reached. Raises ``StreamError`` during a capture."""
        self._check_not_captured("waiting for the layers of a plan")
        try:
            core_event(event).hold(self.handle)
        except _core.CudaError as error:
            raise DeviceError(f"a stream cannot wait for an event: {error}") from error

    def retire(self) -> None:
        """Nothing of fdcache is kept alive by it."""

    def close(self) -> None:
        """It is the engine's."""


class _Batch(Protocol):
    @property
    def done(self) -> CudaEvent: ...


class CudaStream:
    """One direction and purpose: a stream for kernels and one for the copy engine, and a staging ring.

    ``submitter`` puts work on it; a background stream has all of its copies put there by the submitter's thread.
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
        self._held: list[_Batch] = []
        self.handle: int = self._streams[0].ptr
        try:
            self.submitter = _core.CudaSubmitter(context, self.handle, background)
        except RuntimeError as error:
            raise DeviceError(
                f"no thread can be started that submits copies: {error}; raise the limit of threads (ulimit -u, "
                "docker run --pids-limit)"
            ) from error
        self._process = os.getpid()

    def lane(self) -> _core.CudaLane:
        """The streams as the core wants them; the ring is allocated at the first use.

        Raises ``DeviceError`` when the GPU has no memory for it, or has failed.
        """
        if self._lane is None:
            self._ring = self._memory.reserve(STAGING_SLOTS * STAGING_SLOT_BYTES)
            main, copy = self._streams
            self._lane = _core.CudaLane(
                self._context, main.ptr, copy.ptr, self._ring.ptr, STAGING_SLOT_BYTES, STAGING_SLOTS
            )
        return self._lane

    def hold(self, batch: _Batch) -> None:
        """Keep a batch, and the memory that it names, until it has ended."""
        if not self._held or self._held[-1] is not batch:
            self.retire()
            self._held.append(batch)

    def record(self, event: _core.CudaEvent) -> None:
        """Record an event behind what the stream was given so far."""
        self.submitter.record(event)

    def wait_event(self, event: Event) -> None:
        """Hold later operations until the event is reached. A wait that the driver refuses fails the next batch."""
        self.submitter.wait(core_event(event))

    def retire(self) -> None:
        """Let go of the memory that finished copies kept alive."""
        self._held = [batch for batch in self._held if not batch.done.query()]

    def close(self) -> None:
        """Wait for what was enqueued, then let go of everything. On a GPU that has failed there is no wait.

        In a forked child, where nothing goes on, it does nothing.
        """
        if os.getpid() != self._process:
            return
        for batch in self._held:
            batch.done.wait()
        self.submitter.close()
        self._held = []
        self._lane = None
        self._ring = None

    def __del__(self) -> None:
        # Neither copies in flight nor what is still to be submitted may outlive the memory that they name.
        if hasattr(self, "_process"):
            self.close()


def handle_of(stream: Any) -> int:
    """The driver's handle of a stream of any framework. Raises ``TypeError`` for anything else."""
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
        f"a {type(stream).__name__} is no CUDA stream; pass a torch, CuPy or Paddle stream or its handle"
    )


def gpu_stream(stream: Stream) -> CudaStream | ExternalStream:
    """The stream, if it is one of a GPU. Raises ``TypeError``."""
    if not isinstance(stream, CudaStream | ExternalStream):
        raise TypeError(f"expected a stream of the CUDA device, got {type(stream).__name__}")
    return stream


def cuda_stream(stream: Stream) -> CudaStream:
    """The stream, if it is one that fdcache made. Raises ``TypeError``."""
    if not isinstance(stream, CudaStream):
        raise TypeError(f"copies run on fdcache's own streams, got {type(stream).__name__}")
    return stream


def core_event(event: Event) -> _core.CudaEvent:
    """The event, if it is one of a GPU. Raises ``TypeError``."""
    if not isinstance(event, CudaEvent):
        raise TypeError(f"expected an event of the CUDA device, got {type(event).__name__}")
    return event.core
