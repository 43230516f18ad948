"""What SGLang's forward pass waits for: the layers of a batch of loads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fdcache.controller.layers import LayerDoneCounter
from fdcache.errors import FdcacheError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LayersOfBatch:
    """The layers of loads that began together: counters, each with its number of SGLang's layers."""

    counters: list[tuple[LayerDoneCounter, Mapping[int, int]]]
    is_whole: bool = True


class LayerWaits:
    """What the forward pass waits for: the layers of the batch that was chosen last."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self.batches: dict[int, LayersOfBatch] = {}
        self._stream: Any = None

    def set_consumer(self, index: int) -> None:
        """Choose a batch by its index; -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Wait for a layer of the chosen batch: the device's current stream does, or on a CPU the calling thread."""
        batch = self.batches.get(self.consumer_index)
        if batch is None:
            return
        for counter, layers in batch.counters:
            local = layers.get(layer)
            if local is None:
                continue
            try:
                counter.wait_for_layer(local, stream=self._current_stream())
            except FdcacheError as error:  # the load has failed, which is told when it is finished
                logger.warning("layer %d: %s", layer, error)
                batch.is_whole = False

    def _current_stream(self) -> Any:
        """Return the current stream, as the same object as long as it is the same: layers share what they wait for."""
        if torch.cuda.is_initialized() and (stream := torch.cuda.current_stream()) != self._stream:
            self._stream = stream
        return self._stream
