"""Random actions of the engine of ``offload_model``."""

from __future__ import annotations

from tests.property.offload_model import Engine

ACTIONS = ("arrive", "arrive", "step", "step", "step", "report", "report", "abort", "reset", "fail", "open")


def play(engine: Engine, steps: int, *, accidents: bool = True) -> None:
    for _ in range(steps):
        action = engine.random.choice(ACTIONS)
        if action == "arrive" and len(engine.waiting) < 4:
            depth = engine.random.randint(1, 5)
            engine.arrive([engine.random.randint(1, 2) for _ in range(depth)])
        elif action == "step":
            engine.offload.now += engine.random.choice([0.0, 0.5])
            engine.step()
        elif action == "report":
            engine.report()
        elif action == "open":
            engine.open()
        elif accidents and action == "abort":
            engine.abort()
        elif accidents and action == "reset" and engine.random.random() < 0.1:
            engine.reset()
        elif accidents and action == "fail":
            engine.failures = engine.random.choice([0.0, 0.0, 0.3])
        engine.manager.check_integrity()
