"""SlotReader: which pages SGLang means by indices of tokens on the device, and the streams that copies wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fdcache.metadata import Int32Array


class SlotReader:
    """Reads which pages of a device tokens are in: every call of torch here costs the scheduler's thread.

    ``store_stream``: behind all work that stores have to wait for; None on a CPU, where calls are in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.device = device
        self.store_stream = torch.cuda.Stream(device) if self._on_gpu else None

    def read(self, indices: torch.Tensor, page_size: int) -> Int32Array:
        """Return the pages of tokens, once the scheduler's stream has made their indices."""
        return _pages_of(indices[::page_size].cpu(), page_size)

    def begin(self, indices: torch.Tensor, page_size: int) -> Callable[[], Int32Array]:
        """Begin to read the pages of tokens; the function returns them once a later ``store_after`` is ready."""
        some = indices[::page_size]
        first = torch.empty(some.shape, dtype=some.dtype, pin_memory=self._on_gpu)
        first.copy_(some, non_blocking=True)
        return lambda: _pages_of(first, page_size)

    def current_stream(self) -> Any:
        """Return the stream of the scheduler, None on a CPU."""
        return torch.cuda.current_stream(self.device) if self._on_gpu else None

    def store_after(self, record: Callable[[], list[Any]]) -> Callable[[], bool]:
        """Have stores wait for the events that ``record`` returns; the function tells if the first is over."""
        if self.store_stream is None:
            return lambda: True
        events = record()
        for event in events:
            self.store_stream.wait_event(event)
        return lambda: bool(events[0].query())


def _pages_of(first: torch.Tensor, page_size: int) -> Int32Array:
    """Return the pages of which these are the first tokens, in host memory."""
    pages: Int32Array = (first.numpy() // page_size).astype(np.int32)
    return pages
