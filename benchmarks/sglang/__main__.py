"""Measure SGLang's engine with no host cache, with HiCache and with both doors of fdcache, in one run.

Each engine is a process of its own with the same arguments. Some start beside each other; then one at a time is
measured, while the others are stopped: SGLang's schedulers poll, and would take the cores that the measured one needs
to launch its kernels. Those of a service are not stopped, since it would take them for dead. Every result is appended
to a file as soon as it is there, as far as the engine has come in its time. Exits 1 if an engine gave wrong tokens or
did not answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import machine
from benchmarks.sglang.engines import COMPARED, ENGINES, NONE, SERVED, SHAPES

STEPS = ("cold", "device hit", "after flush", "after eviction")
GAPS = ("beside", "quiet")
MORE = ("later turns p50 p99", "token p50 p99 / quiet")

_LAST = 10.0
"""Seconds that an engine has to end by itself."""


class Worker:
    """An engine's process, whose lines are read by a thread."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self.lines: deque[dict[str, Any]] = deque()
        self._arrived = threading.Condition()
        self._log = (folder / f"{name}.log").open("w")
        arguments = [name, options.shape, options.attention, str(folder), str(options.page), options.server]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sglang.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                told = json.loads(line)
            except ValueError:
                self._log.write(line)
                continue
            if isinstance(told, dict) and told.get("engine") == self.name:
                with self._arrived:
                    self.lines.append(told)
                    self._arrived.notify_all()

    def next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next line; None if it does not come in time or the process has ended."""
        with self._arrived:
            while not self.lines:
                left = deadline - time.monotonic()
                if left <= 0 or (self._process.poll() is not None and not self._reader.is_alive()):
                    return None
                self._arrived.wait(min(left, 0.2))
            return self.lines.popleft()

    def pause(self) -> None:
        """Stop its processes until it is told to measure, unless a service listens for its heartbeats."""
        if self.name not in SERVED:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def begin(self) -> None:
        """Tell it to measure."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self, patience: float = 0) -> None:
        """Wait so many seconds for its end, then kill it and its children; further calls do nothing."""
        if self._log.closed:
            return
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the results of all engines. Those of a group start beside each other before the first is measured."""
    deadline = time.monotonic() + options.limit
    results = []
    for first in range(0, len(options.engines), options.beside):
        workers = [Worker(name, options, folder) for name in options.engines[first : first + options.beside]]
        try:
            started = [worker.next(deadline) for worker in workers]
            for worker, start in zip(workers, started, strict=True):
                if start is not None:
                    worker.pause()
            for worker, start in zip(workers, started, strict=True):
                until = min(deadline, time.monotonic() + options.each)
                results.append(_measured(worker, start, until, folder))
                with options.out.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                print(line(results[-1]), flush=True)
                worker.end(0 if "failed" in results[-1] else _LAST)  # else it went on beside the next
        finally:
            for worker in workers:
                worker.end()
    return results


def _measured(worker: Worker, start: dict[str, Any] | None, deadline: float, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"engine": worker.name}
    if start is None:
        result["failed"] = "it did not start"
    else:
        worker.begin()
        result |= start
        while "is_whole" not in result and "failed" not in result:
            result |= worker.next(deadline) or {"failed": "it did not answer in time"}
    if "failed" in result:
        result["log"] = (folder / f"{worker.name}.log").read_text()[-3000:]
    return result


def line(result: dict[str, Any]) -> str:
    """Return a line of the table: milliseconds to the first token, and between tokens beside loads and apart."""
    cells = []
    for step in STEPS:
        times = result.get("ttft_ms", {}).get(step, [])
        cells.append(f"{median(times):8.1f} ({min(times):.1f}-{max(times):.1f})" if times else "-")
    if "conversations" in result:
        later = result["conversations"]["ttft_ms"]["later turns"]
        cells.append(f"{later['p50']:8.1f} {later['p99']:.1f}")
    if "beside" in result:
        gaps = result["beside"]["between_tokens_ms"]
        cells.append(" / ".join(f"{gaps[each].get('p50', 0)} {gaps[each].get('p99', 0)}" for each in GAPS))
    found = {
        step: min(sum(each.values()) for each in result["cached"][step])
        for step in STEPS[1:]
        if "cached" in result
    }
    whole = f"{result['engine']:16} " + " ".join(f"{cell:>24}" for cell in cells) + f"  found {found}"
    return f"{whole}\n{result['failed']}\n{result.get('log', '')}" if "failed" in result else whole


def wrong_answers(results: list[dict[str, Any]]) -> list[str]:
    """Return the steps in which an engine's tokens are not those that it computed first, or of the first engine."""
    wrong = []
    whole = [each for each in results if "answers" in each]
    for each in whole:
        wrong += [f"{each['engine']}: {step} ({count})" for step, count in each["wrong"].items()]
        if each["answers"] != whole[0]["answers"]:
            wrong.append(f"{each['engine']}: other tokens than {whole[0]['engine']}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(COMPARED))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--attention", default="fa3", help="attention backend of SGLang (%(default)s)")
    parser.add_argument("--page", type=int, default=0, help="tokens of a page (that of the shape)")
    parser.add_argument("--server", default="", help=f"address of the service of {' and '.join(SERVED)}")
    parser.add_argument("--beside", type=int, default=3, help="engines of a group (%(default)s)")
    parser.add_argument("--limit", type=float, default=230, help="seconds of the whole run (%(default)s)")
    parser.add_argument(
        "--each", type=float, default=float("inf"), help="seconds to measure an engine in (those of the run)"
    )
    parser.add_argument("--out", type=Path, default=Path("sglang.jsonl"))
    options = parser.parse_args(arguments)
    if not options.server and set(options.engines) & set(SERVED):
        parser.error("--server is missing: the address that `fdcache serve` prints")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines end, too
    print(f"{machine()}; shape {options.shape}, prompts of {SHAPES[options.shape].prompt} tokens")
    print(f"{'TTFT, ms':16} " + " ".join(f"{step:>24}" for step in (*STEPS, *MORE)))
    with tempfile.TemporaryDirectory() as folder:
        results = run(options, Path(folder))
    wrong = wrong_answers(results)
    print("tokens: " + ("all equal" if not wrong else "WRONG: " + "; ".join(wrong)))
    return (
        1
        if wrong
        or any("failed" in each for each in results)
        or not any(each["engine"] != NONE for each in results)
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
