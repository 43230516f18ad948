"""Leases of peers: each ends some time after the last message about it."""

from __future__ import annotations

from fdcache.transfer.leases import MOST_LEASE_SECONDS, Leases, lease_seconds


def test_a_lease_ends_at_the_last_end_that_it_was_given() -> None:
    leases: Leases[str, int] = Leases()
    leases.grant("a", 1, 10.0)
    leases.grant("b", 2, 20.0)
    assert (leases.expired(9.9), leases.next_end) == ([], 10.0)
    leases.renew("a", 30.0)
    leases.extend("b", 15.0)  # it lasts longer already
    assert (leases.expired(19.9), leases.next_end) == ([], 20.0)
    leases.renew("b", 12.0)  # a peer may ask for less
    assert leases.expired(12.0) == ["b"]
    assert (leases.end("b"), leases.end("b")) == (2, None)
    assert (list(leases), leases.values(), leases.next_end) == (["a"], [1], 30.0)


def test_no_peer_asks_for_a_lease_beyond_the_limit() -> None:
    assert lease_seconds(1500) == 1.5
    assert lease_seconds(2**40) == MOST_LEASE_SECONDS
