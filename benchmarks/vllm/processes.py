"""Engine processes: each does one job and gives its results line by line, until a deadline."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vllm.timing import FOLDER, write_distribution
from benchmarks.vllm.worker import Job

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

    def run(self, name: str, job: Job, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Run a job, yield its results as they come.

        Raises ``JobError`` if the process fails and ``CutError`` at the deadline; the process has ended by then.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        times = self.folder / "times"
        times.mkdir(exist_ok=True)
        for old in times.iterdir():
            old.unlink()
        with log.open("w") as errors:
            process = subprocess.Popen(
                [self.python, "-m", "benchmarks.vllm.worker", job.as_json()],
                cwd=self.folder,
                env=self.variables | environment | {FOLDER: str(times)},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        try:
            yield from self._results(process)
            if process.wait() != 0:
                raise JobError(f"{cause(log.read_text())} (all of it in {log})")
        finally:
            _end(process)

    def _results(self, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        assert process.stdout is not None
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(self.left_s):
                    raise CutError
                piece = os.read(process.stdout.fileno(), 1 << 16)
                if not piece:
                    return
                *lines, pending = (pending + piece).split(b"\n")
                for line in lines:
                    yield json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and the engine's processes, which are a session of their own; return when all are gone.

    The next engine needs the memory of the device that they hold.
    """
    end = time.monotonic() + 5
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.01)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


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
    plugins = {"fdcache_benchmark": ("vllm.general_plugins", "benchmarks.vllm.timing:install")}
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
