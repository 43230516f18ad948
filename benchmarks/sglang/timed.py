"""FdcacheLinker with a clock: what each of its calls costs the thread of SGLang's scheduler."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import percentiles
from fdcache.integrations.sglang.linker import FdcacheLinker

FILE = "FDCACHE_BENCHMARK_CALLS"
"""The environment variable that names the file of the figures."""

_CALLS = (
    "lookup",
    "load",
    "start_layer_wise_loading",
    "finish_layer_wise_loading",
    "offload",
    "num_completed_offloads",
)


class TimedLinker(FdcacheLinker):
    """Writes microseconds by call at each reset: wall time, and that of the thread's own work."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._wall: dict[str, list[float]] = {}
        self._own: dict[str, list[float]] = {}
        for name in _CALLS:
            setattr(self, name, self._timed(name, getattr(self, name)))
        waits = self.layer_done_counter
        setattr(waits, "wait_until", self._timed("wait_until", waits.wait_until))  # noqa: B010
        atexit.register(self.write)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        wall, own = self._wall.setdefault(name, []), self._own.setdefault(name, [])

        def timed(*arguments: Any, **options: Any) -> Any:
            began, worked = time.perf_counter_ns(), time.thread_time_ns()
            found = call(*arguments, **options)
            own.append((time.thread_time_ns() - worked) / 1e3)
            wall.append((time.perf_counter_ns() - began) / 1e3)
            return found

        return timed

    def reset(self) -> None:
        """Write the figures, too."""
        super().reset()
        self.write()

    def write(self) -> None:
        """Write the figures of all calls so far."""
        if file := os.environ.get(FILE):
            figures = {
                name: {"wall_us": percentiles(wall), "own_us": percentiles(self._own[name])}
                for name, wall in self._wall.items()
            }
            Path(file).write_text(json.dumps(figures))
