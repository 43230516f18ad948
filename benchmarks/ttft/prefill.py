"""Prefills: time to first token from each tier, and the overhead for prompts without reuse."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.ttft.model import Shape
from benchmarks.ttft.server import FirstToken, Row, Server, Spent, Tokens, prompt, timed

NEAR_TIE = 2**-4
"""Two logits closer than this may swap by rounding: the best of 128,256 lie between 4 and 8, where bfloat16 has steps
of 2**-5, and both are rounded."""


def first_tokens(
    shape: Shape, device: str, lengths: list[int], rounds: int, storage: Path | None
) -> list[Row]:
    """Measure TTFT for each prompt length: computed, from device, host, and storage if a directory is given.

    Chunks of different shapes round bfloat16 differently, so a first token may differ at a near tie of the two best
    logits; "differ" counts the other differences.

    The goal for the host is at most 1.15 times the bytes over the link's bandwidth, plus the step that a device hit
    needs too.
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
        verdicts = []
        for seed in range(rounds + 1):  # the first round is a warm-up
            server.manager.reset_cache()
            text = prompt(shape, length, 1000 * length + seed)
            said = []
            for tier, measured in seconds.items():
                if tier == "host":
                    server.forget_device()
                if tier == "storage":
                    server.forget_all_but_storage()
                elapsed, answer = server.first_token(text)
                said.append(answer)
                if seed:
                    measured.append(elapsed)
            verdicts.append(judge(said))
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
                "prompts": len(verdicts),
                "near ties": verdicts.count("near tie"),
                "differ": verdicts.count("differ"),
            }
        )
    server.close()
    return rows


def judge(said: Sequence[FirstToken]) -> str:
    """Compare the tokens of all ways: "equal", "near tie" or "differ"."""
    if len({answer.token for answer in said}) == 1:
        return "equal"
    return "near tie" if min(answer.margin for answer in said) < NEAR_TIE else "differ"


def link_bandwidth(device: str, nbytes: int) -> float:
    """Return the GB/s of one large copy from pinned host memory to the device, the best of several."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda").fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return nbytes / min(timed(copy) for _ in range(6)) / 1e9


_FEWEST_ROUNDS = 9
_WAYS = ("without", "again without", "with")


def overhead_without_reuse(shape: Shape, device: str, *, lengths: list[int], rounds: int) -> list[Row]:
    """Measure the milliseconds to serve prompts without reuse, with blocks from a plain list and from fdcache.

    Also the parts that the engine's thread spends in manager, controller and model. Longer prompts get fewer rounds.
    The ways take turns within a round and the overhead is the median over rounds, because a GPU drifts by more than
    the overhead. ``noise`` is the same between two runs without the cache.
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
            # The run without cache overwrites blocks, so nothing may be cached in them.
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
        "computing ms": round(1e3 * statistics.median(each.computing for each in spent), 3),
    }


def _excess(seconds: list[float], base: list[float]) -> float:
    """Return the median excess of the rounds in percent."""
    return round(100 * statistics.median(a / b - 1 for a, b in zip(seconds, base, strict=True)), 2)


def _serve(server: Server, text: Tokens) -> None:
    """Serve a request as an engine does: reports are polled, never waited for."""
    request = server.request(text)
    server.allocate(request, len(text))
    counters = server.submit()
    server.spent.computing += timed(server.compute, request, text, counters)
    server.finish([(request, len(text))])
    server.submit()
    server.collect()
