"""The service with real engines: what they share, and what becomes of it when either dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fdcache.controller.cache_controller import CacheController
from fdcache.errors import ServiceRunningError
from fdcache.layout import KVLayout
from fdcache.manager import CacheManager, LoadOutcome, LoadStatus, Request
from fdcache.metadata import TransferPlan
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.settings.storage_tier import StorageTierSettings
from fdcache.settings.transfer import TransferSettings
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_help import LocalService, ServiceProcess, local_service, service_process, until

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
        rpc_timeout: float = 5.0,
        fetches: StorageTierSettings | None = None,
        settings: CacheSettings | None = None,
    ) -> None:
        self.layout = shape or layout()
        settings = settings or CacheSettings(
            server=address,
            device_blocks=device_blocks,
            write_policy=WritePolicy.WRITE_THROUGH,
            rpc_timeout=rpc_timeout,
        )
        self.manager = CacheManager(settings, self.layout, storage=fetches)
        self.ranks = [
            CacheController(TransferSettings(), self.layout, rank=rank) for rank in range(self.layout.tp_size)
        ]
        self.tensors = []
        for rank in self.ranks:
            self.tensors.append(rank.initialize_kv_cache(device_blocks))
            rank.initialize_host_cache(self.manager.host_cache)
        self._names = 0
        if stocked:
            self.await_stock()

    def await_stock(self) -> None:
        """Slots to copy into are granted in the background; a test that counts copies waits for them."""
        host = self.manager._host
        assert host is not None
        until(lambda: host.copy_room, "slots are granted")

    def serve(self, tokens: list[int], tenant: str | None = None) -> tuple[int, list[LoadOutcome]]:
        """One request from match to finish; host blocks found, and what came of loading them."""
        self._names += 1
        request = Request(f"r{self._names}", tokens, tenant=tenant)
        (match,) = self.manager.match_prefix([request])
        (allocation,) = self.manager.allocate_device_blocks([(request, len(tokens))])
        assert allocation.ok
        outcomes = self.carry_out(self.manager.take_plans())
        known = request.num_cached_tokens
        if all(outcome.status is LoadStatus.CONFIRMED for outcome in outcomes):
            self.check(request, tokens, known // BLOCK)
        self.compute(request, tokens, request.num_cached_tokens // BLOCK)
        self.manager.commit([(request, len(tokens))])
        self.carry_out(self.manager.take_plans())
        self.manager.request_finish([request])
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
    for each in service.ask("namespaces"):
        tier = each["tier"]
        assert (tier["pins"], tier["leases"], tier["writing"]) == (0, 0, 0)
    assert service.ask("integrity") == []


class TestSharing:
    def test_an_engine_finds_what_another_stored(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            first = Engine(service.address)
            assert first.serve(PROMPT) == (0, [])
            first.close()
            second = Engine(service.address)
            found, outcomes = second.serve(PROMPT)
            second.close()
            assert found == 10
            assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
            assert_nothing_is_held(service)

    def test_every_rank_has_its_part(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            for expected in (0, 10):
                engine = Engine(service.address, layout(ranks=3))
                assert engine.serve(PROMPT)[0] == expected
                engine.close()
            assert_nothing_is_held(service)

    def test_unequal_layouts_never_meet(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            first, second = Engine(service.address, layout("a")), Engine(service.address, layout("b"))
            first.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            assert second.serve(PROMPT)[0] == 0
            first.close()
            second.close()

    def test_memory_goes_from_a_layout_without_clients_to_one_that_needs_it(self, tmp_path: Path) -> None:
        with local_service(tmp_path, FDCACHE_HOST_MEMORY="1MiB", FDCACHE_EXTENT_SIZE="64KiB") as service:
            first = Engine(service.address, layout("a"), device_blocks=256)
            starts = iter(range(0, 10**6, 1000))

            def has_all() -> bool:
                start = next(starts)
                first.serve(list(range(start, start + 601)))
                return bool(service.ask("namespaces")[0]["extents"] == 16)

            until(has_all, "the first layout has the whole arena")
            first.close()
            second = Engine(service.address, layout("b"), device_blocks=256)
            for start in range(0, 4000, 1000):
                second.serve(list(range(start, start + 201)))
            shares = {each["model"]: each["extents"] for each in service.ask("namespaces")}
            assert shares["b"] > 1
            assert shares["a"] + shares["b"] <= 16
            second.close()
            assert_nothing_is_held(service)

    def test_a_device_hit_asks_the_service_nothing(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            before = round_trips(service)
            assert engine.manager.match_prefix([Request("again", PROMPT[:40])])[0].num_device_blocks == 9
            assert round_trips(service) == before
            engine.close()

    def test_what_is_not_there_is_known_without_asking(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            requests = [Request(f"q{i}", [i] * 41) for i in range(50)]
            assert not any(match.num_host_blocks for match in engine.manager.match_prefix(requests))
            assert round_trips(service) == 0
            until(lambda: totals(service)["lookups"] == 50, "the service has heard of the look-ups")
            assert totals(service)["looked_up_blocks"] == 500
            engine.manager.request_finish(requests)
            engine.close()
            assert_nothing_is_held(service)

    def test_an_engine_that_cannot_read_the_table_computes(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            first = Engine(service.address)
            first.serve(PROMPT)
            (table,) = tmp_path.glob("fdcache-*.table")
            hidden = table.rename(tmp_path / "hidden")
            second = CacheManager(CacheSettings(server=service.address, rpc_timeout=0.2), layout())
            request = Request("r", PROMPT)
            assert second.match_prefix([request])[0].num_host_blocks == 0
            second.request_finish([request])
            hidden.rename(table)
            host = second._host
            assert host is not None
            until(lambda: host.copy_room, "the engine is back")
            assert second.match_prefix([request])[0].num_host_blocks == 10
            second.request_finish([request])
            second.close()
            first.close()
            assert_nothing_is_held(service)

    def test_many_requests_are_one_round_trip(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            first = Engine(service.address)
            prompts = [[i] * 17 for i in range(8)]
            for prompt in prompts:
                first.serve(prompt)
            until(lambda: ready_blocks(service) == 32, "all is stored")
            second = Engine(service.address, device_blocks=64)
            requests = [Request(f"q{i}", prompt) for i, prompt in enumerate([*prompts, [9] * 17])]
            found = [match.num_host_blocks for match in second.manager.match_prefix(requests)]
            assert found == [4] * 8 + [0]
            assert round_trips(service) == 1
            second.manager.request_finish(requests)
            first.close()
            second.close()
            assert_nothing_is_held(service)


class TestReset:
    def test_a_reset_forgets_and_later_stores_are_found_again(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            assert engine.manager.reset_cache() >= 10
            assert ready_blocks(service) == 0
            engine.await_stock()
            assert engine.serve(PROMPT)[0] == 0
            until(lambda: ready_blocks(service) == 10, "they are stored again")
            engine.close()
            other = Engine(service.address)
            assert other.serve(PROMPT)[0] == 10
            other.close()
            assert_nothing_is_held(service)

    def test_a_device_reset_is_told_applied_and_acknowledged(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            service.ask("reset", tier="device")

            def acknowledged() -> bool:
                engine.manager.take_plans()
                (client,) = service.ask("clients")
                return bool(client["device_resets_applied"] == client["device_resets"] == 1)

            until(acknowledged, "the engine has reset its device tier")
            probe = Request("probe", PROMPT)
            match = engine.manager.match_prefix([probe])[0]
            assert (match.num_device_blocks, match.num_host_blocks) == (0, 10)
            engine.manager.request_finish([probe])
            engine.close()

    def test_a_dry_run_changes_nothing(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            engine.close()
            assert service.ask("reset", dry_run=True)["host"][0]["blocks"] == 10
            assert ready_blocks(service) == 10

    def test_paused_it_finds_and_grants_nothing(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            engine.close()
            service.ask("pause")
            other = Engine(service.address, stocked=False)
            assert other.serve(PROMPT)[0] == 0
            service.ask("resume")
            other.close()
            third = Engine(service.address)
            assert third.serve(PROMPT)[0] == 10
            third.close()


class TestRecovery:
    def test_after_a_crash_the_blocks_are_there_and_are_verified(self, tmp_path: Path) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address, layout(ranks=2))
        engine.serve(PROMPT)
        engine.close()
        service.crash()
        with local_service(tmp_path) as service:
            (namespace,) = service.ask("namespaces")
            assert (namespace["tier"]["ready"], namespace["unverified"]) == (10, 10)
            engine = Engine(service.address, layout(ranks=2))
            found, outcomes = engine.serve(PROMPT)
            assert found == 10
            assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
            until(lambda: service.ask("namespaces")[0]["unverified"] == 0, "they are verified")
            engine.close()
            assert_nothing_is_held(service)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_record_that_rotted_is_never_served(self, tmp_path: Path, rank: int) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address, layout(ranks=2))
        engine.serve(PROMPT)
        engine.close()
        (namespace,) = service.service.namespaces.values()
        slot = int(
            namespace.tier.find(Request("x", PROMPT)._bind(BLOCK, engine.layout.fingerprint).hashes).slots[4]
        )
        namespace.tables[rank].record(slot)[17] ^= 1
        service.crash()
        with local_service(tmp_path) as service:
            engine = Engine(service.address, layout(ranks=2))
            found, outcomes = engine.serve(PROMPT)
            assert found == 10
            assert [(outcome.status, outcome.recompute_from) for outcome in outcomes] == [
                (LoadStatus.FAILED, 4 * BLOCK)
            ]
            until(lambda: service.ask("namespaces")[0]["totals"]["corrupt"] == 1, "it is dropped")
            engine.close()

    def test_no_slot_is_given_away_while_an_earlier_client_lives(self, tmp_path: Path) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address)
        engine.serve(PROMPT)
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        engine.close()
        service.crash()
        with local_service(tmp_path) as service:
            assert service.ask("stats")["state"] == "recovering"
            engine = Engine(service.address, stocked=False)
            assert engine.serve(PROMPT)[0] == 10
            other = list(range(500, 541))
            engine.serve(other)
            assert service.ask("namespaces")[0]["totals"]["granted"] == 0
            process.kill()
            process.wait()
            until(lambda: service.ask("stats")["state"] == "ready", "the earlier client is gone")
            until(lambda: service.ask("namespaces")[0]["totals"]["granted"] > 0, "slots are granted again")
            engine.close()

    def test_without_recovery_everything_is_new(self, tmp_path: Path) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address)
        engine.serve(PROMPT)
        service.crash()
        with local_service(tmp_path, FDCACHE_RECOVER="0") as service:
            assert ready_blocks(service) == 0
            until(lambda: service.ask("clients"), "the engine is back")
            engine.await_stock()
            assert engine.serve(list(range(100, 141)))[0] == 0
            until(lambda: ready_blocks(service) == 10, "it stores in the new arena")
            engine.close()
            assert_nothing_is_held(service)


_HOLDER = """
import sys, time
from pathlib import Path
from fdcache.node.liveness import LiveFile
held = LiveFile(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


class TestDeath:
    def test_what_a_killed_client_held_is_taken_back(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            process = subprocess.Popen(
                [sys.executable, "-c", _CLIENT, service.address], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            process.stdout.readline()
            (client,) = service.ask("clients")
            assert client["stock"] > 0
            assert client["runs"] == 1
            os.kill(process.pid, signal.SIGKILL)
            began = time.monotonic()
            process.wait()
            assert_nothing_is_held(service)
            assert service.service.totals.clients_lost == 1
            assert time.monotonic() - began < 60

    def test_a_stopped_client_keeps_what_it_may_write_and_loses_its_pins(self, tmp_path: Path) -> None:
        with local_service(tmp_path, FDCACHE_SESSION_TIMEOUT="1s") as service:
            process = subprocess.Popen(
                [sys.executable, "-c", _CLIENT, service.address], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            process.stdout.readline()
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: service.ask("clients")[0]["silent"], "its silence is noticed")
            (client,) = service.ask("clients")
            assert client["stock"] > 0
            assert client["runs"] == 0
            os.kill(process.pid, signal.SIGCONT)
            until(lambda: not service.ask("clients")[0]["silent"], "it speaks again")
            process.kill()
            process.wait()
            assert_nothing_is_held(service)

    def test_a_client_stopped_in_mid_copy_loads_nothing_from_slots_given_up_meanwhile(
        self, tmp_path: Path
    ) -> None:
        with local_service(
            tmp_path,
            FDCACHE_SESSION_TIMEOUT="1s",
            FDCACHE_HOST_MEMORY="256KiB",
            FDCACHE_EXTENT_SIZE="64KiB",
        ) as service:
            writer = Engine(service.address, device_blocks=64)
            writer.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            process = subprocess.Popen(
                [sys.executable, "-c", _STOPPED_LOADER, service.address], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "in mid-copy"
            until(lambda: service.service.totals.runs_given_up == 1, "its pins are given up")
            starts = iter(range(1000, 10**6, 1000))

            def has_evicted_it() -> bool:
                start = next(starts)
                writer.serve(list(range(start, start + 81)))
                writer.await_stock()
                return bool(service.ask("namespaces")[0]["totals"]["evicted"] >= 60)

            until(has_evicted_it, "the slots have other blocks")
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout.readline().strip() == "failed, recompute from 0"
            process.kill()
            process.wait()
            writer.close()
            assert_nothing_is_held(service)

    def test_an_engine_goes_on_while_the_service_is_gone_and_comes_back_by_itself(
        self, tmp_path: Path
    ) -> None:
        with service_process(tmp_path / "s") as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            service.kill()
            alone = list(range(200, 241))
            assert engine.serve(alone) == (0, [])
            service.start()
            until(lambda: service.ask("clients"), "the engine has registered again")
            engine.close()
            other = Engine(service.address)
            found, outcomes = other.serve(PROMPT)
            assert found == 10
            assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
            other.close()
            assert_nothing_is_held(service)
            assert service.terminate() == 0
            assert service.leftovers() == []

    def test_the_end_waits_for_clients_and_leaves_nothing(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            assert service.terminate() == 0
            assert engine.serve(list(range(300, 341))) == (0, [])
            engine.close()
            assert service.leftovers() == []

    def test_a_second_service_is_refused_with_the_pid_of_the_first(self, tmp_path: Path) -> None:
        with service_process(tmp_path / "s") as service:
            assert service.process is not None
            with pytest.raises(ServiceRunningError, match=str(service.process.pid)):
                LocalService(tmp_path / "s")
            assert service.answers()


_CLIENT = """
import sys, time
from fdcache.manager import Request
from tests.integration.test_service import Engine, PROMPT
engine = Engine(sys.argv[1])
engine.serve(PROMPT)
engine.manager._device.reset()
request = Request("held", PROMPT)
while True:
    if engine.manager.match_prefix([request])[0].num_host_blocks == 10: break
    engine.manager.request_finish([request])
    time.sleep(0.01)
engine.await_stock()
print("held", flush=True)
time.sleep(600)
"""


_STOPPED_LOADER = """
import os, signal, sys
from fdcache.manager import Request
from fdcache.controller.cache_controller import CacheController
from fdcache.settings.transfer import TransferSettings
from tests.faults import PausingDevice
from tests.integration.test_service import Engine, PROMPT
engine = Engine(sys.argv[1])
device = PausingDevice(pause_at=1)
rank = CacheController(TransferSettings(first_group_layers=1, group_layers=1), engine.layout, device=device)
rank.initialize_kv_cache(32)
rank.initialize_host_cache(engine.manager.host_cache)
request = Request("loads", PROMPT)
assert engine.manager.match_prefix([request])[0].num_host_blocks == 10
engine.manager.allocate_device_blocks([(request, len(PROMPT))])
(plan,) = engine.manager.take_plans()
rank.submit_swap_tasks(plan).wait_for_layer(0, 30)
print("in mid-copy", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
device.resume.set()
(outcome,) = engine.manager.apply(rank.wait_reports(30))
print(f"{outcome.status.value}, recompute from {outcome.recompute_from}", flush=True)
signal.pause()
"""


class TestReplay:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_every_byte_is_right_through_a_shared_arena(self, tmp_path: Path, ranks: int) -> None:
        with local_service(tmp_path) as service:
            config = small_config(ranks=ranks, cache={"server": service.address, "rpc_timeout": 5.0})
            first = run_chat(config, 60)
            second = run_chat(config, 60)
            for report in (first, second):
                assert_clean(report)
            assert second.tally.hit_tokens["host"] > first.tally.hit_tokens["host"]
            assert_nothing_is_held(service)

    def test_a_full_arena_evicts_and_stays_right(self, tmp_path: Path) -> None:
        with local_service(tmp_path, FDCACHE_HOST_MEMORY="2MiB", FDCACHE_EXTENT_SIZE="128KiB") as service:
            config = small_config(
                device_blocks=120,
                cache={"server": service.address, "rpc_timeout": 5.0, "write_policy": WritePolicy.WRITE_BACK},
            )
            for _ in range(2):
                assert_clean(run_chat(config, 80))
            assert service.ask("namespaces")[0]["totals"]["evicted"] > 0
            assert_nothing_is_held(service)


def test_arrays_of_a_plan_survive_the_wire(tmp_path: Path) -> None:
    from fdcache.metadata import decode_plan, encode

    service = LocalService(tmp_path)
    engine = Engine(service.address)
    engine.serve(PROMPT)
    engine.close()
    service.crash()
    with local_service(tmp_path) as service:
        engine = Engine(service.address)
        request = Request("a", PROMPT)
        engine.manager.match_prefix([request])
        engine.manager.allocate_device_blocks([(request, 41)])
        (plan,) = engine.manager.take_plans()
        again = decode_plan(encode(plan))
        assert again.arena == plan.arena
        assert again.loads is not None
        assert np.array_equal(again.loads.unverified, np.ones(10, np.uint8))  # type: ignore[arg-type]
        engine.carry_out([plan])
        engine.manager.request_finish([request])
        engine.close()
