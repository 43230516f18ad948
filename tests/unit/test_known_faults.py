"""Faults that caches of this kind have had, each shown not to happen in a tier."""

import pytest

from fdcache import _core
from tests.tier_help import (
    ROOT_HASH,
    assert_all_given_back,
    assert_sound,
    chain,
    checksums,
    copy_in,
    flags,
    hash_list,
    hashes,
    ready_run,
    report,
    slots,
    store,
)

PATH = chain(0, 1, 2, 3, 4, 5, 6, 7)


def test_a_path_in_two_tiers_keeps_its_order() -> None:
    """Blocks found in two tiers were put together tier by tier, so attention read KV at wrong positions."""
    device, host = _core.Tier(8), _core.Tier(8)
    store(host, PATH)
    store(device, PATH)
    pressure = device.open_lease()
    device.reserve(pressure, 3)
    lease, host_lease = device.open_lease(), host.open_lease()
    above = device.match(lease, hashes(PATH)).slots
    below = host.match(host_lease, hashes(PATH), len(above)).slots
    assert (len(above), len(below)) == (5, 3)
    found = [device.node(int(s)).hash for s in above] + [host.node(int(s)).hash for s in below]
    assert found == PATH
    device.release(pressure)
    loaded = device.reserve_copies(lease, hashes(PATH[4:7]), hashes(PATH[5:]))
    assert [device.node(int(slot)).parent for slot in loaded.slots] == [above[4], *loaded.slots[:2]]
    report(device, loaded.slots.tolist())
    assert ready_run(device, PATH) == [*above.tolist(), *loaded.slots.tolist()]


@pytest.mark.parametrize("evicted", range(1, 9))
def test_eviction_leaves_a_prefix(evicted: int) -> None:
    """Dropping one block of a released path took its root, and the other seven were held but unreachable."""
    tier = _core.Tier(8)
    stored = store(tier, PATH)
    lease = tier.open_lease()
    dropped = tier.reserve(lease, evicted).evicted
    assert hash_list(dropped.hashes) == PATH[::-1][:evicted]
    assert ready_run(tier, PATH) == stored[: 8 - evicted]
    assert tier.stats().ready == 8 - evicted


def test_a_source_is_not_overwritten_by_an_eviction_of_the_same_step() -> None:
    """A host slot was freed when a load out of it was planned, and an eviction wrote over it first."""
    host = _core.Tier(4)
    sources = store(host, PATH[:4])
    load = host.open_lease()
    host.match(load, hashes(PATH[:4]))
    host.hold(slots(sources))
    host.release(load)
    fresh = chain(9)
    eviction = host.reserve_copies(0, hashes([ROOT_HASH]), hashes(fresh))
    assert (len(eviction), eviction.missing) == (0, 1)
    host.unhold(slots(sources[3:]))
    eviction = host.reserve_copies(0, hashes([ROOT_HASH]), hashes(fresh))
    assert eviction.slots.tolist() == sources[3:]


def test_blocks_are_found_only_once_their_content_exists() -> None:
    """Blocks could be matched from their allocation on, and stayed so when the request was aborted before."""
    tier = _core.Tier(8)
    lease = tier.open_lease()
    taken = tier.reserve(lease, 8).slots
    assert ready_run(tier, PATH) == []
    tier.commit(lease, ROOT_HASH, hashes(PATH[:3]), taken[:3])
    tier.release(lease)
    assert ready_run(tier, PATH) == taken[:3].tolist()
    assert_all_given_back(tier)


def test_references_end_whatever_became_of_the_request() -> None:
    """Finishing counted down only some of what matching had counted up, or counted down twice."""
    tier = _core.Tier(8)
    store(tier, PATH[:4])
    other = tier.open_lease()
    shared = tier.match(other, hashes(PATH[:4])).slots
    never_scheduled = tier.open_lease()
    tier.match(never_scheduled, hashes(PATH[:4]))
    copy_in(tier, chain(9, 9), never_scheduled)
    assert tier.release(never_scheduled)
    assert not tier.release(never_scheduled)
    assert [tier.node(int(slot)).pins for slot in shared] == [1, 1, 1, 1]
    assert tier.available == 2
    tier.release(other)
    assert (tier.stats().pins, tier.available) == (0, 6)


def test_slots_with_one_number_in_two_tiers_have_nothing_to_do_with_each_other() -> None:
    """Slot 5 of the device was taken for slot 5 of the host, so a superfluous slot was never given back."""
    device, host = _core.Tier(1), _core.Tier(1)
    assert store(host, PATH[:1]) == [0]
    lease = device.open_lease()
    own = device.reserve(lease, 1).slots
    assert own.tolist() == [0]
    assert device.commit(lease, ROOT_HASH, hashes(PATH[:1]), own).tolist() == [0]
    device.release(lease)
    assert_all_given_back(device)
    assert_all_given_back(host)


def test_a_superfluous_slot_comes_back() -> None:
    """A block computed twice left its second slot without an owner."""
    tier = _core.Tier(4)
    store(tier, PATH[:2])
    lease = tier.open_lease()
    own = tier.reserve(lease, 2).slots
    assert tier.commit(lease, ROOT_HASH, hashes(PATH[:2]), own).tolist() == [1, 1]
    assert tier.stats().free == 0
    tier.release(lease)
    assert tier.stats().free == 2
    assert_all_given_back(tier)


def test_a_reset_leaves_requests_and_copies_their_slots() -> None:
    """After a reset, late releases and queued copies freed or wrote slots that by then belonged to others."""
    tier = _core.Tier(8)
    store(tier, PATH[:2])
    old = tier.open_lease()
    tier.match(old, hashes(PATH[:2]))
    backup = tier.match(old, hashes(PATH[:2])).slots
    tier.hold(backup)
    planned = copy_in(tier, chain(9, 9), old)
    tier.reset()
    new = tier.open_lease()
    theirs = tier.reserve(new, 4).slots
    assert not set(theirs.tolist()) & {*backup.tolist(), *planned}
    assert tier.commit(new, ROOT_HASH, hashes(PATH[:4]), theirs).tolist() == [0, 0, 0, 0]
    tier.release(old)
    assert [tier.node(int(slot)).pins for slot in theirs] == [1, 1, 1, 1]
    assert tier.stats().free == 0
    assert report(tier, planned) == []
    tier.unhold(backup)
    assert ready_run(tier, PATH) == theirs.tolist()
    assert tier.contains(hashes(chain(9, 9))).tolist() == [0, 0]
    tier.release(new)
    assert_all_given_back(tier)


def test_only_a_confirmed_copy_counts() -> None:
    """A backup counted as made when it was planned, and its failure was never noticed."""
    tier = _core.Tier(8)
    planned = copy_in(tier, PATH[:4])
    assert tier.contains(hashes(PATH[:4])).tolist() == [2, 2, 2, 2]
    assert ready_run(tier, PATH) == []
    ready = tier.complete(slots(planned), flags([True, True, False, True]), checksums())
    assert ready.tolist() == [1, 1, 0, 0]
    assert tier.contains(hashes(PATH[:4])).tolist() == [1, 1, 0, 0]
    assert_all_given_back(tier)


def test_a_refused_allocation_says_how_much_is_missing_and_takes_nothing() -> None:
    """A failed allocation returned an empty list that no caller checked; too few slots corrupted the state."""
    tier = _core.Tier(8)
    store(tier, PATH[:4])
    lease = tier.open_lease()
    tier.match(lease, hashes(PATH[:4]))
    refused = tier.reserve(lease, 6)
    assert (len(refused), refused.missing) == (0, 2)
    deep = chain(0, 1, 2, 3, 11, 12, 13, 14, 15)
    refused = tier.reserve_copies(lease, hashes(deep[3:-1]), hashes(deep[4:]))
    assert (len(refused), refused.missing) == (0, 1)
    assert (tier.stats().free, tier.stats().ready, tier.stats().pins) == (4, 4, 4)
    with pytest.raises(ValueError, match="differ in length"):
        tier.commit(lease, PATH[3], hashes(PATH[4:6]), slots([4]))
    assert_sound(tier)


@pytest.mark.parametrize("pinned", range(9))
def test_as_much_as_is_said_to_be_available_can_be_had(pinned: int) -> None:
    """The capacity test counted blocks that could not be evicted, so what it allowed then failed."""
    tier = _core.Tier(8)
    stored = store(tier, PATH)
    tier.hold(slots(stored[pinned - 1 : pinned] if pinned else []))
    assert tier.available == 8 - pinned
    lease = tier.open_lease()
    assert tier.reserve(lease, tier.available + 1).missing == 1
    assert tier.reserve(lease, tier.available).missing == 0


def test_no_slot_out_of_range_outlives_a_shrink() -> None:
    """A shrink left used slots beyond the new size, which later came back to the free list."""
    tier = _core.Tier(8)
    lease = tier.open_lease()
    taken = tier.reserve(lease, 8).slots
    tier.commit(lease, ROOT_HASH, hashes(PATH), taken)
    assert tier.resize(5) == 3
    assert tier.stats().slots == 8
    tier.release(lease)
    assert tier.resize(5) == 0
    lease = tier.open_lease()
    assert sorted(tier.reserve(lease, 5).slots.tolist()) == [0, 1, 2, 3, 4]
    assert tier.reserve(lease, 1).missing == 1
    tier.release(lease)
    assert_all_given_back(tier)


def test_a_full_hit_is_recomputed_beside_the_shared_block() -> None:
    """After a full hit the last block was recomputed in the slot that others were reading."""
    tier = _core.Tier(8)
    shared = store(tier, PATH[:4])
    reader, lease = tier.open_lease(), tier.open_lease()
    tier.match(reader, hashes(PATH[:4]))
    tier.match(lease, hashes(PATH[:3]))
    with pytest.raises(ValueError, match="reserved"):
        tier.commit(lease, PATH[2], hashes(PATH[3:4]), slots(shared[3:]))
    own = tier.reserve(lease, 1)
    assert own.slots[0] not in shared
    assert tier.commit(lease, PATH[2], hashes(PATH[3:4]), own.slots).tolist() == [1]
    assert tier.node(shared[3]).generation == 1
    assert ready_run(tier, PATH) == shared
    tier.release(lease)
    tier.release(reader)
    assert_all_given_back(tier)
