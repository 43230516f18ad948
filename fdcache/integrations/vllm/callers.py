"""The configurations of vLLM whose connector is asked for.

vLLM asks for the connector's class while it makes its configuration, before it loads weights, and makes the connector
itself long after. It passes the configuration to neither the first, nor that of an outer connector to the second: both
are found in its calls in progress. Where a vLLM has none there, nothing is checked ahead of the weights, and the
connector raises its errors when it is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from vllm.config import KVTransferConfig, VllmConfig, replace


class Configurations(NamedTuple):
    """Transfer configurations, the outermost last, and the engine's configuration if it is being made."""

    transfers: list[KVTransferConfig]
    in_making: VllmConfig | None


def configurations() -> Configurations:
    """Return the configurations in the calls of vLLM that are in progress.

    A configuration that vLLM derives from an engine's, as it does for a draft model, is not the engine's.
    """
    transfers: dict[int, KVTransferConfig] = {}
    in_making, is_derived = None, False
    for frame in _frames_of_vllm():
        for value in list(frame.f_locals.values()):
            transfer = value.kv_transfer_config if isinstance(value, VllmConfig) else value
            if isinstance(transfer, KVTransferConfig):
                transfers.pop(id(transfer), None)
                transfers[id(transfer)] = transfer
        made = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and isinstance(made, VllmConfig):
            in_making = made
        is_derived |= frame.f_code is replace.__code__
    return Configurations(list(transfers.values()), None if is_derived else in_making)


def _frames_of_vllm() -> Iterator[FrameType]:
    """Yield the calls in progress, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("vllm."):
            yield frame
        frame = frame.f_back
