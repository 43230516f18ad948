"""Time to first token from each tier, and what the cache costs a decode and traffic without reuse.

On a GPU: ``python -m benchmarks.ttft --json ttft.json --plot ttft.png`` (a model of the shape of Llama-3-8B, random
bfloat16 weights, about 40 GB of GPU memory). To try it without one: ``--shape tiny --device cpu``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.ttft_model import LLAMA_3_8B, TINY, Shape
from benchmarks.ttft_server import Server
from fdcache import Request
from fdcache.manager.stats import Counters

SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TINY}
Row = dict[str, Any]
Tokens = NDArray[np.int64]


def prompt(shape: Shape, length: int, seed: int) -> Tokens:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, shape.vocab, length)


def link_bandwidth(device: str, nbytes: int) -> float:
    """GB/s of one large copy from pinned host memory to the device, the best of several."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda").fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return nbytes / min(timed(copy) for _ in range(6)) / 1e9


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Seconds."""
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def first_tokens(
    shape: Shape, device: str, lengths: list[int], rounds: int, storage: Path | None
) -> list[Row]:
    """TTFT for each prompt length: computed, from the device, from the host, and from storage where there is a folder
    for it.

    "tokens equal" counts prompts whose first token is the same all ways; chunks of other shapes round bfloat16
    otherwise, so on random weights a few may differ.

    The goal for the host: at most 1.15 times the bytes over the link's bandwidth, plus the step that a device hit
    needs as well.
    """
    blocks = max(lengths) // shape.block_size + 8
    server = Server(
        shape,
        device,
        device_blocks=blocks,
        host_blocks=2 * blocks,
        max_positions=max(lengths) + shape.block_size,
        storage=storage,
    )
    link = link_bandwidth(device, min(server.layout.payload_bytes * blocks, 1 << 30))
    rows = []
    for length in lengths:
        tiers = ("computed", "device", "host", "storage") if storage else ("computed", "device", "host")
        seconds: dict[str, list[float]] = {tier: [] for tier in tiers}
        equal = 0
        for seed in range(rounds + 1):  # the first round warms up
            server.manager.reset_cache()
            text = prompt(shape, length, 1000 * length + seed)
            said = []
            for tier, measured in seconds.items():
                if tier == "host":
                    server.forget_device()
                if tier == "storage":
                    server.forget_all_but_storage()
                elapsed, token = server.first_token(text)
                said.append(token)
                if seed:
                    measured.append(elapsed)
            equal += len(set(said)) == 1
        medians = {tier: statistics.median(values) for tier, values in seconds.items()}
        nbytes = (length - 1) // shape.block_size * server.layout.payload_bytes
        allowed = 1.15 * nbytes / (link * 1e9) + medians["device"]
        rows.append(
            {
                "prompt": length,
                **{f"{tier} ms": round(1e3 * value, 2) for tier, value in medians.items()},
                "link GB/s": round(link, 1),
                "allowed from host ms": round(1e3 * allowed, 2),
                "host within": medians["host"] <= allowed,
                "tokens equal": f"{equal}/{rounds + 1}",
            }
        )
    server.close()
    return rows


class Decode:
    """A batch of sequences that decode, as one CUDA graph where there is one."""

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
        self._graph = self._capture() if device == "cuda" else None

    def restart(self) -> None:
        """Back to the first position, so that every round decodes the same."""
        self.tokens.zero_()
        self.positions.fill_(self._context)

    def step(self) -> None:
        """One token for every sequence, brought to the host as an engine does to stream it."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._compute()
        self.tokens.tolist()

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


class Visitors:
    """Requests that come and go beside the decodes: each loads ``blocks`` blocks from the host and leaves as many new
    ones to be backed up. Nothing is computed for them, so that only their copies can slow the decodes down.
    """

    def __init__(self, server: Server, blocks: int, count: int) -> None:
        self._server = server
        self._blocks = 2 * blocks
        self._half = blocks * server.shape.block_size
        self._prefixes = [prompt(server.shape, self._half, 9_000_000 + each) for each in range(count)]
        self._staying: list[tuple[Request, int]] = []
        self._turn = 0
        for prefix in self._prefixes:
            self._arrive(prefix)
            self.leave()

    def visit(self) -> None:
        """One visitor: those whose blocks have arrived go, and its copies are put on the streams."""
        self._depart()
        while not self._server.manager.can_allocate_device_blocks(self._blocks):
            self._depart(wait=True)
        self._turn += 1
        tail = prompt(self._server.shape, self._half, 9_500_000 + self._turn)
        self._arrive(np.concatenate([self._prefixes[self._turn % len(self._prefixes)], tail]))

    def leave(self) -> None:
        """Let all go."""
        while self._staying:
            self._server.submit()
            self._depart(wait=True)
        self._server.settle()

    def _arrive(self, text: Tokens) -> None:
        request = self._server.request(text)
        self._server.allocate(request, len(text))
        self._server.submit()
        self._staying.append((request, len(text)))

    def _depart(self, *, wait: bool = False) -> None:
        self._server.collect(wait=wait)
        going = [(request, count) for request, count in self._staying if not request.is_loading]
        self._staying = [each for each in self._staying if each[0].is_loading]
        self._server.manager.commit(going)
        self._server.manager.request_finish([request for request, _ in going])


def blocks_moved(counters: Counters) -> int:
    """Blocks copied either way so far."""
    return counters.blocks_loaded + counters.blocks_backed_up + counters.blocks_evicted_to_host


def decode_beside_swaps(shape: Shape, device: str, *, sequences: int, context: int, rounds: int) -> Row:
    """Milliseconds of a decode step with nothing else, and with swaps both ways running all the time."""
    steps, per_visit, visitors = 48, 16, 12
    # Room for three visitors: those before the last one may still hold their blocks for copies under way.
    own = sequences * -(-(context + steps) // shape.block_size)
    server = Server(
        shape,
        device,
        device_blocks=own + 6 * per_visit,
        host_blocks=own + (visitors + 40) * per_visit,
        max_positions=context + steps + 8,
    )
    decode = Decode(server, sequences, context, steps)
    beside = Visitors(server, per_visit, visitors)
    before = server.manager.get_stats().counters

    def run(visit: Callable[[], None] | None) -> float:
        decode.restart()
        beside.leave()
        server.synchronize()

        def work() -> None:
            for _ in range(steps):
                if visit:
                    visit()
                decode.step()

        return timed(work) / steps

    run(beside.visit)
    pairs = [(run(None), run(beside.visit)) for _ in range(rounds)]
    beside.leave()
    after = server.manager.get_stats().counters
    alone, swapping = (statistics.median(column) for column in zip(*pairs, strict=True))
    server.manager.request_finish(decode.requests)
    moved = blocks_moved(after) - blocks_moved(before)
    server.close()
    return {
        "sequences": sequences,
        "context": context,
        "step alone ms": round(1e3 * alone, 3),
        "step with swaps ms": round(1e3 * swapping, 3),
        "slowed by %": round(100 * (swapping / alone - 1), 2),
        "GB/s swapped": round(
            moved * server.layout.payload_bytes / ((rounds + 1) * steps * swapping) / 1e9, 2
        ),
    }


def overhead_without_reuse(shape: Shape, device: str, *, length: int, rounds: int) -> list[Row]:
    """Seconds to serve prompts that share nothing, with blocks from a plain list and from fdcache."""
    blocks = -(-length // shape.block_size)
    rows = []
    for policy in ("write_through_selective", "write_through"):
        server = Server(
            shape,
            device,
            device_blocks=4 * blocks,
            host_blocks=8 * blocks,
            max_positions=length + 1,
            write_policy=policy,
        )
        plain = np.arange(blocks, dtype=np.int32)
        server.first_token(prompt(shape, length, 1))
        seconds: tuple[list[float], list[float]] = ([], [])
        for seed in range(rounds):
            text = prompt(shape, length, 8_000_000 + seed)
            server.settle()
            # The plain run overwrites whatever is cached in its blocks, so nothing may be cached by then.
            server.manager.reset_cache()
            server.synchronize()
            seconds[0].append(timed(server.prefill, text, 0, plain))
            seconds[1].append(timed(_serve, server, text))
        without, with_cache = (statistics.median(each) for each in seconds)
        rows.append(
            {
                "policy": policy,
                "prompt": length,
                "without ms": round(1e3 * without, 3),
                "with ms": round(1e3 * with_cache, 3),
                "overhead %": round(100 * (with_cache / without - 1), 2),
            }
        )
        server.close()
    return rows


def _serve(server: Server, text: Tokens) -> None:
    """A request as an engine serves it: reports are polled, never waited for."""
    request = server.request(text)
    server.allocate(request, len(text))
    server.compute(request, text, server.submit())
    server.manager.commit([(request, len(text))])
    server.manager.request_finish([request])
    server.submit()
    server.collect()


def show(title: str, rows: list[Row]) -> None:
    """Print rows of equal keys."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=140).print(table)


def plot(rows: list[Row], path: Path) -> None:
    """TTFT over prompt length, one line per way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    names = [name for name in rows[0] if name.endswith(" ms") and not name.startswith("allowed")]
    for name, colour in zip(names, ("#b0463c", "#2d6a8e", "#7fb069", "#c9a227"), strict=False):
        axes.plot(
            [row["prompt"] for row in rows], [row[name] for row in rows], "o-", label=name[:-3], color=colour
        )
    axes.set(xlabel="prompt tokens", ylabel="time to first token (ms)", xscale="log", yscale="log")
    axes.set_xticks([row["prompt"] for row in rows], [f"{row['prompt']:,}" for row in rows])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft", description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--part", action="append", choices=["ttft", "decode", "overhead"])
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="a folder on a local disk, for the storage tier"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args(arguments)
    shape, device, parts = SHAPES[flags.shape], flags.device, flags.part or ["ttft", "decode", "overhead"]
    found: dict[str, Any] = {"shape": shape.name, "device": _name(device)}
    with torch.inference_mode():
        if "ttft" in parts:
            found["ttft"] = first_tokens(shape, device, flags.lengths, flags.rounds, flags.storage)
            show("time to first token", found["ttft"])
            if flags.plot:
                plot(found["ttft"], flags.plot)
        if "decode" in parts:
            found["decode"] = decode_beside_swaps(
                shape, device, sequences=flags.sequences, context=flags.context, rounds=flags.rounds
            )
            show("decode beside swaps", [found["decode"]])
        if "overhead" in parts:
            found["overhead"] = overhead_without_reuse(
                shape, device, length=min(flags.lengths), rounds=4 * flags.rounds
            )
            show("prompts that share nothing", found["overhead"])
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))
    return 0


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
