"""Engine processes: each does one job and gives its results line by line, until a deadline."""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm.timing import FOLDER, write_distribution
from benchmarks.vllm.worker import DONE, Job

ROOT = Path(__file__).parent.parent.parent
ERROR = re.compile(r"(?:^|\] |\) )((?:[A-Za-z_]+\.)*[A-Za-z]*(?:Error|Exception)\b.*)")


class JobError(Exception):
    """An engine has stopped; the message has the cause."""


class CutError(Exception):
    """The time was over before a job was."""


@dataclass(frozen=True)
class Processes:
    """The interpreter of engines, their folder, that of their logs, and the moment when the run must end."""

    python: str
    folder: Path
    logs: Path
    deadline: float | None
    variables: dict[str, str]

    @property
    def left_s(self) -> float | None:
        """Seconds until the end; None if there is none."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @contextmanager
    def started(
        self, name: str, job: Job, environment: dict[str, str], enter: Sequence[str] = ()
    ) -> Iterator[Process]:
        """Start a job; its process has ended with the context. ``enter``: a command that runs it elsewhere."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        times = Path(tempfile.mkdtemp(prefix="times-", dir=self.folder))
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*enter, self.python, "-m", "benchmarks.vllm.worker", job.as_json()],
                cwd=self.folder,
                env=self.variables | environment | {FOLDER: str(times)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        found = Process(process, log, self.deadline)
        try:
            yield found
        finally:
            found.end()


class Process:
    """A running job, which is given orders and writes results."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, deadline: float | None) -> None:
        self._process = process
        self._log = log
        self._deadline = deadline
        self._lines: list[bytes] = []
        self._pending = b""

    def results(self, last: str | None = None, seconds: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yield results as they come: up to one of the part ``last``, to ``DONE``, or to the end of the process.

        Raises ``JobError`` if the process fails or gives none for so many seconds, ``CutError`` at the deadline.
        """
        while (line := self._next(seconds)) is not None:
            record: dict[str, Any] = json.loads(line)
            if record["part"] == DONE:
                return
            yield record
            if record["part"] == last:
                return
        if self._process.wait() != 0 or last is not None:
            raise JobError(f"{cause(self.log())} (all of it in {self._log})")

    def order(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Give an order; yield its results like ``results``."""
        self.begin(order)
        yield from self.results()

    def begin(self, order: dict[str, Any]) -> None:
        """Give an order, whose results come with ``results``."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has failed, and its log says why
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _next(self, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not self._lines:
                left = math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                least = min(left, seconds)
                if not selector.select(None if math.isinf(least) else least):
                    if left <= seconds:
                        raise CutError
                    raise JobError(f"nothing for {seconds:g} s (its log is {self._log})")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    return None
                *self._lines, self._pending = (self._pending + piece).split(b"\n")
        return self._lines.pop(0)

    def log(self) -> str:
        """Return what it has logged."""
        return self._log.read_text(errors="replace")

    def leave(self, seconds: float) -> None:
        """Have the engine shut itself down; end it if it has not by then."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.end()

    def end(self) -> None:
        """End the process and the engine's processes, which are a session of their own; return when all are gone.

        The next engine needs the memory of the device that they hold.
        """
        process, end = self._process, time.monotonic() + 20
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(process.pid, signal.SIGKILL)
                process.poll()
                time.sleep(0.01)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def cause(log: str) -> str:
    """Return the line of a log that says why an engine did not run."""
    found = [match.group(1) for text in log.splitlines() if (match := ERROR.search(text))]
    inner = [text for text in found if "root cause" not in text]
    return (inner or found or log.splitlines() or ["no output"])[-1]


def variables(folder: Path, device: str) -> dict[str, str]:
    """Return the environment of engine processes.

    ``benchmarks`` is found through a link, not through the source tree: fdcache is the interpreter's, or what the
    caller put on PYTHONPATH. On a CPU the platform and the environment are those of the connector's tests, which take
    fdcache from this interpreter. Settings of caches come from the benchmark alone.
    """
    modules = folder / "modules"
    modules.mkdir(parents=True, exist_ok=True)
    (modules / "benchmarks").symlink_to(ROOT / "benchmarks")
    plugins = {
        f"fdcache_{name}": ("vllm.general_plugins", f"benchmarks.vllm.{name}:install")
        for name in ("timing", "weights", "grouped")
    }
    found = {
        name: value for name, value in os.environ.items() if not name.startswith(("FDCACHE_", "LMCACHE_"))
    }
    if device == "cpu":
        from tests.vllm.environments import PACKAGES

        (modules / "tests").symlink_to(ROOT / "tests")
        plugins["fdcache_test_platform"] = ("vllm.platform_plugins", "tests.vllm.plugin:register")
        found[PACKAGES] = sysconfig.get_path("purelib")
    for name, (group, entry) in plugins.items():
        write_distribution(modules, name, group, entry)
    paths = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
    return found | {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": ",".join(plugins)}
