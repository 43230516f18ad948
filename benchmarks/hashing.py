"""Measure block hashing by implementation, block size and length: nanoseconds for each block.

Run it with ``python -m benchmarks.hashing``.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from fdcache import _core
from fdcache.hashing import TokenBlocks, hash_blocks, root_hash

ROOT = Path(__file__).parent.parent
SOURCES = ("backends", "block_hash", "sha256")
REPEATS = 40
DECODE_STEPS = 20_000


def best_us(call: Callable[[], object]) -> float:
    """Return the shortest time of one call in microseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def append_ns(block_size: int, root: bytes) -> float:
    """Return the nanoseconds to append one generated token, hashing included."""
    times = []
    for _ in range(REPEATS):
        append = TokenBlocks(block_size, root).append
        start = time.perf_counter()
        for token in range(DECODE_STEPS):
            append(token)
        times.append(time.perf_counter() - start)
    return min(times) / DECODE_STEPS * 1e9


def print_implementations() -> None:
    """Print nanoseconds for each block by implementation, without Python; needs g++."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "hashing"
        sources = [ROOT / "benchmarks/hashing.cpp", *(ROOT / "csrc/hash" / f"{name}.cpp" for name in SOURCES)]
        flags = ["-O3", "-DNDEBUG", "-std=c++20", f"-I{ROOT / 'csrc'}"]
        subprocess.run(["g++", *flags, *sources, "-o", program], check=True)
        subprocess.run([program], check=True)


def main() -> None:
    root = root_hash(bytes(32))
    print(f"{machine()}, NumPy {np.__version__}, best of {REPEATS}")
    print(f"implementations: {', '.join(_core.hash_backends())}; the first is in use", flush=True)
    if shutil.which("g++"):
        print_implementations()
    print("\nthrough Python, conversion and result array included; us")
    for num_tokens in (190 * 64, 131_072):
        tokens = np.random.default_rng(0).integers(0, 150_000, num_tokens, dtype=np.int32)
        for block_size in (16, 64):
            for name, form in (("int32", tokens), ("list", tokens.tolist())):
                spent = best_us(partial(hash_blocks, form, block_size, parent=root))
                print(f"{num_tokens:7} tokens, block {block_size}, {name:5} {spent:7.1f}")
    for block_size in (16, 64):
        print(f"append of one token, block {block_size}: {append_ns(block_size, root):.0f} ns")


if __name__ == "__main__":
    main()
