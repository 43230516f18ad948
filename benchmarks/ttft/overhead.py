"""What the cache costs prompts that share nothing."""

from __future__ import annotations

import statistics

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
    seconds: tuple[list[float], list[float]] = ([], [])
    spent = []
    for seed in range(rounds):
        text = prompt(shape, length, 8_000_000 + seed)
        server.settle()
        # The plain run overwrites whatever is cached in its blocks, so nothing may be cached by then.
        server.manager.reset_cache()
        server.synchronize()
        seconds[0].append(timed(server.prefill, text, 0, plain))
        server.spent = Spent()
        seconds[1].append(timed(_serve, server, text))
        spent.append(server.spent)
    without, with_cache = (statistics.median(each) for each in seconds)
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
