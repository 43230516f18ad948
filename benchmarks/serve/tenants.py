"""Measure whether a tenant can tell from the time of a look-up what another tenant has.

A tenant has stored half of the prompts. Another one looks up all of them in random order: it misses each, those that
the first tenant has and those that nobody has. The Kolmogorov-Smirnov statistic is the largest distance between the
two distributions of times, p how often chance alone makes one as large. Its own hits show that the times would tell.
Exits 1 if chance alone hardly explains a difference.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row
from benchmarks.serve.engines import BLOCK, Engine, engine, layout, registered
from benchmarks.serve.waits import service
from fdcache.controller.cache_controller import CacheController
from fdcache.hashing import TokenBlocks, root_hash
from fdcache.manager import CacheManager, MatchResult, Request
from fdcache.service.client.connection import Client
from fdcache.service.wire.protocol import Match, Matched
from fdcache.settings.cache import CacheSettings, TransferSettings, WritePolicy

BLOCKS = 8
LEAST_P = 0.001
OTHER, OWN = "other", "own"
OTHERS = "another tenant has it"
Times = NDArray[np.float64]
LookUp = Callable[[int, str], float]
"""Looks a prompt up for a tenant; returns the seconds."""


def prompt(number: int) -> NDArray[np.int32]:
    """Return the tokens of a prompt, which shares no block with another one."""
    return np.full(BLOCKS * BLOCK + 1, number, np.int32)


def store_all(address: str, prompts: int) -> None:
    """Compute and store the prompts of the other tenant in an engine."""
    settings = CacheSettings(server=address, device_blocks=64, write_policy=WritePolicy.WRITE_THROUGH)
    tokens = BLOCKS * BLOCK + 1
    with (
        CacheManager(settings, layout()) as manager,
        CacheController(TransferSettings(), layout()) as worker,
        Client(address, timeout=60) as client,
    ):
        worker.initialize_kv_cache(manager.num_device_blocks)
        worker.initialize_host_cache(manager.host_cache)

        def copy() -> None:
            plans = manager.take_plans()
            for plan in plans:
                worker.submit_swap_tasks(plan)
            manager.apply(report for _ in plans for report in worker.wait_reports(30))

        for number in range(prompts):
            request = Request(f"{number}", prompt(2 * number), tenant=OTHER)
            manager.match_prefix([request])
            manager.allocate_device_blocks([(request, tokens)])
            copy()
            manager.commit([(request, tokens)])
            manager.finish([request])
            while ready(client) < (number + 1) * BLOCKS:
                copy()


def ready(client: Client) -> int:
    """Return the number of blocks that the service has."""
    return int(client.ask("tiers")["host"]["ready"])


def match(user: Engine) -> LookUp:
    """Return a look-up as an engine does it: a new request, hashed and matched."""

    def look_up(number: int, tenant: str) -> float:
        tokens = prompt(number)
        began = time.perf_counter()
        request = Request("r", tokens, tenant=tenant)
        (found,) = user.manager.match_prefix([request])
        seconds = time.perf_counter() - began
        check(found, tenant)
        user.manager.finish([request])
        return seconds

    return look_up


def check(found: MatchResult, tenant: str) -> None:
    """Fail unless a tenant finds its own blocks and no others."""
    assert (found.num_host_blocks > 0) == (tenant == OTHER), found


@contextmanager
def message(directory: Path) -> Iterator[LookUp]:
    """Yield a look-up by a message to the service."""
    counts, starts = np.array([BLOCKS], np.int32).tobytes(), np.zeros(1, np.int32).tobytes()
    with registered(str(directory)) as (line, runs):

        def look_up(number: int, tenant: str) -> float:
            tokens = TokenBlocks(BLOCK, root_hash(layout().fingerprint, tenant))
            tokens.append(prompt(number)[:-1])
            run = runs.next_number()
            body = Match(np.array([run]).tobytes(), counts, starts, tokens.hashes.tobytes())
            began = time.perf_counter()
            answer, _ = line.call(body, 30)
            seconds = time.perf_counter() - began
            assert isinstance(answer, Matched)
            assert bool(answer.slots) == (tenant == OTHER), answer
            runs.unpin(run)
            return seconds

        yield look_up


def times_of(look_up: LookUp, prompts: int, rounds: int) -> tuple[Times, Times, Times]:
    """Return the times of own misses, of misses of what the other tenant has, and of that tenant's hits."""
    cases = [(number, OWN) for number in range(2 * prompts)] * rounds
    cases += [(number, OTHER) for number in range(0, 2 * prompts, 2)] * rounds
    random.Random(7).shuffle(cases)
    times: tuple[list[float], ...] = ([], [], [])
    for number, tenant in cases:
        kind = 2 if tenant == OTHER else 0 if number % 2 else 1
        times[kind].append(look_up(number, tenant))
    nobody, others, hits = (np.array(each) * 1e6 for each in times)
    return nobody, others, hits


def kolmogorov_smirnov(first: Times, second: Times) -> tuple[float, float]:
    """Return the largest distance between two empirical distributions, and p."""
    every = np.sort(np.concatenate((first, second)))
    shares = [np.searchsorted(np.sort(each), every, "right") / len(each) for each in (first, second)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    root = np.sqrt(len(first) * len(second) / (len(first) + len(second)))
    value = (root + 0.12 + 0.11 / root) * distance
    terms = np.arange(1, 101)
    p = float(2 * ((-1.0) ** (terms - 1) * np.exp(-2 * (terms * value) ** 2)).sum())
    return distance, 1.0 if value < 0.2 else min(max(p, 0.0), 1.0)


def rows_of(name: str, look_up: LookUp, prompts: int, rounds: int) -> Iterator[Row]:
    """Yield the distributions of one way to look up."""
    nobody, others, hits = times_of(look_up, prompts, rounds)
    kinds = (("nobody has it", nobody), (OTHERS, others), ("its own hit", hits))
    for kind, times in kinds:
        p50, p90, p99 = (float(each) for each in np.percentile(times, (50, 90, 99)))
        distance, p = kolmogorov_smirnov(nobody, times)
        yield {
            "look-up": f"{name}, {kind}",
            "times": len(times),
            "p50 us": p50,
            "p90 us": p90,
            "p99 us": p99,
            "distance": distance,
            "p": p,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts", type=int, default=2000, help="that the other tenant has, and that nobody has"
    )
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace, report: Report) -> bool:
    with tempfile.TemporaryDirectory(prefix="fdcache-bench-") as name:
        rows = report.table("Look-ups of a tenant", look_ups(Path(name), options.prompts, options.rounds))
    good = all(row["p"] >= LEAST_P for row in rows if row["look-up"].endswith(OTHERS))
    report.note(f"\nThe times {'do not tell' if good else 'may tell'} what another tenant has.")
    return good


def look_ups(directory: Path, prompts: int, rounds: int) -> Iterator[Row]:
    """Yield the rows of a service without storage, and of one with it."""
    size = f"{prompts * BLOCKS * 8192 + (64 << 20)}"
    below = {
        "FDCACHE_STORAGE": "local",
        "FDCACHE_STORAGE_DIR": str(directory / "storage"),
        "FDCACHE_STORAGE_SIZE": size,
    }
    for what, settings in (("", {}), (", with storage", below)):
        folder = directory / f"run{len(settings)}"
        folder.mkdir(mode=0o700)
        with service(folder, FDCACHE_HOST_MEMORY=size, **settings) as (address, _):
            store_all(address, prompts)
            with engine("looking", WritePolicy.WRITE_THROUGH, server=address) as user:
                yield from rows_of(f"an engine's match{what}", match(user), prompts, rounds)
            with message(folder) as look_up:
                yield from rows_of(f"a message{what}", look_up, prompts, rounds)
