"""Load or recompute with the model of this benchmark: TTFT for always, never and auto, storage slowed to given GB/s."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ttft.model import Shape
from benchmarks.ttft.recompute import PROMPTS, Row, ThrottledStorage, compare
from benchmarks.ttft.server import Server, Tokens, prompt


class ModelEngine:
    """A server whose tiers above storage hold fewer prompts than there are."""

    def __init__(self, shape: Shape, device: str, mode: str, length: int, folder: Path) -> None:
        blocks = -(-length // shape.block_size)
        self._server = Server(
            shape,
            device,
            device_blocks=blocks + 2,
            host_blocks=2 * blocks + 8,
            max_positions=length + shape.block_size,
            storage=folder,
            load_or_recompute=mode,
        )

    @property
    def storage(self) -> ThrottledStorage:
        """The storage, which can be slowed down."""
        return self._server.storage

    def first_token(self, text: Tokens, *, cached: bool) -> float:
        """Return the seconds from arrival to first token; then wait for all copies."""
        return self._server.first_token(text, use_cache=cached)[0]

    def close(self) -> None:
        """Release everything."""
        self._server.close()


def load_or_recompute(
    shape: Shape, device: str, *, lengths: list[int], gb_per_s: list[float], rounds: int, storage: Path
) -> list[Row]:
    """Return a row for each length and speed of storage."""

    def make(mode: str, length: int) -> ModelEngine:
        folder = storage / f"{mode}-{length}"
        folder.mkdir(parents=True, exist_ok=True)
        return ModelEngine(shape, device, mode, length, folder)

    return compare(
        make,
        lambda length: [prompt(shape, length, 77 * length + seed) for seed in range(PROMPTS)],
        lengths=lengths,
        speeds=lambda length, seconds: [1e9 * each for each in gb_per_s],
        rounds=rounds,
    )
