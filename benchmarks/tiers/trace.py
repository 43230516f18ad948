"""Measure the nanoseconds a block of the eviction policies on a trace, by themselves and above another tier.

Builds ``benchmarks/native/trace_blocks.cpp`` with the sources of the tier, without Python. Each request is matched,
reserved, committed and released before the next one, in blocks of 64 tokens, at the time of the trace. The tier below
gets the blocks that were used twice; it is one of the same process, or one that a service shares as a presence table.
"""

from __future__ import annotations

import argparse
import tempfile
from array import array
from pathlib import Path

from benchmarks.harness import Report, compiled, find_trace, rows_of, tier_sources
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, nargs="?", default=find_trace(), help="a Mooncake JSONL file")
    parser.add_argument("--slots", type=int, default=160_000, help="of the tier (default 160000)")
    parser.add_argument("--below", type=int, default=640_000, help="of the tier below (default 640000)")
    parser.add_argument("--rounds", type=int, default=6, help="the least of this many (default 6)")


def measure(options: argparse.Namespace, report: Report) -> None:
    if options.trace is None:
        report.note("trace: needs a TRACE")
        return
    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "words"
        write_words(options.trace, words)
        program = compiled(Path(folder), "trace_blocks", tier_sources())
        rows = rows_of(program, words, options.slots, options.below, options.rounds)
    names = ("policy", "above", *PHASES, "found")
    report.table("Nanoseconds a block on a trace", ({name: row[name] for name in names} for row in rows))
