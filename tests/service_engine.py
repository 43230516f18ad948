"""A small engine on a service: its blocks hold bytes that follow from their tokens, and every load is compared."""

from __future__ import annotations

from typing import Any

from fdcache.controller.cache_controller import CacheController
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, Request
from fdcache.metadata import TransferPlan
from fdcache.settings.cache import CacheSettings, CopySettings, StorageTierSettings, WritePolicy
from tests.service_help import TIMEOUT, LocalService, ServiceProcess, until

BLOCK = 4


def layout(model: str = "m", ranks: int = 1) -> KVLayout:
    return KVLayout.uniform(
        model=model,
        revision="1",
        num_layers=2,
        block_size=BLOCK,
        kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
        tp_size=ranks,
    )


class Engine:
    """A manager and its ranks, in this process; its device blocks hold bytes derived from their tokens."""

    def __init__(
        self,
        address: str | None,
        shape: KVLayout | None = None,
        device_blocks: int = 32,
        *,
        stocked: bool = True,
        rpc_timeout: float = TIMEOUT,
        fetches: StorageTierSettings | None = None,
        settings: CacheSettings | None = None,
        loads_ahead: bool = True,
    ) -> None:
        self.layout = shape or layout()
        settings = settings or CacheSettings(
            server=address,
            device_blocks=device_blocks,
            write_policy=WritePolicy.WRITE_THROUGH,
            rpc_timeout=rpc_timeout,
        )
        self.manager = CacheManager(settings, self.layout, storage=fetches, loads_ahead=loads_ahead)
        self._device_blocks = device_blocks
        self.ranks, self.tensors = [], []
        for rank in range(self.layout.tp_size):
            controller, tensors = self._worker(rank)
            self.ranks.append(controller)
            self.tensors.append(tensors)
        self._names = 0
        if stocked:
            self.await_stock()

    def _worker(self, rank: int) -> tuple[CacheController, list[Any]]:
        controller = CacheController(CopySettings(), self.layout, rank=rank)
        tensors = list(controller.initialize_kv_cache(self._device_blocks))
        controller.initialize_host_cache(self.manager.host_cache)
        return controller, tensors

    def replace_worker(self, rank: int) -> list[LoadOutcome]:
        """End a rank's worker without its reports, and start another with empty device memory."""
        self.ranks[rank].shutdown()
        outcomes = self.manager.worker_lost(rank)
        self.ranks[rank], self.tensors[rank] = self._worker(rank)
        return outcomes

    def await_stock(self, blocks: int = 1) -> None:
        """Slots to copy into are granted in the background; a test that counts copies waits for them.

        Of a request with more blocks than there are slots, the others wait for a later step, and not for long.
        """
        host = self.manager._host
        assert host is not None
        until(lambda: host.index.room >= blocks, "slots are granted")

    def serve(
        self, tokens: list[int], tenant: str | None = None, adapter_id: str | None = None
    ) -> tuple[int, list[LoadOutcome]]:
        """One request from match to finish; host blocks found, and what came of loading them."""
        self._names += 1
        request = Request(f"r{self._names}", tokens, tenant=tenant, adapter_id=adapter_id)
        (match,) = self.manager.match_prefix([request])
        (allocation,) = self.manager.allocate_device_blocks([(request, len(tokens))])
        assert allocation.ok
        outcomes = self.carry_out(self.manager.take_plans())
        known = request.num_cached_tokens
        if all(outcome.status is LoadStatus.CONFIRMED for outcome in outcomes):
            self.check(request, tokens, known // BLOCK)
        self.compute(request, tokens, request.num_cached_tokens // BLOCK)
        self.manager.commit([(request, len(tokens))])
        while plans := self.manager.take_plans():  # backups come a share of the pool at a time
            self.carry_out(plans)
        self.manager.finish([request])
        return match.num_host_blocks, outcomes

    def carry_out(self, plans: list[TransferPlan]) -> list[LoadOutcome]:
        outcomes: list[LoadOutcome] = []
        for plan in plans:
            for rank in self.ranks:
                rank.submit_swap_tasks(plan)
            for rank in self.ranks:
                outcomes += self.manager.apply(rank.wait_reports(30))
        return outcomes

    def content(self, tokens: list[int], block: int, rank: int, plane: int) -> int:
        return hash((*tokens[: (block + 1) * BLOCK], rank, plane)) & 0xFFFF

    def compute(self, request: Request, tokens: list[int], first: int) -> None:
        for rank, tensors in enumerate(self.tensors):
            for plane, tensor in enumerate(tensors):
                for block in range(first, len(tokens) // BLOCK):
                    tensor[request.block_table[block]] = self.content(tokens, block, rank, plane)

    def check(self, request: Request, tokens: list[int], count: int) -> None:
        for rank, tensors in enumerate(self.tensors):
            for plane, tensor in enumerate(tensors):
                for block in range(count):
                    assert (
                        tensor[request.block_table[block]] == self.content(tokens, block, rank, plane)
                    ).all()

    def close(self) -> None:
        for rank in self.ranks:
            rank.shutdown()
        self.manager.close()


PROMPT = list(range(41))


def ready_blocks(service: LocalService | ServiceProcess) -> int:
    return sum(each["tier"].get("ready", 0) for each in service.ask("namespaces"))


def round_trips(service: LocalService) -> int:
    asked = service.service.totals.latencies.kinds.get("match")
    return sum(asked.counts) if asked else 0


def totals(service: LocalService) -> dict[str, int]:
    (found,) = (each["totals"] for each in service.ask("namespaces"))
    return dict(found)


def assert_nothing_is_held(service: LocalService | ServiceProcess) -> None:
    until(lambda: not service.ask("clients"), "every client is gone")

    def held() -> list[int]:
        tiers = [each["tier"] for each in service.ask("namespaces")]
        return [tier[name] for tier in tiers for name in ("pins", "leases", "writing") if tier[name]]

    until(lambda: not held(), "nothing is held")  # a read of the service ends after its client
    assert service.ask("integrity") == []
