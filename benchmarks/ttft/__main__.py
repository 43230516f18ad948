"""Measure the time to first token from each tier, and the cost of the cache for decodes and traffic without reuse.

On a GPU: ``python -m benchmarks.ttft --json ttft.json --plot ttft.svg`` (a model of the shape of Llama-3-8B, random
bfloat16 weights, about 40 GB of GPU memory). Without a GPU: ``--shape tiny --device cpu``. Exits 1 if a first
token differs and is not a near tie.
"""

from __future__ import annotations

import argparse
import json
import sys
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report
from benchmarks.ttft.decode import decode_beside_swaps
from benchmarks.ttft.model import LLAMA_3_8B, TINY
from benchmarks.ttft.prefill import first_tokens, overhead_without_reuse
from benchmarks.ttft.recompute_model import load_or_recompute
from benchmarks.ttft.server import Row

SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TINY}


def plot(rows: list[Row], path: Path) -> None:
    """Plot TTFT over prompt length, one line per way."""
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
    """Run the given parts, all by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft", description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--part", action="append", choices=["ttft", "decode", "overhead", "recompute"])
    parser.add_argument(
        "--slowed",
        type=float,
        nargs="+",
        default=[0.3, 1.0, 3.0, 0.0],
        metavar="GB/s",
        help="speeds of storage; 0 for its own",
    )
    parser.add_argument(
        "--limit", type=float, default=4.0, metavar="SECONDS", help="recompute: longest time of one median"
    )
    parser.add_argument(
        "--seconds", type=float, default=inf, help="recompute: begin nothing that would end later"
    )
    parser.add_argument(
        "--storage", type=Path, metavar="DIR", help="a folder on a local disk, for the storage tier"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    flags = parser.parse_args(arguments)
    shape, device, parts = SHAPES[flags.shape], flags.device, flags.part or ["ttft", "decode", "overhead"]
    found: dict[str, Any] = {"shape": shape.name, "device": _name(device)}
    report = Report()
    with torch.inference_mode():
        if "ttft" in parts:
            found["ttft"] = first_tokens(shape, device, flags.lengths, flags.rounds, flags.storage)
            report.table("time to first token", found["ttft"])
            if flags.plot:
                plot(found["ttft"], flags.plot)
        if "decode" in parts:
            found["decode"] = decode_beside_swaps(
                shape, device, sequences=flags.sequences, context=flags.context, rounds=flags.rounds
            )
            title = f"decode of {flags.sequences} sequences of {flags.context} tokens beside swaps"
            report.table(title, found["decode"])
        if "overhead" in parts:
            found["overhead"] = overhead_without_reuse(
                shape, device, lengths=flags.lengths, rounds=4 * flags.rounds
            )
            report.table("prompts that share nothing", found["overhead"])
        if "recompute" in parts:
            if flags.storage is None:
                parser.error("--part recompute needs --storage DIR")
            found["recompute"] = load_or_recompute(
                shape,
                device,
                lengths=flags.lengths,
                gb_per_s=flags.slowed,
                samples=flags.rounds,
                limit=flags.limit,
                storage=flags.storage,
                seconds=flags.seconds,
            )
            report.table("load or recompute, storage slowed", found["recompute"])
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))
    return 1 if any(row["differ"] for row in found.get("ttft", ())) else 0


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
