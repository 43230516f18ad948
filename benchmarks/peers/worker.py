"""A process that measures one peer: orders come on standard input, answers go to standard output, a line of JSON each.

``["memory", {...}]`` and ``["begin", scenario, {...}]`` prepare, ``["advance", count]`` does a slice of work, and
``["end"]`` checks the manager and drops it. The process ends with its input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

from benchmarks.peers.scenarios import SCENARIOS, Scenario, measure_memory


class Worker:
    """Holds the scenario that is in progress."""

    def __init__(self, adapter: str, options: dict[str, Any]) -> None:
        module = importlib.import_module(f"benchmarks.peers.adapters.{adapter}")
        self._make = partial(module.make, **options)
        self._scenario: Scenario | None = None

    def answer(self, order: str, *arguments: Any) -> object:
        """Carry out an order."""
        orders: dict[str, Callable[..., object]] = {
            "memory": self._memory,
            "begin": self._begin,
            "advance": self._advance,
            "end": self._end,
        }
        return orders[order](*arguments)

    def _memory(self, settings: dict[str, Any]) -> object:
        return asdict(measure_memory(self._make, **settings))

    def _begin(self, scenario: str, settings: dict[str, Any]) -> None:
        self._scenario = SCENARIOS[scenario](self._make, **settings)
        # Engines do the same once they have started, so that a collection does not visit every block.
        gc.collect()
        gc.freeze()

    def _advance(self, count: int) -> object:
        assert self._scenario is not None
        return asdict(self._scenario.advance(count))

    def _end(self) -> None:
        assert self._scenario is not None
        self._scenario.adapter.check()
        self._scenario = None
        gc.unfreeze()
        gc.collect()


def main() -> None:
    adapter, options = sys.argv[1:]
    # What an imported package prints goes to the log, so that it cannot be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(adapter, json.loads(options))
    _write(answers, "ready")
    for line in sys.stdin:
        _write(answers, worker.answer(*json.loads(line)))


def _write(answers: TextIO, answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
