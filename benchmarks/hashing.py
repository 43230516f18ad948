"""Measure block hashing by implementation, block size and length: nanoseconds for each block."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT, Report, Row, compiled, least_us, run
from fdcache import _core
from fdcache.hashing import TokenBlocks, hash_blocks, root_hash

SOURCES = ("backends", "block_hash", "sha256")
REPEATS = 40
DECODE_STEPS = 20_000


def append_ns(block_size: int, root: bytes) -> float:
    """Return the nanoseconds to append one generated token, hashing included."""

    def append_all() -> None:
        append = TokenBlocks(block_size, root).append
        for token in range(DECODE_STEPS):
            append(token)

    return 1000 * least_us(append_all, REPEATS) / DECODE_STEPS


def implementations() -> str:
    """Return nanoseconds for each block by implementation, without Python, as the native program prints them."""
    sources = (ROOT / "csrc/hash" / f"{name}.cpp" for name in SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder), "hashing", sources)
        return subprocess.run([program], check=True, capture_output=True, text=True).stdout


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def measure(_: argparse.Namespace, report: Report) -> None:
    root = root_hash(bytes(32))
    report.note(f"NumPy {np.__version__}, best of {REPEATS}")
    report.note(f"implementations: {', '.join(_core.hash_backends())}; the first is in use")
    if shutil.which("g++"):
        report.note(implementations())

    def rows() -> Iterator[Row]:
        for num_tokens in (190 * 64, 131_072):
            tokens = np.random.default_rng(0).integers(0, 150_000, num_tokens, dtype=np.int32)
            for block_size in (16, 64):
                for name, form in (("int32", tokens), ("list", tokens.tolist())):
                    spent = least_us(partial(hash_blocks, form, block_size, parent=root), REPEATS)
                    yield {"tokens": num_tokens, "block": block_size, "form": name, "us": spent}

    report.table("Through Python, conversion and result array included", rows())
    report.table("Append of one token", ({"block": size, "ns": append_ns(size, root)} for size in (16, 64)))


if __name__ == "__main__":
    sys.exit(run("hashing", (sys.modules[__name__],)))
