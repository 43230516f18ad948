"""Run a part: ``python -m benchmarks.steps [waiting|requests|plans|worker|all]``."""

from __future__ import annotations

import sys

from benchmarks.harness import run
from benchmarks.steps import plans, requests, waiting, worker

if __name__ == "__main__":
    sys.exit(run("steps", (waiting, requests, plans, worker)))
