"""Measure the nanoseconds a block of the eviction policies on a trace, by themselves and above another tier.

Builds ``benchmarks/native/trace_blocks.cpp`` with the sources of the tier, without Python. Each request is matched,
reserved, committed and released before the next one, in blocks of 64 tokens, at the time of the trace. The tier below
gets the blocks that were used twice; it is one of the same process, or one that a service shares as a presence table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from array import array
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.tier_blocks import built
from fdcache.replay.trace import read_trace

PHASES = ("match", "reserve", "commit", "release", "all")


def write_words(trace: Path, target: Path) -> None:
    """Write the requests of a trace as the program reads them."""
    words = array("I")
    for item in read_trace(trace):
        ids = item.streams.tolist()
        prompt = int(item.lengths.sum())
        words.extend([int(item.timestamp_ms), prompt, item.output_length, len(ids), *ids])
    target.write_bytes(words.tobytes())


def measured(trace: Path, slots: int, below: int, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of each policy, which ran in turns."""
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "words"
        write_words(trace, words)
        program = built(Path(folder), "trace_blocks")
        done = subprocess.run(
            [program, words, str(slots), str(below), str(rounds)], capture_output=True, text=True, check=True
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a Mooncake JSONL file")
    parser.add_argument("--slots", type=int, default=160_000, help="of the tier (default 160000)")
    parser.add_argument("--below", type=int, default=640_000, help="of the tier below (default 640000)")
    parser.add_argument("--rounds", type=int, default=6, help="the least of this many (default 6)")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args()
    rows = measured(options.trace, options.slots, options.below, options.rounds)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    print(f"{'policy':>8} {'above':>8} " + " ".join(f"{phase:>8}" for phase in PHASES) + f" {'found':>6}")
    for row in rows:
        figures = " ".join(f"{row[phase]:>8.1f}" for phase in PHASES)
        print(f"{row['policy']:>8} {row['above']:>8} {figures} {row['found']:>6.3f}")


if __name__ == "__main__":
    main()
