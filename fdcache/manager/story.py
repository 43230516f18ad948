"""The story of each request in the log, at level DEBUG: what was found, planned, loaded and ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fdcache import tracing
from fdcache.manager.keyed import OffloadRequest
from fdcache.manager.requests import Request
from fdcache.manager.results import Allocation, LoadOutcome, MatchResult, MatchStatus, OffloadMatch
from fdcache.metadata import TransferPlan

log = logging.getLogger(__name__)


class Audience:
    """Whether anyone reads the story, as asked with the last match or a step's plans: the calls between ask nobody."""

    listens = False

    def ask(self) -> bool:
        """Ask anew."""
        self.listens = tracing.spans is not None or log.isEnabledFor(logging.DEBUG)
        return self.listens


audience = Audience()


def _log(request_id: str, event: str, *values: object) -> None:
    log.debug("request %s: " + event, request_id, *values, extra={"request": request_id})


def match_begins(requests: Iterable[OffloadRequest]) -> int:
    """Return the time at which the match of these requests begins, for its spans; 0 if there are none."""
    return 0 if tracing.spans is None else tracing.spans.begin_match([each.request_id for each in requests])


def _trace_match(request_id: str, began: int, **figures: str | int) -> None:
    assert tracing.spans is not None
    named = {f"fdcache.{name}": figure for name, figure in figures.items()}
    tracing.spans.of_request("match", request_id, began, named)


def matched(results: list[MatchResult], began: int) -> None:
    """Log what was found for requests, and record their spans."""
    if tracing.spans is not None:
        tracing.spans.end_match()
        for each in results:
            _trace_match(
                each.request_id,
                began,
                status=each.status.value,
                tokens=each.num_cached_tokens,
                device_blocks=each.num_device_blocks,
                host_blocks=each.num_host_blocks,
                storage_blocks=each.num_storage_blocks,
            )
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


def offload_matched(result: OffloadMatch, began: int) -> OffloadMatch:
    """Log what can be loaded for a request, and record its span; return it."""
    if tracing.spans is not None:
        tracing.spans.end_match()
        _trace_match(
            result.request_id,
            began,
            status=result.status.value,
            tokens=result.num_tokens,
            storage_tokens=result.from_storage,
        )
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


def allocated(demands: list[tuple[Request, int]], results: list[Allocation]) -> None:
    """Log which requests got blocks, what is loaded into them, and why others got none."""
    for (request, _), each in zip(demands, results, strict=True):
        if tracing.spans is not None and each.failure is None and request.is_loading:
            tracing.spans.load_begins(each.request_id, len(each.block_ids))
    if not log.isEnabledFor(logging.DEBUG):
        return
    for (request, _), each in zip(demands, results, strict=True):
        if each.failure is None:
            load = ", a load is planned" if request.is_loading else ""
            _log(each.request_id, "allocated %d blocks%s", len(each.block_ids), load)
        else:
            _log(each.request_id, "no allocation: %s, %d blocks short", each.failure, each.shortfall)


def load_planned(request_id: str, num_blocks: int) -> None:
    """Log a load that the next plan has."""
    if tracing.spans is not None:
        tracing.spans.load_begins(request_id, num_blocks)
    if log.isEnabledFor(logging.DEBUG):
        _log(request_id, "load of %d blocks planned", num_blocks)


def load_withdrawn(request_id: str) -> None:
    """Log a load that the engine has withdrawn before a plan had it."""
    if tracing.spans is not None:
        tracing.spans.load_ended(request_id, "withdrawn", None)
    if log.isEnabledFor(logging.DEBUG):
        _log(request_id, "load withdrawn")


def plans_sent(plans: list[TransferPlan]) -> None:
    """Log what the plans of a step copy."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    for plan in plans:
        log.debug("%r", plan)


def loads_ended(outcomes: list[LoadOutcome]) -> None:
    """Log how loads have ended, and record their spans."""
    if tracing.spans is not None:
        for each in outcomes:
            tracing.spans.load_ended(each.request_id, each.status.value, each.error_message)
    if not log.isEnabledFor(logging.DEBUG):
        return
    for each in outcomes:
        reason = f": {each.error_message}" if each.error_message else ""
        _log(each.request_id, "load %s up to token %d%s", each.status, each.recompute_from, reason)


def reads_wanted(request_id: str, num_blocks: int) -> None:
    """Log a request whose blocks may be read from storage."""
    if log.isEnabledFor(logging.DEBUG):
        _log(request_id, "reads from storage may begin, for a path of %d blocks", num_blocks)


def finished(requests: Iterable[OffloadRequest], *, preempted: bool = False) -> None:
    """Log requests that have ended."""
    if log.isEnabledFor(logging.DEBUG):
        for request in requests:
            _log(request.request_id, "preempted" if preempted else "finished")
