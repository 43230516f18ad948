"""The service with real engines: sharing, look-ups, resets, replays."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fdcache._core import PresenceTable
from fdcache.devices.cpu import CpuDevice
from fdcache.manager import CacheManager, LoadStatus, MatchStatus, Request
from fdcache.service.client import session
from fdcache.service.client.shared_arena import SharedHostArena
from fdcache.settings.cache import CacheSettings, WritePolicy
from fdcache.tiers.events import BlockStored
from tests.replay_help import assert_clean, run_chat, small_config
from tests.service_engine import (
    PROMPT,
    Engine,
    assert_nothing_is_held,
    layout,
    ready_blocks,
    round_trips,
    totals,
)
from tests.service_help import TIMEOUT, LocalService, local_service, until


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

    def test_events_of_another_engine_list_what_it_stored_parents_first(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            settings = CacheSettings(server=service.address, event_buffer=100, rpc_timeout=TIMEOUT)
            writer, reader = Engine(service.address), Engine(None, settings=settings)
            writer.serve(PROMPT)
            stored: list[BlockStored] = []

            def all_are_listed() -> bool:
                stored.extend(each for each in reader.manager.take_events() if isinstance(each, BlockStored))
                return len(stored) == 10

            until(all_are_listed, "all are listed")
            assert [each.parent_hash for each in stored[1:]] == [each.block_hash for each in stored[:-1]]
            writer.close()
            reader.close()

    def test_every_rank_has_its_part(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            for expected in (0, 10):
                engine = Engine(service.address, layout(ranks=3))
                assert engine.serve(PROMPT)[0] == expected
                engine.close()
            assert_nothing_is_held(service)

    def test_different_layouts_share_nothing(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            first, second = Engine(service.address, layout("a")), Engine(service.address, layout("b"))
            first.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            assert second.serve(PROMPT)[0] == 0
            first.close()
            second.close()

    def test_memory_moves_from_a_namespace_without_clients(self, tmp_path: Path) -> None:
        with local_service(tmp_path, FDCACHE_HOST_MEMORY="1MiB") as service:
            first = Engine(service.address, layout("a"), device_blocks=256)
            starts = iter(range(0, 10**6, 1000))

            def has_all() -> bool:
                start = next(starts)
                first.serve(list(range(start, start + 601)))
                return bool(service.ask("namespaces")[0]["extents"] == 16)

            until(has_all, "the first layout has the whole arena")
            first.close()
            second = Engine(service.address, layout("b"), device_blocks=256)
            starts = iter(range(0, 10**6, 1000))

            def shares() -> dict[str, int]:
                return {each["model"]: each["extents"] for each in service.ask("namespaces")}

            def has_more() -> bool:
                start = next(starts)
                second.serve(list(range(start, start + 201)))
                return shares()["b"] > 1

            until(has_more, "the other layout has more than one extent")
            assert sum(shares().values()) <= 16
            second.close()
            assert_nothing_is_held(service)

    def test_an_extent_with_new_memory_is_mapped_again(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            arena = engine.ranks[0]._parts.arena
            assert isinstance(arena, SharedHostArena)
            (former,) = arena.extents
            (namespace,) = service.service.namespaces.values()
            path = Path(namespace.geometry.path(0, 0))
            path.rename(tmp_path / "of-another-layout")  # as when it was given away, and another came back
            path.write_bytes((tmp_path / "of-another-layout").read_bytes())
            former.data[:] = 0
            engine.manager._device.reset()
            found, outcomes = engine.serve(PROMPT)
            assert found == 10
            assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
            (present,) = arena.extents
            assert present is not former
            assert not former.is_still(path)
            engine.close()
            assert not former.data.any()

    def test_extents_are_pinned_before_a_plan_needs_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pinned_by: list[str] = []
        pin = CpuDevice.pin_memory

        def noting(self: CpuDevice, address: int, nbytes: int, owner: object) -> Any:
            pinned_by.append(threading.current_thread().name)
            return pin(self, address, nbytes, owner)

        monkeypatch.setattr(CpuDevice, "pin_memory", noting)
        with local_service(tmp_path) as service:
            engine = Engine(service.address, device_blocks=256)
            engine.serve(PROMPT)
            arena = engine.ranks[0].host_arena
            assert isinstance(arena, SharedHostArena)
            ahead = arena._ahead
            assert ahead is not None
            until(lambda: len(ahead) >= service.service.arena.num_free, "the free extents are pinned")
            pinned_by.clear()
            starts = count(1000, 1000)

            def uses_another() -> bool:
                start = next(starts)
                engine.serve(list(range(start, start + 601)))
                return len(arena.extents) > 1

            until(uses_another, "another extent is in use")
            assert set(pinned_by) <= {"fdcache-pin"}
            engine.close()

    def test_a_device_hit_sends_no_request(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            before = round_trips(service)
            assert engine.manager.match_prefix([Request("again", PROMPT[:40])])[0].num_device_blocks == 9
            assert round_trips(service) == before
            engine.close()

    def test_a_request_that_waits_for_a_load_sends_no_request_and_counts_one_hit(
        self, tmp_path: Path
    ) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            until(lambda: ready_blocks(service) == 10, "the blocks are stored")
            engine.manager._device.reset()
            first, second = Request("first", PROMPT), Request("second", PROMPT)
            engine.manager.match_prefix([first])
            engine.manager.allocate_device_blocks([(first, len(PROMPT))])
            plans = engine.manager.take_plans()
            for _ in range(3):
                assert engine.manager.match_prefix([second])[0].status is MatchStatus.DEFERRED
            assert (round_trips(service), totals(service)["hit_blocks"]) == (0, 10)
            engine.carry_out(plans)
            assert engine.manager.match_prefix([second])[0].num_device_blocks == 10
            assert (round_trips(service), totals(service)["hit_blocks"]) == (0, 10)
            engine.manager.finish([first, second])
            engine.close()
            assert_nothing_is_held(service)

    def test_a_miss_is_known_from_the_table_without_a_request(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            requests = [Request(f"q{i}", [i] * 41) for i in range(50)]
            assert not any(match.num_host_blocks for match in engine.manager.match_prefix(requests))
            assert round_trips(service) == 0
            until(lambda: totals(service)["lookups"] == 50, "the service has heard of the look-ups")
            assert totals(service)["looked_up_blocks"] == 500
            engine.manager.finish(requests)
            engine.close()
            assert_nothing_is_held(service)

    def test_an_engine_that_cannot_read_the_table_computes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(path: Path, nbytes: int) -> PresenceTable:
            raise PermissionError(13, "Permission denied", str(path))

        with local_service(tmp_path) as service:
            first = Engine(service.address)
            first.serve(PROMPT)
            monkeypatch.setattr(session, "open_table", refused)
            second = CacheManager(CacheSettings(server=service.address, rpc_timeout=0.2), layout())
            request = Request("r", PROMPT)
            assert second.match_prefix([request])[0].num_host_blocks == 0
            second.finish([request])
            monkeypatch.undo()
            names = iter(range(10**6))

            def finds_them() -> bool:
                again = Request(f"again{next(names)}", PROMPT)
                found = second.match_prefix([again])[0].num_host_blocks
                second.finish([again])
                return found == 10

            until(finds_them, "the engine is back")
            second.close()
            first.close()
            assert_nothing_is_held(service)

    @pytest.mark.parametrize(("is_open", "trips"), [(True, 0), (False, 1)])
    def test_many_requests_are_one_round_trip_or_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool, trips: int
    ) -> None:
        with local_service(tmp_path) as service:
            first = Engine(service.address)
            prompts = [[i] * 17 for i in range(8)]
            for prompt in prompts:
                first.serve(prompt)
            until(lambda: ready_blocks(service) == 32, "all is stored")
            second = Engine(service.address, device_blocks=64)
            requests = [Request(f"q{i}", prompt) for i, prompt in enumerate([*prompts, [9] * 17])]
            monkeypatch.setattr(service.service, "open_tables", lambda *_: None)
            for namespace in service.service.namespaces.values():
                namespace.tier.open_table(is_open)
            found = [match.num_host_blocks for match in second.manager.match_prefix(requests)]
            assert found == [4] * 8 + [0]
            assert round_trips(service) == trips
            assert totals(service)["hit_blocks"] == 32
            second.manager.finish(requests)
            first.close()
            second.close()
            assert_nothing_is_held(service)


class TestReset:
    def test_blocks_stored_after_a_reset_are_found(self, tmp_path: Path) -> None:
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

    def test_a_device_reset_is_sent_applied_and_acknowledged(self, tmp_path: Path) -> None:
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
            engine.manager.finish([probe])
            engine.close()

    def test_a_dry_run_changes_nothing(self, tmp_path: Path) -> None:
        with local_service(tmp_path) as service:
            engine = Engine(service.address)
            engine.serve(PROMPT)
            engine.close()
            assert service.ask("reset", dry_run=True)["host"][0]["blocks"] == 10
            assert ready_blocks(service) == 10

    def test_a_paused_service_finds_and_grants_nothing(self, tmp_path: Path) -> None:
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


class TestReplay:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_every_byte_is_right_through_a_shared_arena(self, tmp_path: Path, ranks: int) -> None:
        with local_service(tmp_path) as service:
            config = small_config(ranks=ranks, cache={"server": service.address, "rpc_timeout": TIMEOUT})
            first = run_chat(config, 60)
            second = run_chat(config, 60)
            for report in (first, second):
                assert_clean(report)
            assert second.tally.hit_tokens["host"] > first.tally.hit_tokens["host"]
            assert_nothing_is_held(service)

    def test_a_full_arena_evicts_and_stays_right(self, tmp_path: Path) -> None:
        with local_service(tmp_path, FDCACHE_HOST_MEMORY="2MiB") as service:
            config = small_config(
                device_blocks=120,
                cache={
                    "server": service.address,
                    "rpc_timeout": TIMEOUT,
                    "write_policy": WritePolicy.WRITE_BACK,
                },
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
        engine.manager.finish([request])
        engine.close()
