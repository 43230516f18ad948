"""Run a part: ``python -m benchmarks.storage [speed|streams|nodes] [FOLDER]``."""

from __future__ import annotations

import sys

from benchmarks.harness import run
from benchmarks.storage import nodes, speed, streams

if __name__ == "__main__":
    sys.exit(run("storage", (speed, streams, nodes)))
