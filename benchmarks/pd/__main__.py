"""Run a part: ``python -m benchmarks.pd [processes|gpu]``."""

from __future__ import annotations

import os
import sys

from benchmarks.harness import run
from benchmarks.pd import gpu, processes

if __name__ == "__main__":
    status = run("pd", (processes, gpu))
    sys.stdout.flush()
    os._exit(status)  # NIXL 1.5.1 brings a libnl that ends a process with a segmentation fault
