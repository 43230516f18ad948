"""Recovery: blocks that the next service takes over from a killed one, and the clients that it awaits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fdcache.hashing import hash_blocks, root_hash
from fdcache.manager import LoadStatus
from fdcache.tiers import reuse
from tests.service_engine import (
    BLOCK,
    PROMPT,
    Engine,
    assert_nothing_is_held,
    layout,
    ready_blocks,
)
from tests.service_help import LocalService, local_service, next_line, spawned, until


class TestRecovery:
    def test_blocks_survive_a_crash_and_are_verified_by_the_first_load(self, tmp_path: Path) -> None:
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
    def test_a_corrupt_record_is_never_served(self, tmp_path: Path, rank: int) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address, layout(ranks=2))
        engine.serve(PROMPT)
        engine.close()
        (namespace,) = service.service.namespaces.values()
        slot = int(
            namespace.tier.find(
                hash_blocks(PROMPT, BLOCK, parent=root_hash(engine.layout.fingerprint))
            ).slots[4]
        )
        namespace.memory.tables[rank].record(slot)[17] ^= 1
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

    def test_all_blocks_are_recovered_under_a_smaller_quota(self, tmp_path: Path) -> None:
        long = list(range(3001))
        service = LocalService(tmp_path)
        engine = Engine(service.address, device_blocks=1024)

        def stored() -> bool:
            """Serve until the stock of slots, which grows with use, allowed that many copies."""
            engine.manager._device.reset()
            engine.serve(long)
            engine.await_stock()
            return ready_blocks(service) == 750

        until(stored, "the blocks are stored")
        engine.close()
        service.crash()
        with local_service(tmp_path, FDCACHE_NAMESPACE_QUOTA="0.07") as service:
            engine = Engine(service.address, device_blocks=1024, stocked=False)
            found, outcomes = engine.serve(long)
            assert found == 750
            assert [outcome.status for outcome in outcomes] == [LoadStatus.CONFIRMED]
            engine.close()
            assert_nothing_is_held(service)

    def test_no_slot_is_granted_while_an_earlier_client_lives(self, tmp_path: Path) -> None:
        service = LocalService(tmp_path)
        engine = Engine(service.address)
        engine.serve(PROMPT)
        with spawned(sys.executable, "-c", _HOLDER, str(tmp_path)) as process:
            next_line(process)
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
                until(
                    lambda: service.ask("namespaces")[0]["totals"]["granted"] > 0, "slots are granted again"
                )
                engine.close()

    def test_what_eviction_has_learned_survives_a_crash(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reuse, "_SAVE_SECONDS", 0.0)
        service = LocalService(tmp_path, FDCACHE_EVICTION="learned")
        engine = Engine(service.address, layout())
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        for _ in range(2):
            engine.manager._device.reset()
            assert engine.serve(PROMPT)[0] == 10
        engine.close()
        (namespace,) = service.service.namespaces.values()
        until(lambda: not service.ask("clients"), "the engine is gone")
        learned = namespace.tier.save_reuse()
        assert namespace.tier.reuse().reused.sum() >= 10
        path = namespace.learned.path
        until(lambda: path.exists() and path.read_bytes().endswith(learned), "it is on file")
        service.crash()
        with local_service(tmp_path, FDCACHE_EVICTION="learned") as service:
            (namespace,) = service.service.namespaces.values()
            assert namespace.tier.save_reuse() == learned
            assert ready_blocks(service) == 10

    def test_no_recover_starts_empty(self, tmp_path: Path) -> None:
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
from fdcache.service.wire.liveness import LiveFile
held = LiveFile(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""
