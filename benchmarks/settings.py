"""Measure configuration: reads through ``fdcache.envs`` beside the old readers, and the start of commands."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from timeit import Timer

from benchmarks.harness import Report, Row, least_us, run
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


def reads() -> Iterator[Row]:
    """Yield nanoseconds per read, for set and unset variables, and for the simplest old reader."""
    for name, text in VARIABLES.items():
        for state in ("unset", "set"):
            os.environ.pop(name, None)
            if state == "set":
                os.environ[name] = text
            new = nanoseconds(f"envs.{name}", {"envs": envs})
            old = nanoseconds("read(environ)", {"read": READERS[name], "environ": os.environ})
            yield {"nanoseconds a read": f"{name}, {state}", "envs": new, "old": old, "ratio": new / old}
        os.environ.pop(name, None)
    os.environ["FD_LOG_DIR"] = "log"
    names: dict[str, object] = {"read": lambda: os.getenv("FD_LOG_DIR", "log"), "envs": envs}
    old, new = nanoseconds("read()", names), nanoseconds("envs.FD_LOG_DIR", names)
    yield {"nanoseconds a read": "lambda: os.getenv(...), set", "envs": new, "old": old, "ratio": new / old}
    del os.environ["FD_LOG_DIR"]


def commands() -> Iterator[Row]:
    """Yield milliseconds per command, beside an empty interpreter."""
    empty = command_ms([sys.executable, "-c", "pass"])
    yield {"milliseconds a command": "python -c pass", "time": empty, "of empty": 1.0}
    for name, command in COMMANDS.items():
        taken = command_ms(command)
        yield {"milliseconds a command": name, "time": taken, "of empty": taken / empty}


def command_ms(command: list[str]) -> float:
    """Return the shortest time of a command in milliseconds."""
    return least_us(partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True), STARTS) / 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def measure(_: argparse.Namespace, report: Report) -> None:
    report.table("Variables", reads())
    report.table("Commands", commands())
    report.note(f"Settings.load(): {least_us(lambda: Settings.load(environ={}), 50) / 1000:.2f} ms")


if __name__ == "__main__":
    sys.exit(run("settings", (sys.modules[__name__],)))
