"""Storage below vLLM's OffloadingConnector: chunks stored and read a second by its ``fs`` tier and by ``FdcacheTier``.

    python -m benchmarks.vllm.tiers [FOLDER] [--chunk-kib 512] [--gib 1] [--rounds 5]

Run it with the Python of an environment of ``tests.vllm.setup``, with ``TEST_PACKAGES`` set to the folder of fdcache's
packages. Both tiers are made by vLLM's own factory below its own tiering manager, and run in turns on the same folder.
Stores end when vLLM is told so, on both sides without a sync; reads follow after the page cache has dropped the files.
Every byte that is read is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import in_turns, machine
from tests.vllm.offloading import Offloading, keys_of

TIERS = ("fs", "FdcacheTier")
_PROMPT = 64


def configuration(tier: str, folder: Path, size: int) -> dict[str, Any]:
    """Return the configuration of a tier in ``folder`` with room for ``size`` bytes."""
    if tier == "fs":
        return {"type": "fs", "root_dir": str(folder)}
    return {
        "type": tier,
        "module_path": "fdcache.integrations.vllm.tier",
        "FDCACHE_STORAGE_DIR": str(folder),
        "FDCACHE_STORAGE_SIZE": str(2 * size),
        "FDCACHE_STORAGE_FSYNC": "never",
    }


def drop_pages(folder: Path) -> None:
    """Write back the files below a folder, and drop them from the page cache."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@contextlib.contextmanager
def offloading(tier: str, folder: Path, chunk: int, prompts: int) -> Iterator[Offloading]:
    """Run vLLM's manager with one tier and host memory for four prompts."""
    size = prompts * _PROMPT * chunk
    made = Offloading(
        folder, chunk_bytes=chunk, chunks=4 * _PROMPT, tiers=[configuration(tier, folder, size)]
    )
    try:
        yield made
    finally:
        made.close()


def measure(tier: str, parent: Path, chunk: int, prompts: int) -> tuple[float, float]:
    """Return GiB stored and read a second."""
    folder = Path(tempfile.mkdtemp(prefix=f"{tier}-", dir=parent))
    gib = prompts * _PROMPT * chunk / 2**30
    try:
        with offloading(tier, folder, chunk, prompts) as vllm:
            stored = 0.0
            for prompt in range(prompts):
                vllm.store(keys_of(prompt, _PROMPT))
                vllm.settle()
                stored += time.perf_counter() - vllm.filled
            drop_pages(folder)
            read = 0.0
            for prompt in range(prompts - 4):  # the last are in host memory
                context = vllm.request()
                began = time.perf_counter()
                found = vllm.match(keys_of(prompt, _PROMPT), context)
                read += time.perf_counter() - began
                assert found == _PROMPT, f"{found} of {_PROMPT} chunks"
                vllm.check(keys_of(prompt, _PROMPT), context)
            return gib / stored, gib * (prompts - 4) / prompts / read
    finally:
        shutil.rmtree(folder)


def main() -> int:
    """Print a table of both tiers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--chunk-kib", type=int, default=512, help="size of a chunk; default: %(default)s")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes to store; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    options = parser.parse_args()
    chunk = options.chunk_kib << 10
    prompts = max(int(options.gib * 2**30 / (chunk * _PROMPT)), 6)
    print(f"{machine()}; {prompts * _PROMPT} chunks of {options.chunk_kib} KiB in {options.folder}")
    reads: dict[str, list[float]] = {tier: [] for tier in TIERS}

    def run(tier: str) -> float:
        stored, read = measure(tier, options.folder, chunk, prompts)
        reads[tier].append(read)
        return stored

    stores = in_turns({tier: lambda tier=tier: run(tier) for tier in TIERS}, options.rounds)  # type: ignore[misc]
    for name, found in (("stored", stores), ("read", reads)):
        medians = {tier: float(np.median(found[tier])) for tier in TIERS}
        figures = ", ".join(f"{tier} {medians[tier]:.2f} GiB/s" for tier in TIERS)
        print(f"{name}: {figures}; ratio {medians[TIERS[1]] / medians[TIERS[0]]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
