"""One engine in a process of its own: it starts, says so, and measures when it is told to.

    python -m benchmarks.sglang.worker ENGINE SHAPE ATTENTION FOLDER PAGE SERVER

Prints a line of JSON once it has started and its kernels are compiled, and after a line on standard input one with its
figures of each part; the last one ``is_whole``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sglang.engines import (
    HICACHE_FILE,
    NONE,
    SHAPES,
    TIMED,
    Shape,
    arguments,
    model_folder,
    shape_of,
)
from benchmarks.sglang.traffic import beside, converse

REPEATS = 5
OTHERS = 4
ROUNDS = 3
NEW_TOKENS = 8


class Measured:
    """What an engine answers and how fast."""

    def __init__(self, engine: Any, shape: Shape, pause: float) -> None:
        chosen = random.Random(3)
        self._engine = engine
        self._pause = pause
        self.prompts = [
            [chosen.randrange(2, shape.vocabulary) for _ in range(shape.prompt + 8)]
            for _ in range(OTHERS + 3)
        ]
        self.answers: dict[int, list[int]] = {}
        self.wrong: dict[str, int] = {}
        self.ttft_ms: dict[str, list[float]] = {}
        self.cached: dict[str, list[dict[str, int]]] = {}

    def ask(self, name: str, index: int) -> None:
        """Ask for one token, timed, and then for some, which are compared with the first answer to this prompt."""
        prompt = self.prompts[index]
        began = time.perf_counter()
        first = self._generate(prompt, 1)
        self.ttft_ms.setdefault(name, []).append(round((time.perf_counter() - began) * 1e3, 2))
        details = first["meta_info"].get("cached_tokens_details") or {}
        self.cached.setdefault(name, []).append({k: n for k, n in details.items() if isinstance(n, int)})
        answer = list(self._generate(prompt, NEW_TOKENS)["output_ids"])
        expected = self.answers.setdefault(index, answer)
        self.wrong[name] = self.wrong.get(name, 0) + (
            answer != expected or first["output_ids"] != expected[:1]
        )

    def _generate(self, prompt: list[int], count: int) -> Any:
        parameters = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        (result,) = self._engine.generate(input_ids=[prompt], sampling_params=parameters)
        return result

    def warm_up(self) -> None:
        """Have kernels compiled and memory touched, which takes a first engine a minute."""
        for warm in (OTHERS + 1, OTHERS + 2):
            self.ask("warm", warm)
        self.flush()
        self.ask("warm", OTHERS + 2)
        self.flush()

    def flush(self) -> None:
        """Let stores end, then empty the pools of SGLang."""
        time.sleep(self._pause)
        deadline = time.monotonic() + 20
        while not self._engine.flush_cache().success and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)


def measure(engine: Any, measured: Measured, name: str, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield the figures of an engine, part by part."""
    for index in range(1 + OTHERS):
        measured.ask("cold", index)
    for _ in range(REPEATS):
        measured.ask("device hit", OTHERS)
    for _ in range(REPEATS):
        measured.flush()
        measured.ask("after flush", 0)
    for step in ("again", *["after eviction"] * ROUNDS):
        for index in range(1 + OTHERS):  # each pushes others off the device
            measured.ask(step, index)
    yield {
        "ttft_ms": measured.ttft_ms,
        "cached": measured.cached,
        "wrong": {step: n for step, n in measured.wrong.items() if n},
        "answers": [measured.answers[index] for index in sorted(measured.answers)],
    }
    yield {"conversations": converse(engine, shape)}
    yield {"beside": beside(engine, shape, measured.prompts[: 1 + OTHERS if name != NONE else 1])}


def main(name: str, shape: str, attention: str, folder: Path, page: int, server: str) -> None:
    """Run one engine."""
    if name == HICACHE_FILE:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "hicache-files")
    calls = folder / "calls.json"
    if name == TIMED:
        os.environ["FDCACHE_BENCHMARK_CALLS"] = str(calls)
    if attention == "torch_native":
        from tests.sglang.engine import leave_out_models

        leave_out_models("llama")
    from sglang.srt.entrypoints.engine import Engine

    began = time.perf_counter()
    model = model_folder(shape, folder)
    chosen = arguments(name, shape_of(shape, page), model, attention=attention, server=server)
    engine = Engine(**chosen)
    try:
        measured = Measured(engine, SHAPES[shape], 0.3 if name == NONE else 0.8)
        measured.warm_up()
        _tell({"engine": name, "start_s": round(time.perf_counter() - began, 1)})
        if sys.stdin.readline():
            for figures in measure(engine, measured, name, SHAPES[shape]):
                _tell({"engine": name, **figures})
            if name == TIMED:
                engine.flush_cache()
                _tell({"engine": name, "calls": json.loads(calls.read_text())})
            _tell({"engine": name, "is_whole": True})
    finally:
        engine.shutdown()


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{json.dumps(what)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
