"""What the cache costs prompts that share nothing."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from benchmarks.ttft.common import Row, Tokens, prompt, timed
from benchmarks.ttft.model import Shape
from benchmarks.ttft.server import Server, Spent

_FEWEST_ROUNDS = 9
_WAYS = ("without", "again without", "with")


def overhead_without_reuse(shape: Shape, device: str, *, lengths: list[int], rounds: int) -> list[Row]:
    """Milliseconds to serve prompts that share nothing, with blocks from a plain list and from fdcache, and how many of
    them the engine's thread spends in manager and controller. Longer prompts have fewer rounds.

    Ways take turns within a round, and overhead is the median of the rounds' own: a GPU drifts by more than is measured
    here. ``noise`` is the same between two runs without the cache.
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
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    spent = []
    for seed in range(rounds):
        text = prompt(shape, length, 8_000_000 + seed)
        for turn in range(len(_WAYS)):
            way = _WAYS[(turn + seed) % len(_WAYS)]
            # The plain run overwrites whatever is cached in its blocks, so nothing may be cached by then.
            server.settle()
            server.manager.reset_cache()
            server.synchronize()
            server.spent = Spent()
            if way == "with":
                seconds[way].append(timed(_serve, server, text))
                spent.append(replace(server.spent))
            else:
                seconds[way].append(timed(server.prefill, text, 0, plain))
    server.close()
    return {
        "prompt": length,
        "policy": policy,
        "without ms": round(1e3 * statistics.median(seconds["without"]), 3),
        "with ms": round(1e3 * statistics.median(seconds["with"]), 3),
        "overhead %": _excess(seconds["with"], seconds["without"]),
        "noise %": _excess(seconds["again without"], seconds["without"]),
        "manager ms": round(1e3 * statistics.median(each.manager for each in spent), 3),
        "controller ms": round(1e3 * statistics.median(each.controller for each in spent), 3),
    }


def _excess(seconds: list[float], base: list[float]) -> float:
    """Median of how much longer each round took, in percent."""
    return round(100 * statistics.median(a / b - 1 for a, b in zip(seconds, base, strict=True)), 2)


def _serve(server: Server, text: Tokens) -> None:
    """A request as an engine serves it: reports are polled, never waited for."""
    request = server.request(text)
    server.allocate(request, len(text))
    server.compute(request, text, server.submit())
    server.finish([(request, len(text))])
    server.submit()
    server.collect()
