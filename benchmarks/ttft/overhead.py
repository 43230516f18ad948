"""What the cache costs prompts that share nothing."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from benchmarks.ttft.common import Row, Tokens, prompt, timed
from benchmarks.ttft.model import Shape
from benchmarks.ttft.server import Server, Spent

_FEWEST_ROUNDS = 3


def overhead_without_reuse(shape: Shape, device: str, *, lengths: list[int], rounds: int) -> list[Row]:
    """Milliseconds to serve prompts that share nothing, with blocks from a plain list and from fdcache, and how many of
    them the engine's thread spends in manager and controller. Longer prompts have fewer rounds.
    """
    return [
        _measure(shape, device, policy, length, max(rounds * min(lengths) // length, _FEWEST_ROUNDS))
        for length in lengths
        for policy in ("write_through_selective", "write_through")
    ]


def _measure(shape: Shape, device: str, policy: str, length: int, rounds: int) -> Row:
    blocks = -(-length // shape.block_size)
    server = Server(
        shape,
        device,
        device_blocks=2 * blocks,
        host_blocks=2 * blocks,
        max_positions=length + 1,
        write_policy=policy,
    )
    plain = np.arange(blocks, dtype=np.int32)
    server.first_token(prompt(shape, length, 1))
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    spent = []
    for seed in range(rounds):
        text = prompt(shape, length, 8_000_000 + seed)
        for way in list(seconds)[:: 1 if seed % 2 else -1]:
            # The plain run overwrites whatever is cached in its blocks, so nothing may be cached by then.
            server.settle()
            server.manager.reset_cache()
            server.synchronize()
            server.spent = Spent()
            if way == "without":
                seconds[way].append(timed(server.prefill, text, 0, plain))
            else:
                seconds[way].append(timed(_serve, server, text))
                spent.append(replace(server.spent))
    without, with_cache = (statistics.median(each) for each in seconds.values())
    server.close()
    return {
        "prompt": length,
        "policy": policy,
        "without ms": round(1e3 * without, 3),
        "with ms": round(1e3 * with_cache, 3),
        "overhead %": round(100 * (with_cache / without - 1), 2),
        "manager ms": round(1e3 * statistics.median(each.manager for each in spent), 3),
        "controller ms": round(1e3 * statistics.median(each.controller for each in spent), 3),
    }


def _serve(server: Server, text: Tokens) -> None:
    """A request as an engine serves it: reports are polled, never waited for."""
    request = server.request(text)
    server.allocate(request, len(text))
    server.compute(request, text, server.submit())
    server.finish([(request, len(text))])
    server.submit()
    server.collect()
