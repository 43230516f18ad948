"""One engine in a process of its own: it starts, says so, and measures when it is told to.

    python -m benchmarks.sglang.worker ENGINE SHAPE ATTENTION FOLDER

Prints a line of JSON once it has started, and one with its figures after a line on standard input.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sglang.engines import HICACHE_FILE, NONE, SHAPES, arguments, model_folder

REPEATS = 5
OTHERS = 4


class Measured:
    """What an engine answers and how fast."""

    def __init__(self, engine: Any, new_tokens: int) -> None:
        self._engine = engine
        self._new_tokens = new_tokens
        self.answers: dict[str, list[list[int]]] = {}
        self.ttft_ms: dict[str, list[float]] = {}
        self.cached: dict[str, list[dict[str, int]]] = {}

    def ask(self, name: str, prompt: list[int]) -> None:
        """Ask for one token, timed, and then for some."""
        began = time.perf_counter()
        first = self._generate(prompt, 1)
        self.ttft_ms.setdefault(name, []).append(round((time.perf_counter() - began) * 1e3, 2))
        details = first["meta_info"].get("cached_tokens_details") or {}
        self.cached.setdefault(name, []).append({k: n for k, n in details.items() if isinstance(n, int)})
        self.answers.setdefault(name, []).append(list(self._generate(prompt, self._new_tokens)["output_ids"]))

    def _generate(self, prompt: list[int], count: int) -> Any:
        parameters = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        (result,) = self._engine.generate(input_ids=[prompt], sampling_params=parameters)
        return result

    def flush(self, pause: float) -> None:
        """Let stores end, then empty the pools of SGLang."""
        time.sleep(pause)
        deadline = time.monotonic() + 20
        while not self._engine.flush_cache().success and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.1)


def measure(engine: Any, name: str, shape_name: str) -> dict[str, Any]:
    """Return the figures of an engine."""
    shape = SHAPES[shape_name]
    chosen = random.Random(3)
    prompts = [
        [chosen.randrange(2, shape.vocabulary) for _ in range(shape.prompt + 8)] for _ in range(OTHERS + 3)
    ]
    measured = Measured(engine, 8)
    pause = 0.5 if name == NONE else 1.0
    for warm in prompts[-2:]:  # kernels are compiled, memory is touched
        measured.ask("warm", warm)
    measured.flush(pause)
    measured.ask("warm", prompts[-1])
    measured.flush(pause)
    asked = prompts[0]
    for prompt in prompts[1 : 1 + OTHERS]:
        measured.ask("cold", prompt)
    measured.flush(pause)
    measured.ask("first", asked)
    measured.ask("device hit", asked)
    for _ in range(REPEATS):
        measured.flush(pause)
        measured.ask("after flush", asked)
    for _ in range(2):
        for prompt in prompts[1 : 1 + OTHERS]:  # they push it off the device
            measured.ask("others", prompt)
        measured.ask("after eviction", asked)
    return {"ttft_ms": measured.ttft_ms, "cached": measured.cached, "answers": measured.answers}


def main(name: str, shape: str, attention: str, folder: Path) -> None:
    """Run one engine."""
    if name == HICACHE_FILE:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "hicache-files")
    if attention == "torch_native":
        from tests.sglang.engine import leave_out_models

        leave_out_models("llama")
    from sglang.srt.entrypoints.engine import Engine

    began = time.perf_counter()
    engine = Engine(
        **arguments(name, SHAPES[shape], model_folder(shape, folder), folder, attention=attention)
    )
    try:
        _tell({"engine": name, "start_s": round(time.perf_counter() - began, 1)})
        if sys.stdin.readline():
            _tell({"engine": name, **measure(engine, name, shape)})
    finally:
        engine.shutdown()


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{json.dumps(what)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
