"""Run a part: ``python -m benchmarks.steps [waiting|requests|plans|hints|spans|worker|all]``."""

from __future__ import annotations

import sys

from benchmarks.harness import run
from benchmarks.steps import hints, plans, requests, spans, waiting, worker

if __name__ == "__main__":
    sys.exit(run("steps", (waiting, requests, plans, hints, spans, worker)))
