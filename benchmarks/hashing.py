"""Measure block hashing: microseconds for a prompt, beside a hashlib loop in the same run.

Run it with ``python -m benchmarks.hashing``.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import machine
from fdcache import _core
from fdcache.hashing import TokenBlocks, hash_blocks, root_hash

NUM_TOKENS = 131_072
REPEATS = 20
DECODE_STEPS = 20_000


def best_us(call: Callable[[], object]) -> float:
    """Return the shortest time of one call in microseconds."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def hashlib_loop(tokens: NDArray[np.int32], block_size: int, parent: bytes) -> bytes:
    """Compute the same chain with one hashlib call per block."""
    data = tokens.tobytes()
    trailer = block_size.to_bytes(4, "little") + b"\x01"
    for start in range(0, len(data), 4 * block_size):
        parent = hashlib.sha256(data[start : start + 4 * block_size] + parent + trailer).digest()
    return parent


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


def main() -> None:
    tokens = np.random.default_rng(0).integers(0, 150_000, NUM_TOKENS, dtype=np.int32)
    as_list = tokens.tolist()
    root = root_hash(bytes(32))
    none = _core.ExtraKeys(None, [])
    backends = ", ".join(_core.sha_backends())
    print(f"{machine()}, NumPy {np.__version__}; SHA-256: {backends}, the first is in use")
    print(f"{NUM_TOKENS} tokens, best of {REPEATS}")
    for block_size in (16, 64):
        last = hash_blocks(tokens, block_size, parent=root)[-1].tobytes()
        if last != hashlib_loop(tokens, block_size, root):
            sys.exit("hash_blocks and hashlib disagree")
        reference = best_us(partial(hashlib_loop, tokens, block_size, root))
        print(f"block {block_size}: hashlib loop {reference:.0f} us")
        for name, form in (("int32", tokens), ("list", as_list)):
            spent = best_us(partial(hash_blocks, form, block_size, parent=root))
            print(f"  {name:5} {spent:6.0f} us, hashlib loop / this = {reference / spent:.1f}")
        for backend in _core.sha_backends():
            spent = best_us(partial(_core.hash_blocks, tokens, block_size, root, 0, none, 0, backend))
            print(f"  int32 with {backend:8} {spent:6.0f} us")
        print(f"  append of one token {append_ns(block_size, root):.0f} ns")


if __name__ == "__main__":
    main()
