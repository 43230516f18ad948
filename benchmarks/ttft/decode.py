"""Cost of swaps for the decode steps that run meanwhile."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ttft.model import Shape
from benchmarks.ttft.server import Row, Server, Spent, prompt, timed
from fdcache import Request
from fdcache.tiers.statistics import Counters

_STEPS = 48
_PER_VISIT = 16
_VISITORS = 12

_EVERY = (0, 4, 1)
"""Steps from one visitor to the next; 0 for no visitors."""


class Planning(StrEnum):
    """Time at which the engine's thread plans and submits the swaps of a step."""

    IN_LINE = "before it"
    AHEAD = "beside it"


class Decode:
    """A batch of decoding sequences, as one CUDA graph on a GPU."""

    def __init__(self, server: Server, sequences: int, context: int, steps: int) -> None:
        self.server = server
        shape, device = server.shape, server.torch_device
        self.requests: list[Request] = []
        for seed in range(sequences):
            text = prompt(shape, context, 7_000_000 + seed)
            request = server.request(text)
            server.allocate(request, context + steps)
            server.compute(request, text, server.submit())
            self.requests.append(request)
        server.settle()
        tables = np.stack([request.block_table for request in self.requests]).astype(np.int64)
        self.tables = torch.from_numpy(tables).to(device)
        self.tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.positions = torch.full((sequences,), context, dtype=torch.int64, device=device)
        self._context = context
        self._tokens_read = TokenReader(device, sequences)
        self._graph = self._capture() if device == "cuda" else None

    def restart(self) -> None:
        """Go back to the first position, so that every round decodes the same."""
        self.tokens.zero_()
        self.positions.fill_(self._context)

    def launch(self) -> None:
        """Compute one token for every sequence, and copy it to the host."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        self._tokens_read.take(self.tokens)

    def read(self) -> list[int]:
        """Wait for the step's tokens."""
        return self._tokens_read.read()

    def _compute(self) -> None:
        self.tokens.copy_(self.server.model.decode(self.tokens, self.positions, self.tables))
        self.positions.add_(1)

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        return graph


class TokenReader:
    """Copies tokens to the host on a stream of its own. On the compute stream the copy would wait behind every large
    copy to the host submitted before it, and the next step would wait behind the copy.
    """

    def __init__(self, device: str, sequences: int) -> None:
        on_gpu = device == "cuda"
        self._host = torch.zeros(sequences, dtype=torch.int64, pin_memory=on_gpu)
        self._stream: Any = torch.cuda.Stream() if on_gpu else None

    def take(self, tokens: Tensor) -> None:
        """Start the copy."""
        if self._stream is None:
            self._host.copy_(tokens)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._host.copy_(tokens, non_blocking=True)

    def read(self) -> list[int]:
        """Wait for the tokens and return them; call it before the next step is launched."""
        if self._stream is not None:
            self._stream.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens


class Visitors:
    """Short requests beside the decodes: each loads ``blocks`` blocks from the host and leaves as many new
    ones to back up. They compute nothing, so only their copies can slow the decodes down.
    """

    def __init__(self, server: Server, blocks: int, count: int) -> None:
        self._server = server
        self._blocks = 2 * blocks
        self._half = blocks * server.shape.block_size
        self._prefixes = [prompt(server.shape, self._half, 9_000_000 + each) for each in range(count)]
        self._expected: deque[Request] = deque()
        self._staying: list[Request] = []
        self._turn = 0
        for prefix in self._prefixes:
            self._admit(server.arrive(prefix))
            self.leave()

    def expect(self, count: int) -> None:
        """Let the next visitors arrive: an engine tokenizes and hashes them beside its steps."""
        while len(self._expected) < count:
            self._turn += 1
            tail = prompt(self._server.shape, self._half, 9_500_000 + self._turn)
            text = np.concatenate([self._prefixes[self._turn % len(self._prefixes)], tail])
            self._expected.append(self._server.arrive(text))

    def visit(self) -> None:
        """Admit the next visitor and submit its copies; visitors whose blocks have arrived leave."""
        self._depart()
        while not self._server.manager.can_allocate_device_blocks(self._blocks):
            self._depart(wait=True)
        self._admit(self._expected.popleft())

    def leave(self) -> None:
        """End all visitors."""
        while self._staying:
            self._server.submit()
            self._depart(wait=True)
        self._server.settle()

    def _admit(self, request: Request) -> None:
        self._server.match(request)
        self._server.allocate(request, request.num_tokens)
        self._server.submit()
        self._staying.append(request)

    def _depart(self, *, wait: bool = False) -> None:
        self._server.collect(wait=wait)
        going = [(request, request.num_tokens) for request in self._staying if not request.is_loading]
        self._staying = [request for request in self._staying if request.is_loading]
        self._server.finish(going)


def blocks_moved(counters: Counters) -> int:
    """Number of blocks copied either way so far."""
    return counters.blocks_loaded + counters.blocks_backed_up + counters.blocks_evicted_to_host


@dataclass(frozen=True, slots=True)
class Round:
    """Figures per decode step: seconds by the host's clock and on the GPU (0 without one), seconds of the engine's
    thread in manager and controller, blocks swapped; and the bytes swapped per second.
    """

    step: float
    gpu: float
    manager: float
    controller: float
    blocks: float
    bandwidth: float


def decode_beside_swaps(shape: Shape, device: str, *, sequences: int, context: int, rounds: int) -> list[Row]:
    """Measure the milliseconds of a decode step alone, and with swaps both ways meanwhile.

    Each visitor loads and leaves 16 blocks. The engine's thread plans the swaps before it launches a step, while the
    GPU is idle, or during the step, as a scheduler that runs one step ahead does. Their tokens are hashed before.
    """
    # Room for five visitors: earlier ones may still hold their blocks for copies in flight.
    own = sequences * -(-(context + _STEPS) // shape.block_size)
    server = Server(
        shape,
        device,
        device_blocks=own + 10 * _PER_VISIT,
        host_blocks=own + (_VISITORS + 40) * _PER_VISIT,
        max_positions=context + _STEPS + 8,
    )
    decode = Decode(server, sequences, context, _STEPS)
    beside = Visitors(server, _PER_VISIT, _VISITORS)
    _run(decode, beside, Planning.AHEAD, 1)
    cases = [(planning, every) for planning in Planning for every in _EVERY]
    found: dict[tuple[Planning, int], list[Round]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, measured in found.items():
            measured.append(_run(decode, beside, *case))
    beside.leave()
    server.manager.finish(decode.requests)
    server.close()
    return [_row(*case, found[case], found[case[0], 0]) for case in cases]


def _run(decode: Decode, beside: Visitors, planning: Planning, every: int) -> Round:
    server = decode.server
    decode.restart()
    beside.leave()
    beside.expect(_STEPS // every if every else 0)
    server.synchronize()
    server.spent = Spent()
    moved = blocks_moved(server.manager.get_stats().counters)
    clock = GpuClock(server.torch_device)

    def work() -> None:
        for step in range(_STEPS):
            comes = every and step % every == 0
            if comes and planning is Planning.IN_LINE:
                beside.visit()
            clock.measure(decode.launch)
            if comes and planning is Planning.AHEAD:
                beside.visit()
            decode.read()

    seconds = timed(work)
    spent = replace(server.spent)
    beside.leave()
    moved = blocks_moved(server.manager.get_stats().counters) - moved
    return Round(
        step=seconds / _STEPS,
        gpu=clock.mean(),
        manager=spent.manager / _STEPS,
        controller=spent.controller / _STEPS,
        blocks=moved / _STEPS,
        bandwidth=moved * server.layout.payload_bytes / seconds,
    )


class GpuClock:
    """Measures the GPU time of each piece of work on the current stream."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def measure(self, launch: Callable[[], None]) -> None:
        """Launch the work between two events."""
        if not self._on_gpu:
            return launch()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        self._spans.append((begin, end))
        return None

    def mean(self) -> float:
        """Return the mean seconds; 0 without a GPU. All work must have ended."""
        spans: list[float] = [begin.elapsed_time(end) for begin, end in self._spans]
        return 1e-3 * statistics.mean(spans or [0.0])


def _row(planning: Planning, every: int, measured: list[Round], alone: list[Round]) -> Row:
    def median(name: str, rounds: list[Round] = measured) -> float:
        values: list[float] = [getattr(each, name) for each in rounds]
        return statistics.median(values)

    def slowed(name: str) -> float:
        base = median(name, alone)
        return round(100 * (median(name) / base - 1), 2) if base else 0.0

    return {
        "planned": planning.value,
        "a visitor": {0: "none", 1: "each step"}.get(every, f"each {every} steps"),
        "step ms": round(1e3 * median("step"), 3),
        "slowed by %": slowed("step"),
        "on the GPU ms": round(1e3 * median("gpu"), 3),
        "GPU slowed by %": slowed("gpu"),
        "manager ms": round(1e3 * median("manager"), 3),
        "controller ms": round(1e3 * median("controller"), 3),
        "GB/s": round(median("bandwidth") / 1e9, 2),
        "blocks a step": round(median("blocks"), 1),
    }
