"""Totals of the service over the last hours, for curves: a row each second, and further back each tenth of them."""

from __future__ import annotations

import time
from collections import deque
from itertools import chain

from fdcache.metadata import SwapPurpose
from fdcache.service.server.layout_storage import LayoutStorage
from fdcache.service.server.namespace import Namespace
from fdcache.service.server.service import Service
from fdcache.service.wire.page_views import TrendRow
from fdcache.tiers.statistics import Copied, Direction
from fdcache.tiers.storage_index import LocalIndex

SECONDS = 1.0
FINE_ROWS, COARSE_ROWS = 600, 720
"""Ten minutes, and two hours."""
_COARSE = 10


class Trends:
    """Rows of totals, of which the last is number ``row``. Recording costs some microseconds for each namespace."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fine: deque[TrendRow] = deque(maxlen=FINE_ROWS)
        self._coarse: deque[TrendRow] = deque(maxlen=COARSE_ROWS)
        self.due = 0.0
        """Time of the next row."""

        self.row = 0

    def record(self) -> None:
        """Add the row that is due."""
        self.due = time.monotonic() + SECONDS
        row = _row(self._service)
        if self.row % _COARSE == 0:
            self._coarse.append(row)
        self._fine.append(row)
        self.row += 1

    def rows_after(self, row: int) -> list[TrendRow]:
        """Return the rows after number ``row``; all that are kept if it is not among the fine ones."""
        missing = self.row - row
        if 0 <= missing < len(self._fine):
            return list(self._fine)[len(self._fine) - missing :]
        first = self._fine[0].time if self._fine else 0.0
        return list(chain((each for each in self._coarse if each.time < first), self._fine))


def _row(service: Service) -> TrendRow:
    row = TrendRow(time=time.time())
    for namespace in service.namespaces.values():
        _add_namespace(row, namespace)
        if (storage := service.storage_of(namespace)) is not None:
            _add_storage(row, storage)
    return row


def _add_namespace(row: TrendRow, namespace: Namespace) -> None:
    totals = namespace.history.totals
    row.prompt_tokens += totals.prompt_tokens
    row.device_hit_tokens += totals.prompt_hit_tokens["device"]
    row.host_hit_tokens += totals.prompt_hit_tokens["host"]
    row.storage_hit_tokens += totals.prompt_hit_tokens["storage"]
    row.missed_sample += totals.missed_sample
    row.missed_estimated += totals.missed_estimated
    row.missed_known += totals.missed_known
    row.missed_blocks += sum(totals.missed.values())
    row.stored_blocks += totals.stored
    row.evicted_blocks += totals.evicted
    copied = totals.traffic.copied
    row.host_to_device_bytes += _bytes(copied, Direction.HOST_TO_DEVICE)
    row.device_to_host_bytes += _bytes(copied, Direction.DEVICE_TO_HOST)
    row.peer_bytes += _bytes(copied, Direction.DEVICE_TO_PEER) + _bytes(copied, Direction.PEER_TO_DEVICE)
    if namespace.tier is not None:
        ready = namespace.tier.stats().ready
        row.host_blocks += ready
        row.host_bytes += ready * namespace.slot_bytes


def _bytes(copied: dict[Direction, Copied], direction: Direction) -> int:
    found = copied.get(direction)
    return 0 if found is None else found.bytes


def _add_storage(row: TrendRow, storage: LayoutStorage) -> None:
    row.storage_to_host_bytes += storage.moved[SwapPurpose.PREFETCH].bytes
    row.host_to_storage_bytes += storage.moved[SwapPurpose.STORE].bytes
    row.storage_reading += storage.blocks_in_flight(SwapPurpose.PREFETCH)
    row.storage_writing += storage.blocks_in_flight(SwapPurpose.STORE)
    row.storage_queued += storage.queued
    if isinstance(storage.index, LocalIndex):
        pool = storage.index.pool.stats()
        row.storage_blocks += pool.ready
        row.storage_evicted_blocks += pool.evictions
