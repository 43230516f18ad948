"""Faults on purpose: a load that fails, and a block of the storage with a changed byte."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.vllm.shapes import BLOCK
from benchmarks.vllm.timing import FOLDER
from fdcache_cli.slab_files import Damaged, read_file

CHOSEN, MADE = "chosen.fault", "made.fault"


def corrupt(folder: Path) -> Path:
    """Change a byte in the middle block of the longest path in a folder's slab file; return the file.

    Raises ``ValueError`` if the folder has no such file or it has no blocks.
    """
    files = sorted(folder.glob("*.slab"))
    if not files:
        raise ValueError(f"{folder} has no slab file")
    contents = read_file(files[0])
    if isinstance(contents, Damaged) or not len(contents.slots):
        raise ValueError(f"{files[0]} has no blocks")
    order = np.argsort(contents.depths, kind="stable")
    middle = order[np.searchsorted(contents.depths[order], contents.depths.max() // 2)]
    record_bytes = contents.layout.record_bytes
    at = contents.superblock.record_offset + int(contents.slots[middle]) * record_bytes + 5
    with files[0].open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))
    return files[0]


@cache
def choosing(base: type[Any]) -> type[Any]:
    """Return a connector that chooses the middle block of its first load and has a fault made when that has ended.

    The scheduler's side leaves the block's id in a file for the worker's, which may be in another process.
    """

    class Choosing(base):  # type: ignore[misc]
        """Chooses a block; what happens to it is of ``make_fault``."""

        _local = 0

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            self._local = num_computed_tokens
            return super().get_num_new_matched_tokens(request, num_computed_tokens)

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            count = num_external_tokens // BLOCK
            if count > 1 and not (_folder() / CHOSEN).exists():
                (ids,) = blocks.get_block_ids()
                chosen = [request.request_id, ids[self._local // BLOCK + count // 2]]
                (_folder() / CHOSEN).write_text(json.dumps(chosen))

        def get_finished(self, finished_req_ids: set[str]) -> Any:
            found = super().get_finished(finished_req_ids)
            if found[1] and not made() and (_folder() / CHOSEN).exists():
                request, block = json.loads((_folder() / CHOSEN).read_text())
                if request in found[1]:
                    self.make_fault(block)
                    (_folder() / MADE).touch()
            return found

    return Choosing


@cache
def failing(base: type[Any]) -> type[Any]:
    """Return a connector that reports the middle block of its first load as failed, otherwise like ``base``."""

    class Failing(choosing(base)):  # type: ignore[misc]
        """Reports the block in the step that reports the load as finished."""

        _failed: frozenset[int] = frozenset()

        def make_fault(self, block: int) -> None:
            self._failed = frozenset({block})

        def get_block_ids_with_load_errors(self) -> set[int]:
            failed, self._failed = self._failed, frozenset()
            return set(super().get_block_ids_with_load_errors() or ()) | failed

    return Failing


@cache
def spoiling(base: type[Any]) -> type[Any]:
    """Return a connector that clears the middle block of its first load, which every comparison must notice.

    Two blocks in each other's places would not do: keys carry their positions, and attention does not see the order.
    """

    class Spoiling(choosing(base)):  # type: ignore[misc]
        """Clears the block in all layers, on the device, once it has been loaded."""

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            super().register_kv_caches(kv_caches)
            self._pages = list(kv_caches.values())

        def make_fault(self, block: int) -> None:
            for pages in self._pages:
                pages[block].zero_()

    return Spoiling


def made() -> bool:
    """Return True if this engine's fault has been made."""
    return (_folder() / MADE).exists()


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def __getattr__(name: str) -> Any:
    makers = {"FailingConnector": failing, "SpoilingConnector": spoiling}
    if name not in makers:
        raise AttributeError(name)
    from fdcache.integrations.vllm import FdcacheConnector

    return makers[name](FdcacheConnector)
