"""Run the tests of FdcacheStorage with each version of SGLang that is installed.

    python -m tests.sglang [--version VERSION] [arguments of pytest]

``python -m tests.sglang.setup`` installs them. A version that is not there is skipped with a line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.sglang.engine import ENVIRONMENT
from tests.sglang.environments import PACKAGES, VERSIONS, default_home, interpreter, is_complete

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; return pytest's exit status, the first that is not 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.sglang", description=__doc__)
    parser.add_argument("--version", choices=VERSIONS, action="append", help="default: all")
    parser.add_argument("--home", type=Path, default=default_home(), help="default: %(default)s")
    options, rest = parser.parse_known_args(arguments)
    status = 0
    for version in options.version or VERSIONS:
        if not is_complete(options.home, version):
            print(
                f"SGLang {version}: skipped, {options.home / version} is missing: run python -m tests.sglang.setup"
            )
            continue
        print(f"SGLang {version}", flush=True)
        command = [
            str(interpreter(options.home, version)),
            "-m",
            "pytest",
            "--timeout",
            "1800",
            *(rest or ["tests/sglang"]),
        ]
        variables = {
            **ENVIRONMENT,
            PACKAGES: sysconfig.get_path("purelib"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        }
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False)
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
