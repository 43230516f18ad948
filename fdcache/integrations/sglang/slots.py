"""SlotReader: which pages SGLang means by indices of tokens on the device, and the streams that copies wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fdcache.metadata import Int32Array


class SlotReader:
    """Reads slots of a device without a wait of the thread that asks for them.

    ``store_stream``: behind all work that stores have to wait for; None on a CPU, where calls are in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self.store_stream = torch.cuda.Stream(device) if self._on_gpu else None

    def begin(self, indices: torch.Tensor, page_size: int) -> Callable[[], Int32Array]:
        """Begin to read the pages of tokens; return a function that waits for them."""
        pages = indices[::page_size]
        if page_size > 1:
            pages = pages // page_size
        pages = pages.to(torch.int32)
        if not self._on_gpu:
            array: Int32Array = np.ascontiguousarray(pages.numpy(), np.int32)
            return lambda: array
        host = torch.empty(pages.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(pages, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def read() -> Int32Array:
            event.synchronize()
            slots: Int32Array = host.numpy()
            return slots

        return read

    def current_stream(self) -> Any:
        """Return the stream of the scheduler, None on a CPU."""
        return torch.cuda.current_stream(self._device) if self._on_gpu else None

    def store_after(self, record: Callable[[], list[Any]]) -> Callable[[], bool]:
        """Have stores wait for the events that ``record`` returns; the function tells if the first is over."""
        if self.store_stream is None:
            return lambda: True
        events = record()
        for event in events:
            self.store_stream.wait_event(event)
        return lambda: bool(events[0].query())
