"""Measure what deletions cost an engine's steps, and the thread of the service, in CPU time of the thread.

Rounds of empty steps with and without the looks for deletions alternate in one process. What an engine forgets is timed
for prefixes of 64 blocks on its device; the service is timed while an engine has not forgotten yet.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.harness import Report, Row, in_turns
from benchmarks.serve.engines import BLOCK, layout
from benchmarks.serve.waits import service
from fdcache.manager import CacheManager, Request
from fdcache.metadata import CacheLevel, HashArray
from fdcache.service.server.deletion_log import MOST_DELETED, DeletionLog
from fdcache.service.server.tenants import Quotas, Tenants
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import Deleted
from fdcache.tiers.pool import BlockPool

BLOCKS, STEPS, PROMPTS = 64, 200, 64


class _NoDeletions:
    """Looks for nothing."""

    def take(self) -> None: ...

    def step_closed(self) -> None: ...

    def tell_ended(self) -> None: ...


def cpu_us(call: Callable[[], object], samples: int, calls: int = 1) -> float:
    """Return the median microseconds of a call, over samples of ``calls`` each."""
    spent = []
    for _ in range(samples):
        began = time.thread_time()
        for _ in range(calls):
            call()
        spent.append(1e6 * (time.thread_time() - began) / calls)
    return median(spent)


def prompt(number: int) -> Request:
    """Return a request of 64 blocks, none of which another one has."""
    return Request(f"{number}", np.full(BLOCKS * BLOCK + 1, number, np.int32))


def steps_us(manager: CacheManager) -> float:
    """Return microseconds per step that has no request."""

    def step() -> None:
        manager.take_plans()
        manager.apply([])

    return cpu_us(step, 1, STEPS)


def compute(manager: CacheManager, number: int) -> HashArray:
    """Put a prompt on the device; return its blocks."""
    request = prompt(number)
    manager.match_prefix([request])
    manager.allocate_device_blocks([(request, request.num_tokens)])
    manager.take_plans()
    manager.commit([(request, request.num_tokens)])
    manager.finish([request])
    return request.block_hashes.copy()


def forgetting_us(manager: CacheManager, prefixes: int, rounds: int) -> float:
    """Return the microseconds in which a step forgets so many prefixes of 64 blocks."""
    spent = []
    for _ in range(rounds):
        roots = np.concatenate([compute(manager, number)[:1] for number in range(prefixes)])
        began = time.thread_time()
        manager._forget_on_device(Deleted(1, roots, everything=False))
        spent.append(1e6 * (time.thread_time() - began))
    return median(spent)


def engine_rows(address: str, rounds: int) -> list[Row]:
    settings = CacheSettings(
        server=address, device_blocks=2 * PROMPTS * BLOCKS, write_policy=WritePolicy.WRITE_BACK
    )
    with CacheManager(settings, layout()) as manager:
        looking, none = manager._deletions, _NoDeletions()

        def without() -> float:
            manager._deletions = none  # type: ignore[assignment]
            spent = steps_us(manager)
            manager._deletions = looking
            return spent

        steps_us(manager)
        taken = in_turns({"without looks": without, "with": lambda: steps_us(manager)}, rounds)
        rows: list[Row] = [
            {
                "an engine's": f"empty step, {name}",
                "median us": median(its),
                "more than without, median of pairs": median(
                    mine - base for mine, base in zip(its, taken["without looks"], strict=True)
                ),
            }
            for name, its in taken.items()
        ]
        for prefixes in (1, PROMPTS):
            spent = forgetting_us(manager, prefixes, 20)
            rows.append(
                {
                    "an engine's": f"step that forgets {prefixes} prefixes of {BLOCKS} blocks on its device",
                    "median us": spent,
                    "more than without, median of pairs": spent,
                }
            )
    return rows


def kept(path: Path, count: int) -> DeletionLog:
    """Return a log with so many deletions of single prefixes."""
    deletions = DeletionLog(path)
    deletions._save = lambda: None  # type: ignore[method-assign]
    for root in np.random.default_rng(0).integers(0, 256, (count, 1, 32), np.uint8):
        deletions.add("a", root)
    del deletions._save
    return deletions


def service_rows(folder: Path) -> Iterator[Row]:
    path = np.random.default_rng(1).integers(0, 256, (BLOCKS, 32), np.uint8)
    parents = np.concatenate((np.zeros((1, 32), np.uint8), path[:-1]))
    tier, tenants = BlockPool(CacheLevel.HOST, BLOCKS), Tenants(Quotas(1.0, {}, {}), folder / "tenants")
    for count in (1, MOST_DELETED // 2):
        deletions = kept(folder / "deletions", count)

        def check(namespace: str, number: int, log: DeletionLog = deletions) -> None:
            """Look, as the service does for blocks that an engine has stored."""
            if log.is_behind(namespace, number):
                log.deleted(namespace, number, tier, tenants, parents, path, b"")

        yield {
            "deletions kept": count,
            "their file": cpu_us(deletions._save, 20),
            "64 blocks of an engine that has forgotten": cpu_us(
                partial(check, "a", deletions.latest), 50, 100
            ),
            "of another model's": cpu_us(partial(check, "b", 0), 50, 100),
            "of one that has not": cpu_us(partial(check, "a", 0), 20),
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=40)


def measure(options: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with service(Path(folder)) as (address, _):
            report.table("Steps and deletions", engine_rows(address, options.rounds))
        report.table("The service and deletions, in microseconds", service_rows(Path(folder)))
