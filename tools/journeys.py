"""Count the modules that five journeys enter: of a request, in the engine's, the workers' and the service's threads.

Usage: python -m tools.journeys [1-5...], from the root of a checkout. Each journey runs a few times first, so that
neither imports nor what is made once count. docs/architecture.md walks the same five.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import fdcache
from fdcache import (
    CacheController,
    CacheManager,
    CacheSettings,
    KVLayout,
    MatchStatus,
    OffloadManager,
    Request,
)
from fdcache.settings.cache import CopySettings, StorageTierSettings
from tests.service_engine import Engine
from tests.service_help import local_service
from tests.transfer_help import Instance, prompt_of

PACKAGE = Path(fdcache.__file__ or "").parent
LAYOUT = KVLayout.uniform(
    model="j", revision="1", block_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float16"
)
NUM_LAYERS = LAYOUT.total_layers
TICKS = 0.3
"""Seconds of the service's ticks that count."""


class Trace:
    """The functions of the package that are entered while it is on, by module."""

    def __init__(self) -> None:
        self.entered: OrderedDict[str, set[str]] = OrderedDict()
        self.is_on = False
        self._lock = threading.Lock()
        threading.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call":
            return
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            with self._lock:
                self.entered.setdefault(str(path.relative_to(PACKAGE)), set()).add(frame.f_code.co_qualname)

    def idle(self, seconds: float) -> set[str]:
        """Return the modules that threads enter in some seconds without a request."""
        self.entered.clear()
        self.is_on = True
        time.sleep(seconds)
        self.is_on = False
        return set(self.entered)

    @contextmanager
    def of(self, name: str, idle: Collection[str] = ()) -> Iterator[None]:
        """Trace a block, and print the modules that it entered in their order; those of ``idle`` are marked."""
        self.entered.clear()
        self.is_on = True
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.is_on = False
        functions = sum(map(len, self.entered.values()))
        print(f"{name}: {len(self.entered)} modules, {functions} functions")
        if idle:
            print(f"    {sum(each in idle for each in self.entered)} of them without a request, too: *")
        for module, names in self.entered.items():
            mark, more = "*" if module in idle else "", " ..." if len(names) > 8 else ""
            print(f"    {module}{mark}: {', '.join(sorted(names)[:8])}{more}")


def prompt(first: int) -> list[int]:
    """Return the tokens of a prompt of six and a half blocks."""
    return list(range(first, first + 104))


class OwnDevice:
    """An engine whose device blocks are fdcache's, with one rank in this process."""

    def __init__(self, **options: Any) -> None:
        storage = options.pop("storage", None)
        settings = {
            "device_blocks": 8,
            "host_memory": "4MiB",
            "write_policy": "write_through",
            **options,
        }
        self.manager = CacheManager(CacheSettings(**settings), LAYOUT, storage=storage)
        self.controller = CacheController(CopySettings(), LAYOUT)
        self.controller.initialize_kv_cache(8)
        self.controller.initialize_host_cache(self.manager.host_cache)
        if storage is not None:
            from fdcache.storage.connector import ConnectorContext
            from fdcache.storage.factory import open_storage

            opened = open_storage(ConnectorContext(LAYOUT, 0, storage, None))
            assert opened is not None
            scan = self.controller.initialize_storage(opened)
            assert scan is not None
            self.manager.restore_storage([scan])

    def step(self) -> list[Any]:
        """Submit the plans of a step; return their counters."""
        return [self.controller.submit_swap_tasks(plan) for plan in self.manager.take_plans()]

    def reports(self) -> None:
        """Apply reports until no plan is in flight."""
        while found := self.controller.wait_reports(timeout=5):
            self.manager.apply(found)

    def serve(self, name: str, tokens: list[int], *, begins: bool = False) -> None:
        """Serve a request from its match to its end."""
        request = Request(name, tokens)
        if begins:
            self.manager.begin([request])
        while self.manager.match_prefix([request])[0].status is MatchStatus.DEFERRED:
            self.step()
            self.reports()
        assert self.manager.allocate_device_blocks([(request, len(tokens))])[0].failure is None
        counters = self.step()
        for layer in range(NUM_LAYERS):
            for counter in counters:
                counter.wait_for_layer(layer)
        self.reports()
        self.manager.commit([(request, len(tokens))])
        self.manager.finish([request])
        self.step()
        self.reports()

    def close(self) -> None:
        """Shut the worker down, then the manager."""
        self.controller.shutdown()
        self.manager.close()


def embedded(trace: Trace, _: Path) -> None:
    """A request whose blocks are on the host."""
    engine = OwnDevice()
    for i in range(3):
        engine.serve(f"a{i}", prompt(1000 * i))
        engine.serve(f"b{i}", prompt(1000 * (i + 7)))
    with trace.of("1 embedded, found on the host"):
        engine.serve("again", prompt(1000))
    engine.close()


def engine_owned(trace: Trace, _: Path) -> None:
    """The same for an engine that has a prefix cache of its own on the device."""
    manager = OffloadManager(CacheSettings(host_memory="4MiB", write_policy="write_through"), LAYOUT)
    controller = CacheController(CopySettings(), LAYOUT)
    controller.initialize_kv_cache(64)
    controller.initialize_host_cache(manager.host_cache)

    def step() -> None:
        for plan in manager.take_plans():
            controller.submit_swap_tasks(plan).wait_all()
        while found := controller.wait_reports(timeout=5):
            manager.apply(found)

    def serve(name: str, tokens: list[int], first: int) -> None:
        request, table = Request(name, tokens), np.arange(first, first + 7, dtype=np.int32)
        manager.begin([request])
        found = manager.match(request, 0).num_tokens // LAYOUT.block_size
        if found:
            manager.load(request, table[:found])
        manager.evicted(table[found:])
        step()
        manager.offer(request, len(tokens), table)
        manager.finish([request])
        for _ in range(6):
            step()

    for i in range(3):
        serve(f"a{i}", prompt(1000 * i), 7 * i)
    serve("warm", prompt(0), 30)
    with trace.of("2 engine with its own device cache, found on the host"):
        serve("again", prompt(1000), 40)
    controller.shutdown()
    manager.close()


def service(trace: Trace, folder: Path) -> None:
    """A request whose blocks another engine has left at a service."""
    folder = folder / "service"
    folder.mkdir(mode=0o700)

    def serve(engine: Engine, name: str, first: int) -> None:
        request = Request(name, np.arange(first, first + 33, dtype=np.int32))
        engine.manager.match_prefix([request])
        assert engine.manager.allocate_device_blocks([(request, request.num_tokens)])[0].failure is None
        for i in range(3):
            if i == 1:
                engine.manager.commit([(request, request.num_tokens)])
                engine.manager.finish([request])
            for plan in engine.manager.take_plans():
                for rank in engine.ranks:
                    rank.submit_swap_tasks(plan)
            for rank in engine.ranks:
                engine.manager.apply(rank.wait_reports(timeout=2))
        time.sleep(TICKS)

    with local_service(folder) as node, ExitStack() as ends:
        engines = [Engine(node.address), Engine(node.address)]
        for each in engines:
            ends.callback(each.manager.close)
            ends.callback(each.ranks[0].shutdown)
        for i in range(3):
            serve(engines[0], f"a{i}", 100 * i)
        serve(engines[1], "warm", 0)
        # The statistics for the next heartbeat, which comes once a second, are no part of a request.
        engines[1].manager.take_plans()
        idle = trace.idle(TICKS)
        with trace.of("3 at a service, found there (the engine's and the service's threads)", idle):
            serve(engines[1], "again", 100)


def storage(trace: Trace, folder: Path) -> None:
    """A request whose blocks are read from a disk."""
    folder = folder / "storage"
    folder.mkdir()
    settings = StorageTierSettings(connector="local", directory=folder, size=16 << 20)
    engine = OwnDevice(storage=settings, host_memory=str(LAYOUT.record_bytes * 10 + 4096))
    for i in range(6):
        engine.serve(f"a{i}", prompt(1000 * i))
        for _ in range(4):
            engine.step()
            engine.reports()
    engine.serve("warm", prompt(1000), begins=True)
    with trace.of("4 embedded, read from storage"):
        engine.serve("again", prompt(3000), begins=True)
    engine.close()


def handover(trace: Trace, folder: Path) -> None:
    """A request that one instance computes and another one fetches."""
    folder = folder / "handover"
    folder.mkdir()

    with Instance("prefill", folder, "p") as prefill, Instance("decode", folder, "d") as decode:

        def hand_over(name: str, seed: int) -> None:
            mine, theirs = Request(name, prompt_of(seed, 4)), Request(name, prompt_of(seed, 4))
            decode.fetch(theirs, prefill.source(name))
            prefill.start(mine)
            prefill.handovers.send([(mine, name)])
            prefill.step()
            prefill.compute(mine, name)
            prefill.manager.finish([mine])
            decode.outcomes.clear()
            decode.until(lambda: decode.outcomes, prefill)
            decode.manager.finish([theirs])
            both = (prefill.manager, decode.manager)
            prefill.until(
                lambda: not any(len(each._requests) + len(each._plans._ledger) for each in both), decode
            )

        hand_over("warm", 1)
        with trace.of("5 hand-over from prefill to decode (ipc on the CPU, both sides)"):
            hand_over("again", 2)


JOURNEYS: dict[str, Callable[[Trace, Path], None]] = {
    "1": embedded,
    "2": engine_owned,
    "3": service,
    "4": storage,
    "5": handover,
}


def main() -> int:
    """Walk the journeys that the arguments name, by default all."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or JOURNEYS:
            JOURNEYS[name](trace, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
