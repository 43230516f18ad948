"""Run a part: ``python -m benchmarks.groups [prompts|positions|evictions|all]``."""

from __future__ import annotations

import sys

from benchmarks.groups import evictions, positions, prompts
from benchmarks.harness import run

if __name__ == "__main__":
    sys.exit(run("groups", (prompts, positions, evictions)))
