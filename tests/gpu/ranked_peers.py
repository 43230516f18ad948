"""Engines with ranks whose blocks are on a GPU, and one in a process of its own.

``python -m tests.gpu.ranked_peers GPU FOLDER CONNECTOR RANKS PEERS KIND`` runs one that hands over: it prints its
addresses and answers each line ``seed tokens`` once it has computed that prompt, until its input ends. Then it prints
how the hand-overs of its ranks have ended.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from tests.gpu.peers import Lines, answer, device_of, use_nixl_for_the_stand_in
from tests.ranked_engine import Engine, send, step_until


class GpuEngine(Engine):
    """An engine with the blocks of all its ranks on one GPU."""

    def __init__(
        self, role: str, folder: Path, connector: str, ranks: int, peers: int, kind: str, gpu: int = 0
    ) -> None:
        device = device_of(gpu)
        self.ordinal = gpu
        with cupy.cuda.Device(gpu):
            stream = cupy.cuda.Stream(non_blocking=True)
        super().__init__(role, folder, connector, ranks, peers, kind, device, stream)

    def write(self, plane: Any, slot: int, data: np.ndarray) -> None:
        with cupy.cuda.Device(self.ordinal), self.stream:
            plane[slot] = 99
            plane[slot, : len(data)] = cupy.asarray(data)

    def read(self, plane: Any, slot: int) -> np.ndarray:
        with cupy.cuda.Device(self.ordinal):
            found: np.ndarray = cupy.asnumpy(plane[slot])
            return found


def main(gpu: str, folder: str, connector: str, ranks: str, peers: str, kind: str) -> None:
    """Hand over the prompts that the input names."""
    use_nixl_for_the_stand_in()
    engine = GpuEngine("prefill", Path(folder), connector, int(ranks), int(peers), kind, int(gpu))
    answer(" ".join(engine.addresses))
    lines, sent = Lines(), 0
    while (line := lines.next()) is not None:
        if line:
            seed, num_tokens = map(int, line.split())
            send(engine, seed, num_tokens)
            sent += 1
            answer("computed")
        engine.step()
    step_until(lambda: len(engine.results) == sent * len(engine.ranks), (engine,))
    answer(" ".join(sorted(set(engine.results))))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
