"""The scheduler side."""

from fdcache.manager.cache_manager import CacheManager
from fdcache.manager.keyed import KeyedRequest
from fdcache.manager.offers import OfferEnd
from fdcache.manager.offload import OffloadManager
from fdcache.manager.own_device import ManagerState
from fdcache.manager.requests import Request
from fdcache.manager.results import (
    Allocation,
    AllocationFailure,
    LoadOutcome,
    LoadStatus,
    MatchResult,
    MatchStatus,
    OffloadMatch,
)
from fdcache.metadata import NO_BLOCK

__all__ = [
    "NO_BLOCK",
    "Allocation",
    "AllocationFailure",
    "CacheManager",
    "KeyedRequest",
    "LoadOutcome",
    "LoadStatus",
    "ManagerState",
    "MatchResult",
    "MatchStatus",
    "OfferEnd",
    "OffloadManager",
    "OffloadMatch",
    "Request",
]
