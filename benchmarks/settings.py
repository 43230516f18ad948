"""Measure configuration: reads through ``fdcache.envs`` beside the old readers, and the start of commands.

Run it with ``python -m benchmarks.settings``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from timeit import Timer

from benchmarks.machine import machine
from fdcache import envs
from fdcache.settings import Settings
from tests.old_environment import READERS

READS = 50_000
ROUNDS = 9
STARTS = 15
VARIABLES = {
    "FD_LOG_DIR": "/var/log/fd",
    "FD_DEBUG": "1",
    "FD_USE_DEEP_GEMM": "1",
    "FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT": "60",
    "FD_API_KEY": "k1,k2",
    "FD_CONFIG_ROOT": "~/x",
}
FDCACHE = str(Path(sys.executable).with_name("fdcache"))
COMMANDS = {
    "fdcache --help": [FDCACHE, "--help"],
    "fdcache env --help": [FDCACHE, "env", "--help"],
    "fdcache env show": [FDCACHE, "env", "show"],
    "fdcache env check": [FDCACHE, "env", "check"],
}


def nanoseconds(statement: str, names: dict[str, object]) -> float:
    """Return the shortest time of one execution in nanoseconds."""
    return min(Timer(statement, globals=names).repeat(ROUNDS, READS)) / READS * 1e9


def report_reads() -> None:
    """Print nanoseconds per read, for set and unset variables."""
    print(f"{'nanoseconds a read':40}{'envs':>8}{'old':>8}{'ratio':>8}")
    for name, text in VARIABLES.items():
        for state in ("unset", "set"):
            os.environ.pop(name, None)
            if state == "set":
                os.environ[name] = text
            new = nanoseconds(f"envs.{name}", {"envs": envs})
            old = nanoseconds("read(environ)", {"read": READERS[name], "environ": os.environ})
            print(f"{name + ', ' + state:40}{new:8.0f}{old:8.0f}{new / old:8.2f}")
        os.environ.pop(name, None)


def report_getenv() -> None:
    """Print the cost of the simplest old reader, a lambda around ``os.getenv``."""
    os.environ["FD_LOG_DIR"] = "log"
    names: dict[str, object] = {"read": lambda: os.getenv("FD_LOG_DIR", "log"), "envs": envs}
    old, new = nanoseconds("read()", names), nanoseconds("envs.FD_LOG_DIR", names)
    print(f"{'lambda: os.getenv(...), set':40}{new:8.0f}{old:8.0f}{new / old:8.2f}")
    del os.environ["FD_LOG_DIR"]


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Return the shortest time of one call in milliseconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken) * 1e3


def run(command: list[str]) -> None:
    """Run a command and discard its output."""
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def report_commands() -> None:
    """Print milliseconds per command, beside an empty interpreter."""
    empty = milliseconds(lambda: run([sys.executable, "-c", "pass"]), STARTS)
    print(f"\n{'milliseconds a command':40}{'time':>8}{'of empty':>10}")
    print(f"{'python -c pass':40}{empty:8.1f}{1:10.1f}")
    for name, command in COMMANDS.items():
        taken = milliseconds(lambda command=command: run(command), STARTS)  # type: ignore[misc]
        print(f"{name:40}{taken:8.1f}{taken / empty:10.1f}")
    print(f"\nSettings.load(): {milliseconds(lambda: Settings.load(environ={}), 50):.2f} ms")


def main() -> None:
    """Print all figures."""
    print(machine())
    report_reads()
    report_getenv()
    report_commands()


if __name__ == "__main__":
    main()
