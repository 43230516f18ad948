"""Groups of a hybrid model's cache: layers that share block tables, and which of their blocks a reused prefix needs.

A ``KVLayout`` has the layers of one group. Models of several groups are not supported yet: docs/embedding.md says what
is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fdcache.errors import UnsupportedLayoutError


class HitPolicy(StrEnum):
    """The blocks of a group that an engine needs to go on after a reused prefix."""

    EVERY_BLOCK = "every block"
    LAST_BLOCKS = "the last blocks"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables. ``kind`` is the engine's word for them, such as "sliding window of 4096"."""

    kind: str
    num_layers: int
    block_size: int
    hit_policy: HitPolicy = HitPolicy.EVERY_BLOCK


def require_one_group(groups: Sequence[CacheGroup]) -> CacheGroup:
    """Return the only group of a model that fdcache can serve.

    Raises ``UnsupportedLayoutError`` naming the groups of any other model, and the remedy: records of one group alone
    would give wrong tokens.
    """
    if len(groups) == 1 and groups[0].hit_policy is HitPolicy.EVERY_BLOCK:
        return groups[0]
    listed = "; ".join(
        f"{group.kind}: {group.num_layers} layers, blocks of {group.block_size} tokens, a hit needs "
        f"{group.hit_policy.value}"
        for group in groups
    )
    raise UnsupportedLayoutError(
        f"the model's cache has {len(groups)} groups ({listed or 'no layers'}); fdcache serves one group of which a "
        "hit needs every block. Let the engine keep all layers in one group of full attention (vLLM: "
        "--disable-hybrid-kv-cache-manager), or serve this model without fdcache"
    )
