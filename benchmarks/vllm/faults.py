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
from fdcache.storage.offline import Damaged, read_file

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
def failing(base: type[Any]) -> type[Any]:
    """Return a connector whose first load fails in its middle block, otherwise like ``base``.

    The scheduler's side leaves the block's id in a file for the worker's, which may be in another process.
    """

    class Failing(base):  # type: ignore[misc]
        """Reports one block of the first load as failed, in the step that reports the load as finished."""

        _local = 0
        _ended = False

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
            if found[1] and not (_folder() / MADE).exists() and (_folder() / CHOSEN).exists():
                request, _ = json.loads((_folder() / CHOSEN).read_text())
                self._ended = request in found[1]
            return found

        def get_block_ids_with_load_errors(self) -> set[int]:
            errors: set[int] = set(super().get_block_ids_with_load_errors() or ())
            if self._ended:
                self._ended = False
                errors.add(json.loads((_folder() / CHOSEN).read_text())[1])
                (_folder() / MADE).touch()
            return errors

    return Failing


@cache
def misplacing(base: type[Any]) -> type[Any]:
    """Return a connector that loads one block into a wrong place, which every comparison must notice.

    Two blocks in each other's places would not do: keys carry their positions, and attention does not see the order.
    """

    class Misplacing(base):  # type: ignore[misc]
        """Is told that the second block of a load belongs where the request's last one is; nothing is loaded there."""

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens // BLOCK > 1:
                (group,) = blocks.blocks
                group = list(group)
                group[1] = group[-1]
                blocks = type(blocks)((group,))
                (_folder() / MADE).touch()
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    return Misplacing


def made() -> bool:
    """Return True if this engine's fault has been made."""
    return (_folder() / MADE).exists()


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def __getattr__(name: str) -> Any:
    makers = {"FailingConnector": failing, "MisplacingConnector": misplacing}
    if name not in makers:
        raise AttributeError(name)
    from fdcache.integrations.vllm import FdcacheConnector

    return makers[name](FdcacheConnector)
