"""HostIndex: look-ups, loads and copies of a host tier, of this process or of a service."""

from __future__ import annotations

import numpy as np
import pytest

from fdcache._core import (
    HostIndex,
    OutgoingCopies,
    PresenceTable,
    PresenceWriter,
    SharedHost,
    SharedRuns,
    Tier,
)
from fdcache.errors import StaleLeaseError
from fdcache.tiers.pool import ABSENT, PENDING, READY
from tests.unit.test_shared_memory import ROOT, memory, path, rows, store

A, B = path("a", 4), path("b", 3)
PARENTS = [ROOT, *A[:-1]]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def flags(text: str) -> np.ndarray:
    return np.array([each == "1" for each in text], np.uint8)


class OwnHost:
    """A tier of this process."""

    def __init__(self) -> None:
        self.tier = Tier(16)
        self.index: HostIndex = self.tier

    def store(self, keys: list[bytes]) -> None:
        lease = self.tier.open_lease()
        store(self.tier, lease, ROOT, keys)
        self.tier.release(lease)

    def reserve(self, parents: list[bytes], keys: list[bytes]) -> np.ndarray:
        return self.tier.reserve_copies(0, rows(*parents), rows(*keys)).slots

    @property
    def slots_in_use(self) -> int:
        stats = self.tier.stats()
        return stats.pins + stats.holds


class ServiceHost:
    """The tier of a service, and what one engine knows of it."""

    def __init__(self) -> None:
        self.tier, self.table = Tier(16), memory(16)
        self.tier.mirror(self.table)
        self.host = SharedHost()
        self.index: HostIndex = self.host
        self.begin_session()

    def begin_session(self) -> None:
        view = PresenceTable(self.table)
        self.runs = SharedRuns(view, np.zeros(1 << 12, np.uint8))
        self.copies = OutgoingCopies(view)
        self.copies.grant(np.arange(100, 108, dtype=np.int32), np.ones(8, np.uint32))
        self.copies.tier_slots = 16
        self.host.begin_session(self.runs, self.copies)

    def store(self, keys: list[bytes]) -> None:
        lease = self.tier.open_lease()
        store(self.tier, lease, ROOT, keys)
        self.tier.release(lease)

    def reserve(self, parents: list[bytes], keys: list[bytes]) -> np.ndarray:
        return self.host.reserve(rows(*parents), rows(*keys)).slots

    @property
    def slots_in_use(self) -> int:
        return self.host.runs + self.host.slots_loading


@pytest.fixture(params=[OwnHost, ServiceHost])
def host(request: pytest.FixtureRequest) -> OwnHost | ServiceHost:
    made: OwnHost | ServiceHost = request.param()
    return made


class TestEitherOwner:
    def test_a_leading_run_is_found_and_pinned_until_its_release(self, host: OwnHost | ServiceHost) -> None:
        host.store(A)
        run, pending, ask_for = host.index.find_and_pin(rows(*A, B[0]), 1)
        assert (len(run), run.lease > 0, pending, ask_for) == (3, True, False, 0)
        assert [None if each is None else len(each) for each in run.columns()] == [3, 3, None]
        assert host.slots_in_use
        assert (host.index.release(run.lease), host.index.release(run.lease)) == (True, False)
        assert not host.slots_in_use

    def test_a_look_up_that_finds_nothing_pins_nothing(self, host: OwnHost | ServiceHost) -> None:
        host.store(A)
        run, pending, ask_for = host.index.find_and_pin(rows(*B))
        assert (len(run), run.lease, pending, ask_for, host.slots_in_use) == (0, 0, False, 0, 0)

    def test_a_load_keeps_its_slots_after_the_release_of_its_run(self, host: OwnHost | ServiceHost) -> None:
        host.store(A)
        run, _, _ = host.index.find_and_pin(rows(*A))
        host.index.begin_load_of(run)
        assert host.index.release(run.lease)
        assert host.slots_in_use
        host.index.end_load(run.columns()[0], rows(*A), flags("1111"))
        assert not host.slots_in_use

    def test_no_load_begins_from_a_run_that_was_released(self, host: OwnHost | ServiceHost) -> None:
        host.store(A)
        run, _, _ = host.index.find_and_pin(rows(*A))
        host.index.release(run.lease)
        with pytest.raises((IndexError, StaleLeaseError), match=f"lease {run.lease}"):
            host.index.begin_load(run.lease, run.columns()[0])

    def test_a_copied_block_is_pending_then_there(self, host: OwnHost | ServiceHost) -> None:
        slots = host.reserve(PARENTS[:3], A[:3])
        assert host.index.contains(rows(*A)).tolist() == [PENDING, PENDING, PENDING, ABSENT]
        assert host.index.complete(slots, flags("110"), np.empty(0, np.uint64)).tolist() == [1, 1, 0]
        assert host.index.contains(rows(*A)).tolist() == [READY, READY, ABSENT, ABSENT]

    def test_room_is_at_most_the_capacity(self, host: OwnHost | ServiceHost) -> None:
        assert 0 < host.index.room <= host.index.capacity == 16


class TestOfService:
    def test_a_run_names_the_records_that_nothing_has_verified(self) -> None:
        host = ServiceHost()
        host.store(A)
        PresenceWriter(host.table).set_unverified(rows(A[1]), True)
        run, _, _ = host.index.find_and_pin(rows(*A))
        _, _, unverified = run.columns()
        assert unverified is not None
        assert unverified.tolist() == [0, 1, 0, 0]


class TestOwn:
    def test_bad_records_are_forgotten_with_what_is_below_them(self) -> None:
        host = OwnHost()
        host.store(A)
        run, _, _ = host.index.find_and_pin(rows(*A))
        host.index.begin_load(run.lease, run.columns()[0])
        host.index.release(run.lease)
        host.index.end_load(run.columns()[0], rows(*A), flags("1101"), flags("0010"))
        assert host.index.contains(rows(*A)).tolist() == [READY, READY, ABSENT, ABSENT]

    def test_the_order_of_eviction_learns_of_a_run_that_was_loaded_as_of_one_that_was_used(self) -> None:
        def learned(how: str) -> bytes:
            tier = Tier(16, "learned")
            tier.set_clock(0)
            lease = tier.open_lease()
            store(tier, lease, ROOT, A)
            tier.release(lease)
            for now in (5000, 9000):
                tier.set_clock(now)
                run, _, _ = tier.find_and_pin(rows(*A))
                if how == "loaded":
                    tier.begin_load(run.lease, run.columns()[0])
                    tier.end_load(run.columns()[0], rows(*A), flags("1111"))
                (tier.finish if how == "used" else tier.release)(run.lease)
            return bytes(tier.save_reuse())

        assert learned("loaded") == learned("used") != learned("released")


class TestShared:
    def test_nothing_is_found_or_reserved_without_a_session_or_while_closed(self) -> None:
        host = ServiceHost()
        host.store(A)
        for shut, opened in (
            (host.host.end_session, host.begin_session),
            (lambda: host.host.set_closed(True), lambda: host.host.set_closed(False)),
        ):
            shut()
            run, _, ask_for = host.index.find_and_pin(rows(*A))
            assert (len(run), run.lease, ask_for) == (0, 0, 0)
            assert (host.index.room, host.index.capacity) == (0, 0)
            assert host.index.contains(rows(*A)).tolist() == [ABSENT] * 4
            assert host.host.reserve(rows(ROOT), rows(B[0])).missing == 1
            opened()
            assert host.index.contains(rows(*A)).tolist() == [READY] * 4

    def test_copies_and_loads_that_end_are_told_in_order(self) -> None:
        host = ServiceHost()
        host.store(B)
        run, _, _ = host.index.find_and_pin(rows(*B))
        host.index.begin_load(run.lease, run.columns()[0])
        slots = host.reserve(PARENTS[:2], A[:2])
        host.index.complete(slots, flags("10"), np.array([7, 8], np.uint64))
        host.index.end_load(run.columns()[0], rows(*B), flags("110"))
        assert host.host.has_reports
        copies, load = host.host.take_reports()
        assert copies == (
            slots.tobytes(), b"".join(PARENTS[:2]), b"".join(A[:2]), b"\1\0", np.array([7, 8], np.uint64).tobytes()
        )  # fmt: skip
        assert load[:4] == (run.columns()[0].tobytes(), None, b"".join(B), b"\1\1\0")
        assert (host.host.has_reports, host.host.take_reports()) == (False, [])

    def test_a_load_of_verified_records_that_all_arrived_is_no_news(self) -> None:
        host = ServiceHost()
        host.store(A)
        run, _, _ = host.index.find_and_pin(rows(*A))
        host.index.begin_load(run.lease, run.columns()[0])
        host.index.end_load(run.columns()[0], rows(*A), flags("1111"))
        assert not host.host.has_reports

    def test_a_copy_of_a_session_that_is_over_ends_and_leaves_nothing(self) -> None:
        host = ServiceHost()
        slots = host.reserve(PARENTS[:2], A[:2])
        host.host.end_session()
        assert host.host.blocks_in_flight == 2
        assert host.index.contains(rows(*A[:2])).tolist() == [PENDING, PENDING]
        host.index.complete(slots, flags("11"), np.empty(0, np.uint64))
        assert host.host.blocks_in_flight == 0
        host.host.drop_reports()
        assert (host.host.has_reports, host.copies.contains(rows(*A[:2])).tolist()) == (False, [ABSENT] * 2)

    def test_the_largest_reservation_is_told_once(self) -> None:
        host = ServiceHost()
        host.reserve(PARENTS[:3], A[:3])
        host.reserve([ROOT], B[:1])
        assert (host.copies.take_asked(), host.copies.take_asked()) == (3, 0)
