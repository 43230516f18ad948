"""Time to first token: computed, from the device, from the host, from storage."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.ttft.common import Row, prompt, timed
from benchmarks.ttft.model import Shape
from benchmarks.ttft.server import FirstToken, Server

NEAR_TIE = 2**-4
"""Two logits closer than this may change places: the best of 128,256 lie between 4 and 8, where bfloat16 has steps of
2**-5, and each of the two is rounded."""


def first_tokens(
    shape: Shape, device: str, lengths: list[int], rounds: int, storage: Path | None
) -> list[Row]:
    """TTFT for each prompt length: computed, from the device, from the host, and from storage where there is a folder
    for it.

    Chunks of other shapes round bfloat16 otherwise, so a first token may differ where the two best logits are a near
    tie; "differ" counts those that have no such excuse.

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
        verdicts = []
        for seed in range(rounds + 1):  # the first round warms up
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
    """Whether all ways said the same token: "equal", "near tie" or "differ"."""
    if len({answer.token for answer in said}) == 1:
        return "equal"
    return "near tie" if min(answer.margin for answer in said) < NEAR_TIE else "differ"


def link_bandwidth(device: str, nbytes: int) -> float:
    """GB/s of one large copy from pinned host memory to the device, the best of several."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda").fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return nbytes / min(timed(copy) for _ in range(6)) / 1e9
