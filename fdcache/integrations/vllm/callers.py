"""The configurations of vLLM whose connector is asked for.

vLLM asks for the connector's class while it makes its configuration, before it loads weights, and makes the connector
itself long after. It passes the configuration to neither the first, nor that of an outer connector to the second: both
are found in its calls in progress.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig, VllmConfig


class Configurations(NamedTuple):
    """Transfer configurations, the outermost last, and the engine's configuration if it is being made."""

    transfers: list[KVTransferConfig]
    in_making: VllmConfig | None


def configurations() -> Configurations:
    """Return the configurations in the calls of vLLM that are in progress."""
    transfers: dict[int, KVTransferConfig] = {}
    in_making = None
    for frame in _frames():
        for value in list(frame.f_locals.values()):
            transfer = value.kv_transfer_config if isinstance(value, VllmConfig) else value
            if isinstance(transfer, KVTransferConfig):
                transfers.pop(id(transfer), None)
                transfers[id(transfer)] = transfer
        made: Any = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and isinstance(made, VllmConfig):
            in_making = made
    return Configurations(list(transfers.values()), in_making)


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1).f_back
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("vllm."):
            yield frame
        frame = frame.f_back
