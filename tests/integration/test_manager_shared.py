"""The manager against the model engine of the property tests, with the host tier of a service."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdcache.layout import KVLayout
from fdcache.manager import CacheManager
from fdcache.settings.cache import CacheSettings, WritePolicy
from tests.property.engine_model import BLOCK, Engine, Prefix
from tests.service_help import TIMEOUT, LocalService, local_service, until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    directory: Path = tmp_path_factory.mktemp("service")
    with local_service(directory, FDCACHE_HOST_MEMORY="1MiB") as running:
        yield running


def prompt(rng: random.Random) -> Prefix:
    blocks = [rng.randrange(2) for _ in range(rng.randrange(7))]
    tail = [rng.randrange(2) for _ in range(rng.randrange(1, BLOCK + 1))]
    return (*(token for block in blocks for token in [block] * BLOCK), *tail)


def serve(engine: Engine, rng: random.Random) -> None:
    """A stretch of normal traffic: most reuse happens here, which the other steps break into."""
    while len(engine.jobs) < 2:
        engine.submit(prompt(rng))
    engine.schedule(engine.jobs, 16)
    fails = frozenset({rng.randrange(8)}) if rng.random() < 0.1 else frozenset[int]()
    for rank in engine.ranks:
        while rank.queue:
            engine.execute(rank, fails)
    while engine.reports:
        engine.deliver(0)
    for _ in range(len(engine.steps)):
        engine.accept_oldest()
    for job in list(engine.jobs):
        if job.scheduled == len(job.tokens):
            engine.finish(job)


def act(engine: Engine, rng: random.Random) -> None:
    """One random step of the life of an engine."""
    fails = frozenset({rng.randrange(8)}) if rng.random() < 0.1 else frozenset[int]()
    choice = rng.randrange(200)
    if choice >= 100:
        serve(engine, rng)
    elif choice < 20 and len(engine.jobs) < 6:
        engine.submit(prompt(rng))
    elif choice < 50 and engine.jobs:
        engine.schedule(rng.sample(engine.jobs, rng.randrange(1, len(engine.jobs) + 1)), rng.randrange(1, 24))
    elif choice < 75:
        rank = rng.choice(engine.ranks)
        for _ in range(min(len(rank.queue), rng.randrange(1, 5))):
            engine.execute(rank, fails)
    elif choice < 88 and engine.reports:
        engine.deliver(rng.randrange(len(engine.reports)))
    elif choice < 94 and engine.steps:
        engine.accept_oldest()
    elif choice < 97 and engine.jobs:
        job = rng.choice(engine.jobs)
        (engine.finish if rng.random() < 0.7 else engine.stop)(job)
    elif choice == 97 and rng.random() < 0.2:
        engine.manager.reset_cache()
    elif choice == 98 and rng.random() < 0.2:
        engine.lose(rng.choice(engine.ranks))


@pytest.mark.parametrize("policy", WritePolicy)
@pytest.mark.parametrize("seed", range(8))
def test_every_block_read_is_right_and_nothing_leaks(
    service: LocalService, policy: WritePolicy, seed: int
) -> None:
    rng = random.Random(f"{policy}{seed}")
    ranks = rng.randrange(1, 3)
    layout = KVLayout.uniform(
        model="model",
        revision=f"{policy}{seed}",
        block_size=BLOCK,
        num_layers=1,
        kv_heads=1,
        head_dim=512,
        dtype="uint8",
        tp_size=ranks,
    )
    settings = CacheSettings(
        server=service.address,
        rpc_timeout=TIMEOUT,
        device_blocks=rng.randrange(6, 12),
        write_policy=policy,
        event_buffer=1000,
    )
    engine = Engine(CacheManager(settings, layout), ranks)

    def figures() -> dict[str, Any]:
        return next(each for each in service.ask("namespaces") if each["revision"] == layout.revision)

    def hits() -> bool:
        serve(engine, rng)
        engine.manager.check_integrity()
        return bool(figures()["totals"]["hit_blocks"] > 0)

    for _ in range(400):
        act(engine, rng)
        engine.manager.check_integrity()
    if seed == 0:
        until(hits, "blocks come from the service")
    engine.drain()
    for job in list(engine.jobs):
        engine.finish(job)
    for _ in range(3):
        engine.schedule([], 1)
        engine.drain()
    assert engine.manager.shared_blocks_in_use == 0
    device = engine.manager.get_stats().device
    assert (device.pins, device.holds, device.leases, device.writing) == (0, 0, 0, 0)
    assert figures()["totals"]["corrupt"] == 0
    engine.close()
    until(lambda: not service.ask("clients"), "the client has said goodbye")
    assert service.ask("integrity") == []
    service.ask("reset", tier="host")
