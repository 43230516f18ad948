"""Groups of a hybrid model's layers, and the keys of their records.

Layers of a group share block tables. All groups have blocks of the same size in tokens and in bytes, which the engine
takes from one pool of device blocks. A page is the blocks of all groups for the same tokens, and a prefix of pages is
one path of records: those of the first page, in the order of the groups, then those of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fdcache.errors import UnsupportedLayoutError
from fdcache.metadata import HashArray


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables. ``kind`` is the engine's word for them, such as "sliding window".

    ``window``: tokens that they attend to, 0 for all; None for layers of another kind, such as state-space layers.
    """

    kind: str
    num_layers: int
    block_size: int
    window: int | None = 0


def windows_of(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Return ``KVLayout.windows`` for these groups.

    Raises ``UnsupportedLayoutError`` naming the groups of a model that fdcache cannot serve, and the remedy: layers of
    other kinds than full and sliding-window attention, and groups whose blocks have different sizes.
    """
    windows = [group.window for group in groups if group.window is not None]
    if groups and len(windows) == len(groups) and len({group.block_size for group in groups}) == 1:
        return () if windows == [0] else tuple(windows)
    listed = "; ".join(
        f"{group.kind}: {group.num_layers} layers, blocks of {group.block_size} tokens" for group in groups
    )
    raise UnsupportedLayoutError(
        f"the model's cache has {len(groups)} groups ({listed or 'no layers'}); fdcache serves groups of full and "
        "sliding-window attention whose blocks have the same size. Let the engine keep all layers in one group of "
        "full attention (vLLM: --disable-hybrid-kv-cache-manager), or serve this model without fdcache"
    )


def record_keys(hashes: HashArray, num_groups: int) -> HashArray:
    """Return the keys of the records of these pages: one for each group, the last of which is the page's hash.

    Since a host tier is closed under prefixes, a page whose hash is found is there in all groups.
    """
    if num_groups == 1:
        return hashes
    keys = np.repeat(hashes, num_groups, axis=0)
    marks = np.arange(num_groups - 1, -1, -1, dtype=np.uint8)
    keys ^= np.tile(marks, len(hashes))[:, np.newaxis]
    return keys
