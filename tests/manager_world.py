"""A manager with the model engine of the property tests, for one scenario at a time."""

from __future__ import annotations

from itertools import count
from typing import Any

from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, MatchStatus, Request
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.host import host_block_bytes
from tests.property.engine_model import BLOCK, Engine, Job
from tests.service_help import LocalService, until

A = (1,) * BLOCK
B = (2,) * BLOCK
C = (3,) * BLOCK
TAIL = (9,)
_revisions = count(1)


def layout(ranks: int = 1, revision: str = "1") -> KVLayout:
    return KVLayout.uniform(
        model="m",
        revision=revision,
        block_size=BLOCK,
        num_layers=1,
        kv_heads=1,
        head_dim=8,
        dtype="float16",
        tp_size=ranks,
    )


class World:
    """A manager, its model engine, and a clock that stands still until told otherwise.

    The host tier has ``host`` blocks, or is that of ``service``, under a layout of its own.
    """

    def __init__(
        self,
        device: int = 8,
        host: int = 0,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        service: LocalService | None = None,
        **settings: object,
    ) -> None:
        self.now = 0.0
        self.service = service
        ranks = int(str(settings.pop("ranks", 1)))
        self.layout = layout(ranks, "1" if service is None else f"world {next(_revisions)}")
        if service is None:
            settings["host_memory"] = host * host_block_bytes(self.layout)
        else:
            settings |= {"server": service.address, "rpc_timeout": 30.0}
        cache = CacheSettings.model_validate({"device_blocks": device, "write_policy": policy, **settings})
        self.manager = CacheManager(cache, self.layout, clock=lambda: self.now)
        self.engine = Engine(self.manager, ranks)
        self._await_stock()

    def submit(self, *tokens: int, use_cache: bool = True) -> Job:
        self.engine.submit(tokens, use_cache)
        return self.engine.jobs[-1]

    def settle(self) -> None:
        """Finish everything in flight and let a service hear of it."""
        self.engine.drain()
        if self.service is not None:
            host = self.manager._host
            assert host is not None and host.service is not None
            host.service.flush()
            until(lambda: self._heard >= self._told, "the service has heard of every copy")
            self._await_stock()

    @property
    def _told(self) -> int:
        counters = self.manager.get_stats().counters
        return counters.blocks_evicted_to_host + counters.blocks_backed_up

    @property
    def _heard(self) -> int:
        counts = self._namespace.history.totals
        return int(counts.stored + counts.duplicates + counts.orphans + counts.dropped)

    @property
    def _namespace(self) -> Any:
        assert self.service is not None
        return self.service.service.namespaces[self.layout.fingerprint]

    def _await_stock(self) -> None:
        if self.service is not None:
            host = self.manager._host
            assert host is not None
            until(lambda: host.index.room >= 8, "slots are granted")

    def execute(self) -> None:
        """The ranks do what they were sent; their reports are not delivered."""
        for rank in self.engine.ranks:
            while rank.queue:
                self.engine.execute(rank, frozenset())

    def serve(self, *tokens: int, use_cache: bool = True) -> Job:
        """One request from start to end, and the backups of its blocks; returns its job."""
        job = self.submit(*tokens, use_cache=use_cache)
        self.engine.schedule([job], 100)
        self.settle()
        assert job.running
        self.engine.finish(job)
        queued = -1
        while queued != (queued := self.manager.get_stats().queued_backups):
            self.engine.schedule([], 1)
            self.settle()
        return job

    def match(self, *tokens: int) -> tuple[int, int]:
        """Device and host blocks that a new request finds; it is given up at once."""
        request = Request("probe", list(tokens))
        result = self.manager.match_prefix([request])[0]
        assert result.status is MatchStatus.MATCHED
        self.manager.finish([request])
        return result.num_device_blocks, result.num_host_blocks

    @property
    def host_ready(self) -> int:
        """Blocks of the host tier."""
        if self.service is not None:
            return int(self._namespace.tier.stats().ready)
        host = self.manager.get_stats().host
        return host.ready if host is not None else 0

    def assert_nothing_is_held(self) -> None:
        stats = self.manager.get_stats()
        own = [stats.device] if self.service is not None or stats.host is None else [stats.device, stats.host]
        for tier in own:
            assert (tier.pins, tier.holds, tier.leases, tier.writing) == (0, 0, 0, 0)
        assert self.manager.shared_blocks_in_use == 0
        self.manager.check_integrity()
        if self.service is not None:
            clients = self.service.service.clients
            until(lambda: not any(each.runs for each in clients.values()), "every run is given back")
            assert self.service.ask("integrity") == []

    def close(self) -> None:
        """End the engine wherever it stands."""
        for rank in self.engine.ranks:
            self.manager.worker_lost(rank.index)
        self.manager.finish([job.request for job in self.engine.jobs])
        self.engine.close()


class Worlds:
    """Makes worlds, all of them with a host tier of their own or all with that of one service."""

    def __init__(self, service: LocalService | None) -> None:
        self.service = service
        self._made: list[World] = []

    def new(self, device: int = 8, host: int = 8, **settings: Any) -> World:
        world = World(device, host, service=self.service, **settings)
        self._made.append(world)
        return world

    def with_blocks_on_the_host_only(self, **settings: Any) -> World:
        world = self.new(device=8, host=8, **settings)
        world.serve(*A, *B, *TAIL)
        world.manager.sleep()
        world.manager.wakeup()
        assert world.match(*A, *B, *TAIL) == (0, 2)
        return world

    def close(self) -> None:
        """End all of them; a service has nothing of them then."""
        for world in self._made:
            world.close()
        if (service := self.service) is not None:
            until(lambda: not service.ask("clients"), "they have said goodbye")
            assert service.ask("integrity") == []
            service.ask("reset", tier="host")
