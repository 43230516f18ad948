"""The story of each request in the log, at level DEBUG: what was found, planned, loaded and ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fdcache.manager.requests import Request
from fdcache.manager.results import Allocation, LoadOutcome, MatchResult, MatchStatus, OffloadMatch
from fdcache.metadata import TransferPlan

log = logging.getLogger(__name__)


def _log(request_id: str, event: str, *values: object) -> None:
    log.debug("request %s: " + event, request_id, *values, extra={"request": request_id})


def matched(results: list[MatchResult]) -> None:
    """Log what was found for requests."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for each in results:
        if each.status is MatchStatus.DEFERRED:
            _log(each.request_id, "match deferred")
            continue
        _log(
            each.request_id,
            "matched %d tokens: %d blocks on the device, %d on the host, %d from storage",
            each.num_cached_tokens,
            each.num_device_blocks,
            each.num_host_blocks,
            each.num_storage_blocks,
        )


def offload_matched(result: OffloadMatch) -> OffloadMatch:
    """Log what can be loaded for a request; return it."""
    if not log.isEnabledFor(logging.DEBUG):
        return result
    if result.status is MatchStatus.DEFERRED:
        _log(result.request_id, "match deferred")
    else:
        _log(
            result.request_id,
            "matched %d tokens beyond the device, %d from storage",
            result.num_tokens,
            result.from_storage,
        )
    return result


def allocated(requests: Iterable[Request], results: list[Allocation]) -> None:
    """Log which requests got blocks, what is loaded into them, and why others got none."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for request, each in zip(requests, results, strict=True):
        if each.failure is None:
            load = ", a load is planned" if request.is_loading else ""
            _log(each.request_id, "allocated %d blocks%s", len(each.block_ids), load)
        else:
            _log(each.request_id, "no allocation: %s, %d blocks short", each.failure, each.shortfall)


def load_planned(request_id: str, num_blocks: int) -> None:
    """Log a load that the next plan has."""
    if log.isEnabledFor(logging.DEBUG):
        _log(request_id, "load of %d blocks planned", num_blocks)


def plans_sent(plans: list[TransferPlan]) -> None:
    """Log what the plans of a step copy."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for plan in plans:
        log.debug("%r", plan)


def loads_ended(outcomes: list[LoadOutcome]) -> None:
    """Log how loads have ended."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for each in outcomes:
        reason = f": {each.error_message}" if each.error_message else ""
        _log(each.request_id, "load %s up to token %d%s", each.status, each.recompute_from, reason)


def reads_wanted(request_id: str, num_blocks: int) -> None:
    """Log a request whose blocks may be read from storage."""
    if log.isEnabledFor(logging.DEBUG):
        _log(request_id, "reads from storage may begin, for a path of %d blocks", num_blocks)


def finished(request_ids: Iterable[str], *, preempted: bool = False) -> None:
    """Log requests that have ended."""
    if log.isEnabledFor(logging.DEBUG):
        for request_id in request_ids:
            _log(request_id, "preempted" if preempted else "finished")
