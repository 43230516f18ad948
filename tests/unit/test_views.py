"""Records of the service's views: their descriptions, sums, and tables made of them."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from fdcache.service.wire import storage_views, views
from fdcache.service.wire.records import fields, total
from fdcache.service.wire.storage_views import NamespaceStorageView, StorageTotals, StoredBlocks
from fdcache.service.wire.views import (
    ArenaView,
    BlockView,
    NamedTenantView,
    NamespaceTierView,
    NamespaceTotals,
    NamespaceView,
)
from fdcache_cli.service_view import table

RECORDS = [
    each
    for module in (views, storage_views)
    for _, each in inspect.getmembers(module, inspect.isclass)
    if issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_shown_field_has_a_sentence_and_a_well_formed_metric(record: type[msgspec.Struct]) -> None:
    for field in fields(record):
        assert field.description.endswith("."), field
        if field.metric is not None:
            assert field.metric.name.startswith("fdcache_")
            assert not field.metric.name.endswith("_total"), "the suffix is added to counters"


def test_sums_are_over_the_fields_that_both_records_have() -> None:
    tiers = [NamespaceTierView(slots=4, ready=3, epoch=7), NamespaceTierView(slots=8, free=8)]
    arena = total(tiers, ArenaView, bytes=1, extent_bytes=1, extents=1, free_extents=0)
    assert (arena.slots, arena.ready, arena.free) == (12, 3, 8)
    assert not hasattr(arena, "epoch")
    assert total([], StoredBlocks) == StoredBlocks()
    assert total([StoredBlocks(blocks=None), StoredBlocks(blocks=2)], StoredBlocks).blocks == 2


def test_a_table_has_the_columns_of_inline_records() -> None:
    namespace = NamespaceView(
        "ab12",
        "llama",
        "1",
        2,
        64,
        1 << 20,
        tier=NamespaceTierView(ready=5, free=3),
        totals=NamespaceTotals(hit_blocks=9),
    )
    header, (cells,) = table([namespace], NamespaceView)
    shown = dict(zip(header, cells, strict=True))
    assert shown["namespace"] == "ab12"
    assert (shown["ready"], shown["free"], shown["hits"]) == ("5", "3", "9")
    assert shown["record"] == "1MiB"


def test_a_table_begins_with_what_its_rows_are_about() -> None:
    assert table([], NamedTenantView)[0][:3] == ["namespace", "tenant", "blocks"]
    header = table([], NamespaceStorageView)[0]
    assert header[:6] == ["namespace", "model", "ranks", "state", "blocks", "of"]
    assert header.index("hits") > header.index("writing"), "columns of inline records come last"


def test_absent_values_are_empty_cells() -> None:
    failed = NamespaceStorageView(namespace="ab12", state="off", error="no")
    opened = NamespaceStorageView(namespace="cd34", state="ready", totals=StorageTotals(hit_blocks=4))
    header, rows = table([failed, opened], NamespaceStorageView)
    assert [row[header.index("hits")] for row in rows] == ["", "4"]
    header, (row,) = table([BlockView("ab12", "00" * 32, stored=True)], BlockView)
    shown = dict(zip(header, row, strict=True))
    assert (shown["hash"], shown["slot"], shown["stored"]) == ("00" * 8, "", "yes")


def test_absent_fields_are_not_in_the_json() -> None:
    assert msgspec.to_builtins(BlockView("ab12", "00", left_at=1.0)) == {
        "namespace": "ab12",
        "hash": "00",
        "left_at": 1.0,
    }
