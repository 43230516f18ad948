"""Load or recompute with the Paddle engine of the examples: ``python -m benchmarks.ttft.recompute_paddle``.

It computes on the CPU, where a small model needs few bytes for a token: storage is slowed until reading a prompt takes
the given shares of the time that computing it takes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.ttft.recompute import PROMPTS, Row, ThrottledStorage, compare
from examples.paddle_engine.config import EngineConfig, ModelConfig
from examples.paddle_engine.engine import Engine
from examples.paddle_engine.kv_cache import FdcacheBlocks, FreshBlocks, Prompt
from examples.paddle_engine.worker import Worker
from fdcache.storage.connector import ConnectorContext, PlacedStorage
from fdcache.storage.factory import open_storage
from fdcache.tiers.host import host_block_bytes

BLOCK = 16


class PaddleEngine:
    """The engine of the examples with one rank, and storage that can be slowed down."""

    def __init__(self, model: ModelConfig, mode: str, length: int, folder: Path) -> None:
        layout, blocks = model.layout(BLOCK, 1), -(-(length + 1) // BLOCK)
        cache: dict[str, object] = {
            "FDCACHE_BLOCK_SIZE": BLOCK,
            "FDCACHE_DEVICE_BLOCKS": blocks + 2,
            "FDCACHE_HOST_MEMORY": (2 * blocks + 8) * host_block_bytes(layout),
            "FDCACHE_LOAD_OR_RECOMPUTE": mode,
        }
        stored = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": folder}
        limits = {"grid": 0, "step_tokens": length + 8}
        config = EngineConfig.load(model, cache | stored, **limits)
        self._cache = FdcacheBlocks(config)
        self._worker = Worker(model, EngineConfig.load(model, cache, **limits), self._cache.host_cache)
        context = ConnectorContext(layout, 0, config.settings.storage_tier, config.settings.connector_options)
        storage = open_storage(context)
        assert isinstance(storage, PlacedStorage)
        self.storage = ThrottledStorage(storage)
        assert self._worker.controller is not None
        scan = self._worker.controller.initialize_storage(self.storage)
        assert scan is not None
        self._cache.restore([scan])
        self._engine = Engine(config, self._cache, self._worker)
        self._plain = Engine(config, FreshBlocks(config), self._worker)
        self._served = 0

    def first_token(self, text: list[int], *, cached: bool) -> float:
        """Return the seconds from arrival to first token; then wait for all copies."""
        if not cached:
            self._cache.manager.sleep()  # the plain engine overwrites the device's blocks
            self._cache.manager.wakeup()
        self._served += 1
        engine = self._engine if cached else self._plain
        start = time.perf_counter()
        task = engine.submit(Prompt(str(self._served), text, 1))
        engine.run()
        seconds = (task.first_token or time.perf_counter()) - start
        while self._is_busy():
            self._engine.step()
        return seconds

    def _is_busy(self) -> bool:
        stats = self._cache.manager.get_stats()
        return bool(stats.plans_in_flight or stats.queued_backups or stats.queued_stores)

    def close(self) -> None:
        """Release everything."""
        self._worker.shutdown()
        self._cache.close()


def measure(model: ModelConfig, lengths: list[int], shares: list[float], rounds: int) -> list[Row]:
    """Return a row for each length and each share of the computing time that a read takes."""
    block_bytes = model.layout(BLOCK, 1).record_bytes

    def texts(length: int) -> list[list[int]]:
        numbers = np.random.default_rng(length)
        return [numbers.integers(0, model.vocab, length).tolist() for _ in range(PROMPTS)]

    def speeds(length: int, seconds: float) -> list[float]:
        return [(length - 1) // BLOCK * block_bytes / (share * seconds) for share in shares]

    with tempfile.TemporaryDirectory() as folder:

        def make(mode: str, length: int) -> PaddleEngine:
            path = Path(folder, f"{mode}-{length}")
            path.mkdir()
            return PaddleEngine(model, mode, length, path)

        return compare(make, texts, lengths=lengths, speeds=speeds, rounds=rounds)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ttft.recompute_paddle", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.5, 2.0, 5.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(arguments)
    model = ModelConfig(max_positions=max(flags.lengths) + BLOCK)
    rows = measure(model, flags.lengths, flags.shares, flags.rounds)
    names = list(rows[0])
    print("  ".join(f"{name:>14}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>14}" for name in names))
    if flags.json:
        flags.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
