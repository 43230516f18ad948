"""The scheduler side."""

from fdcache.manager.cache_manager import CacheManager, ManagerState
from fdcache.manager.requests import Request
from fdcache.manager.results import (
    Allocation,
    AllocationFailure,
    LoadOutcome,
    LoadStatus,
    MatchResult,
    MatchStatus,
)

__all__ = [
    "Allocation",
    "AllocationFailure",
    "CacheManager",
    "LoadOutcome",
    "LoadStatus",
    "ManagerState",
    "MatchResult",
    "MatchStatus",
    "Request",
]
