"""Run the tests of the vLLM connector with each version of vLLM that is installed.

    python -m tests.vllm [--version VERSION] [arguments of pytest]

``python -m tests.vllm.setup`` installs them. A version that is not there is skipped with a line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.vllm.environments import PACKAGES, VERSIONS, default_home, interpreter, is_complete

ROOT = Path(__file__).parents[2]
_RUNNERS = {
    "0": [*(f"tests/unit/test_vllm_{name}.py" for name in ("events", "hooks", "load_order")), "tests/vllm"],
    "1": [
        f"tests/vllm/test_{name}.py"
        for name in (
            "engine",
            "features",
            "hybrid",
            "hybrid_tiers",
            "layers_ahead",
            "pooling",
            "streams",
            "tiers",
            "windows",
        )
    ],
}
"""vLLM's model runners by number less one, and the tests that are run with each."""


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; return pytest's exit status, the first that is not 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm", description=__doc__)
    parser.add_argument("--version", choices=VERSIONS, action="append", help="default: all")
    parser.add_argument("--home", type=Path, default=default_home(), help="default: %(default)s")
    options, rest = parser.parse_known_args(arguments)
    status = 0
    for version in options.version or VERSIONS:
        if not is_complete(options.home, version):
            print(
                f"vLLM {version}: skipped, {options.home / version} is missing: run python -m tests.vllm.setup"
            )
            continue
        for runner, tests in _RUNNERS.items():
            print(f"vLLM {version}, model runner V{int(runner) + 1}", flush=True)
            command = [str(interpreter(options.home, version)), "-m", "pytest", *(rest or tests)]
            variables = {PACKAGES: sysconfig.get_path("purelib"), "VLLM_USE_V2_MODEL_RUNNER": runner}
            done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False)
            status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
