"""fdcache: the KV-cache layer of an LLM serving engine.

    from fdcache import CacheManager, KVLayout

Importing the package imports nothing else; each public name imports its module when it is first used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing takes longer than this package
if TYPE_CHECKING:
    from typing import Any

    from fdcache.controller.cache_controller import CacheController
    from fdcache.controller.layers import LayerDoneCounter
    from fdcache.errors import FdcacheError, LayerSwapTimeoutError
    from fdcache.hashing import MultimodalItem
    from fdcache.hints import Hint, HintKind, HintOutcome, HintStatus
    from fdcache.layout import KVLayout
    from fdcache.layout_planes import Plane, PlaneKind
    from fdcache.manager import (
        Allocation,
        CacheManager,
        KeyedRequest,
        LoadOutcome,
        LoadStatus,
        MatchResult,
        MatchStatus,
        OffloadManager,
        OffloadMatch,
        Request,
    )
    from fdcache.metadata import (
        BlockNode,
        CacheLevel,
        CacheStatus,
        CacheSwapMetadata,
        TransferPlan,
        TransferReport,
        TransferResult,
    )
    from fdcache.settings.cache import CacheSettings, CopySettings, EvictionPolicy, WritePolicy
    from fdcache.tasks import AsyncTaskHandler
    from fdcache.tiers.pool import BlockPool

__version__ = "0.1.0"

_HOMES = {
    "fdcache.controller.cache_controller": ("CacheController",),
    "fdcache.controller.layers": ("LayerDoneCounter",),
    "fdcache.errors": ("FdcacheError", "LayerSwapTimeoutError"),
    "fdcache.hashing": ("MultimodalItem",),
    "fdcache.hints": ("Hint", "HintKind", "HintOutcome", "HintStatus"),
    "fdcache.layout": ("KVLayout",),
    "fdcache.layout_planes": ("Plane", "PlaneKind"),
    "fdcache.manager": (
        "Allocation",
        "CacheManager",
        "KeyedRequest",
        "LoadOutcome",
        "LoadStatus",
        "MatchResult",
        "MatchStatus",
        "OffloadManager",
        "OffloadMatch",
        "Request",
    ),
    "fdcache.metadata": (
        "BlockNode",
        "CacheLevel",
        "CacheStatus",
        "CacheSwapMetadata",
        "TransferPlan",
        "TransferReport",
        "TransferResult",
    ),
    "fdcache.settings.cache": ("CacheSettings", "EvictionPolicy", "CopySettings", "WritePolicy"),
    "fdcache.tasks": ("AsyncTaskHandler",),
    "fdcache.tiers.pool": ("BlockPool",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Allocation",
    "AsyncTaskHandler",
    "BlockNode",
    "BlockPool",
    "CacheController",
    "CacheLevel",
    "CacheManager",
    "CacheSettings",
    "CacheStatus",
    "CacheSwapMetadata",
    "CopySettings",
    "EvictionPolicy",
    "FdcacheError",
    "Hint",
    "HintKind",
    "HintOutcome",
    "HintStatus",
    "KVLayout",
    "KeyedRequest",
    "LayerDoneCounter",
    "LayerSwapTimeoutError",
    "LoadOutcome",
    "LoadStatus",
    "MatchResult",
    "MatchStatus",
    "MultimodalItem",
    "OffloadManager",
    "OffloadMatch",
    "Plane",
    "PlaneKind",
    "Request",
    "TransferPlan",
    "TransferReport",
    "TransferResult",
    "WritePolicy",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fdcache' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
