"""Page of a replay: one file that shows a finished run as a service shows itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from fdcache import __version__
from fdcache.errors import ReplayError
from fdcache.layout import KVLayout
from fdcache.machine.files import write_text
from fdcache.replay.report import Report
from fdcache.service.page import recorded
from fdcache.service.wire.page_views import ShownClient, ShownNamespace, ShownService, ShownState, TrendRow
from fdcache.service.wire.storage_views import NamespaceStorageView
from fdcache.settings import Settings
from fdcache.settings.effective import effective_values
from fdcache.tiers.statistics import TierUsage


def write_page(report: Report, layout: KVLayout, settings: Settings, path: Path) -> None:
    """Write the page of a run, with all that it needs. Raises ``ReplayError`` if the file cannot be written."""
    config = {
        "version": __version__,
        "fingerprint": settings.fingerprint,
        "settings": effective_values(settings),
    }
    recording = {"shown": _shown(report, layout, settings), "tree": report.hottest, "config": config}
    try:
        write_text(path, recorded(msgspec.json.encode(recording).decode()))
    except OSError as error:
        raise ReplayError(f"--page: {path} cannot be written: {error.strerror or error}") from error


def _shown(report: Report, layout: KVLayout, settings: Settings) -> ShownService:
    now, stats, tally = time.time(), report.stats, report.tally
    started, slot_bytes = now - report.wall_seconds, layout.block_bytes
    host = stats.host or TierUsage()
    rows = [TrendRow(), *(sample.row for sample in report.timeline.samples)]
    for row in rows:
        row.time += started
    known = (
        round(tally.missed_blocks * tally.missed.known / tally.missed.missed) if tally.missed.missed else 0
    )
    device = ShownState(stats.device.blocks, stats.device.blocks * slot_bytes)
    return ShownService(
        version=__version__,
        state="interrupted" if report.interrupted else "ended",
        started=started,
        time=now,
        fingerprint=settings.fingerprint,
        requests=tally.requests,
        refused=tally.rejected,
        clients_lost=0,
        columns=list(TrendRow.__struct_fields__),
        row=len(rows),
        rows=rows,
        arena_bytes=host.blocks * slot_bytes,
        free_bytes=0,
        host={
            name: ShownState(blocks, blocks * slot_bytes)
            for name, blocks in (("ready", host.ready), ("writing", host.writing), ("free", host.free))
        },
        device=device,
        device_used=stats.device.blocks - stats.device.free,
        storage=_storage(report, slot_bytes),
        storages=_storages(report, layout, slot_bytes),
        missed={"not_stored": tally.missed_blocks - known, "evicted": known},
        hints=stats.hints,
        namespaces=[
            ShownNamespace(
                namespace=layout.fingerprint.hex()[:16],
                model=layout.model,
                revision=layout.revision,
                ranks=layout.tp_size,
                block_size=layout.block_size,
                slot_bytes=slot_bytes,
                bytes=host.blocks * slot_bytes,
                ready=host.ready,
                clients=1,
                tenants=[],
            )
        ],
        more_namespaces=0,
        clients=[_client(report, layout)],
        more_clients=0,
    )


def _client(report: Report, layout: KVLayout) -> ShownClient:
    tally, device = report.tally, report.stats.device
    prompts = tally.prompt_tokens
    return ShownClient(
        name="replay",
        session="",
        namespace=layout.fingerprint.hex()[:16],
        pid=os.getpid(),
        ranks=layout.tp_size,
        connected_seconds=report.wall_seconds,
        silent=False,
        writable_slots=0,
        pinned_runs=0,
        lookups=report.stats.counters.lookups,
        stored=report.stats.counters.blocks_backed_up,
        requests=report.stats.live_requests,
        device_blocks=device.blocks,
        device_used=device.blocks - device.free,
        queued_backups=report.stats.queued_backups,
        plans_in_flight=report.stats.plans_in_flight,
        hit_shares={tier: found / prompts for tier, found in tally.hit_tokens.items()} if prompts else {},
    )


def _storage(report: Report, slot_bytes: int) -> dict[str, Any] | None:
    if not report.tally.storage:
        return None
    usage = report.stats.storage or TierUsage()
    return {
        "connector": report.tally.storage[0].name,
        "state": report.tally.storage[0].state.value,
        "blocks": usage.ready,
        "capacity_blocks": usage.blocks,
        "bytes": usage.ready * slot_bytes,
        "quarantined": usage.quarantined,
        "loading": {"active": False, "done": 0, "total": 0},
    }


def _storages(report: Report, layout: KVLayout, slot_bytes: int) -> list[NamespaceStorageView]:
    if not report.tally.storage:
        return []
    usage = report.stats.storage or TierUsage()
    return [
        NamespaceStorageView(
            namespace=layout.fingerprint.hex()[:16],
            state=report.tally.storage[0].state.value,
            error=next((each.error for each in report.tally.storage if each.error), None),
            blocks=usage.ready,
            capacity_blocks=usage.blocks,
            bytes=usage.ready * slot_bytes,
            quarantined=usage.quarantined,
        )
    ]
