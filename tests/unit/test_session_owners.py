"""Owners: tenants of the blocks below the root."""

from __future__ import annotations

from fdcache.hashing import tenant_key
from fdcache.service.client.session import Owners

A, B = tenant_key("a"), tenant_key("b")


def test_the_oldest_entries_are_dropped_first() -> None:
    owners = Owners(2)
    for block, tenant in ((b"1", "a"), (b"2", "a"), (b"1", "b"), (b"3", "a")):
        owners.add(block, tenant)
    assert owners.keys([b"1", b"3"]) == B + A
    assert owners.keys([b"2"]) == b""
    assert owners.keys([b"3", b"2"]) == A + bytes(16)


def test_the_table_is_bounded() -> None:
    owners = Owners(3)
    for number in range(100):
        owners.add(bytes([number]), "a")
    assert [bool(owners.keys([bytes([number])])) for number in range(95, 100)] == [False] * 2 + [True] * 3
