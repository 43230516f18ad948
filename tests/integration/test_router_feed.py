"""What a service keeps for routers: descriptions of its blocks, their file, and pages of several groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fdcache.errors import ProtocolError
from fdcache.groups import CacheGroup, Reach, record_keys
from fdcache.layout import KVLayout
from fdcache.metadata import CacheLevel
from fdcache.service.server import kept_notes
from fdcache.service.server.event_publisher import EventPublisher
from fdcache.service.server.notes_file import NotesFile
from fdcache.service.server.router_feed import RouterFeed
from fdcache.service.wire.protocol import DescribedPath
from fdcache.tiers.pool import EVENT_STORED, BlockPool
from tests.service_engine import BLOCK, PROMPT, Engine, layout
from tests.service_help import local_service, until
from tests.storage_help import path_hashes


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher("tcp://127.0.0.1:*", None)
    yield made
    made.close()


def feed_of(publisher: EventPublisher, path: Path, shape: KVLayout, **more: bool) -> RouterFeed:
    feed = RouterFeed(shape, publisher, "kv@node@m", NotesFile(path), **more)

    def is_loaded() -> bool:
        feed.work()
        return feed.notes.is_loaded

    until(is_loaded, "the notes are read")
    return feed


def described(hashes: np.ndarray[Any, Any], **more: Any) -> DescribedPath:
    tokens = np.arange(BLOCK * len(hashes), dtype=np.int32)
    return DescribedPath(hashes.tobytes(), tokens.tobytes(), **more)


def snapshot(feed: RouterFeed) -> list[Any]:
    """Return the events of all blocks, as a reader of vLLM decodes them."""
    decoder = msgspec.msgpack.Decoder(dict[str, Any])
    return [
        SimpleNamespace(
            **({"kv_cache_spec_sliding_window": None} | decoder.decode(msgspec.msgpack.encode(event)))
        )
        for batch in feed.snapshot()
        for event in batch
    ]


def test_a_page_of_two_groups_is_told_for_each(publisher: EventPublisher, tmp_path: Path) -> None:
    shape = dataclasses.replace(
        layout(), groups=(CacheGroup(layout().block_size), CacheGroup(layout().block_size, Reach.LAST, 64))
    )
    assert shape.page_records == 2
    feed, hashes = feed_of(publisher, tmp_path / "a.notes", shape), path_hashes(3)
    feed.describe([described(hashes, items=[(BLOCK + 1, 2, "picture")])])
    feed.tier_events(CacheLevel.HOST, np.full(6, EVENT_STORED, np.uint8), record_keys(hashes, 2))
    first, second = snapshot(feed)
    assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window, first.group_idx) == (
        "full_attention",
        None,
        0,
    )
    assert (second.kv_cache_spec_kind, second.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert first.block_hashes == second.block_hashes
    assert len(first.block_hashes) == 3
    keys = [None if each is None else list(map(list, each)) for each in first.extra_keys]
    assert keys == [None, [["picture", 1]], None]
    feed.close()


def test_notes_outlive_the_service_and_those_of_lost_blocks_are_dropped(
    publisher: EventPublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_notes, "_SLACK", 4)
    monkeypatch.setattr(kept_notes, "_AT_ONCE", 8)
    pool = BlockPool(CacheLevel.HOST, 64)
    feed = feed_of(publisher, tmp_path / "a.notes", layout())
    feed.attach(CacheLevel.HOST, pool)
    kept, lost = path_hashes(5, seed=1), path_hashes(40, seed=2)
    lease = pool.open_lease()
    slots = pool.reserve(lease, 5).slots
    assert not pool.commit(lease, bytes(32), kept, slots).any()
    for path in (kept, lost):
        feed.describe([described(path, tenant="acme")])
    for _ in range(20):
        feed.work()
    feed.close()
    again = feed_of(publisher, tmp_path / "a.notes", layout(), has_storage=True)
    for _ in range(20):
        again.work()  # nothing is dropped while the storage is not open yet
    assert 5 <= len(again.notes._notes) < 20
    again.attach(CacheLevel.STORAGE, pool)
    (event,) = snapshot(again)
    assert event.token_ids == list(range(5 * BLOCK))
    assert event.cache_salt == "acme"
    again.close()


def test_a_description_that_does_not_fit_is_refused(publisher: EventPublisher, tmp_path: Path) -> None:
    feed = feed_of(publisher, tmp_path / "a.notes", layout())
    with pytest.raises(ProtocolError, match="tokens"):
        feed.describe([DescribedPath(bytes(64), bytes(4))])
    with pytest.raises(ProtocolError, match="parent"):
        feed.describe([DescribedPath(bytes(32), bytes(4 * BLOCK), parent=b"x")])
    feed.close()


def test_engines_describe_nothing_to_a_service_without_routers(tmp_path: Path) -> None:
    with local_service(tmp_path) as service:
        engine = Engine(service.address)
        engine.serve(PROMPT, tenant="secret")
        engine.close()
        kinds = service.service.totals.latencies.kinds
        assert "publish" in kinds
        assert "describe" not in kinds
    assert not list(tmp_path.glob("*.notes"))


def test_host_blocks_are_told_after_a_restart_without_storage(tmp_path: Path) -> None:
    variables = {"FDCACHE_KV_EVENTS": "tcp://127.0.0.1:*", "FDCACHE_DISCARD": "0"}
    with local_service(tmp_path, **variables) as service:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        until(lambda: service.ask("stats")["tiers"]["host"]["ready"] == 10, "the blocks are there")
        engine.close()
    with local_service(tmp_path, **variables) as service:
        (feed,) = service.service.namespaces.feeds._feeds.values()
        until(lambda: snapshot(feed), "the blocks are told")
        assert [token for event in snapshot(feed) for token in event.token_ids] == PROMPT[:40]
