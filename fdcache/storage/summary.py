"""What a folder of storage files holds, in figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from fdcache.storage.offline import Damaged, SlabContents


def summarize(files: Sequence[SlabContents | Damaged], *, verified: bool) -> dict[str, Any]:
    """The figures as plain JSON values. A block counts once for each rank that holds its part.

    ``corrupt_blocks`` are records that a check refused and headers that are damaged; without a check, headers only.
    """
    whole = [one for one in files if isinstance(one, SlabContents)]
    damaged = [one for one in files if isinstance(one, Damaged)]
    now = time.time()
    by_namespace: dict[str, list[SlabContents]] = {}
    for contents in whole:
        by_namespace.setdefault(contents.namespace, []).append(contents)
    namespaces = [_namespace(name, group, now) for name, group in sorted(by_namespace.items())]
    return {
        "blocks": sum(len(contents.slots) for contents in whole),
        "bytes": sum(_bytes(contents) for contents in whole),
        "verified": verified,
        "corrupt_blocks": sum(_corrupt(contents) for contents in whole),
        "namespaces": namespaces,
        "files": [_file(contents) for contents in whole],
        "damaged_files": [{"path": str(one.path), "reason": one.reason} for one in damaged],
    }


def _bytes(contents: SlabContents) -> int:
    return len(contents.slots) * contents.superblock.record_bytes


def _corrupt(contents: SlabContents) -> int:
    return len(contents.corrupt) + contents.bad_headers


def _namespace(name: str, group: Sequence[SlabContents], now: float) -> dict[str, Any]:
    written = np.concatenate([contents.written_ms for contents in group]) / 1000.0
    depths = np.concatenate([contents.depths for contents in group])
    reachable = depths[depths >= 0]
    layout = group[0].layout
    return {
        "namespace": name,
        "model": layout.model,
        "revision": layout.revision,
        "block_size": layout.block_size,
        "record_bytes": layout.record_bytes,
        "ranks": sorted(contents.superblock.rank for contents in group),
        "tp_size": layout.tp_size,
        "blocks": len(depths),
        "bytes": sum(_bytes(contents) for contents in group),
        "capacity_blocks": sum(contents.superblock.slots for contents in group),
        "unreachable_blocks": int((depths < 0).sum()),
        "first_blocks": int((depths == 0).sum()),
        "mean_depth": round(float(reachable.mean()), 1) if len(reachable) else None,
        "deepest": int(reachable.max()) if len(reachable) else None,
        "oldest_seconds": round(now - float(written.min()), 1) if len(written) else None,
        "newest_seconds": round(now - float(written.max()), 1) if len(written) else None,
        "corrupt_blocks": sum(_corrupt(contents) for contents in group),
    }


def _file(contents: SlabContents) -> dict[str, Any]:
    status = contents.path.stat()
    return {
        "path": str(contents.path),
        "namespace": contents.namespace,
        "rank": contents.superblock.rank,
        "blocks": len(contents.slots),
        "file_bytes": status.st_size,
        "disk_bytes": status.st_blocks * 512,
        "corrupt_slots": contents.corrupt.tolist(),
        "damaged_headers": contents.bad_headers,
    }
