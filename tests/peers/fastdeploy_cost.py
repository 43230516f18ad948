"""Time in FastDeploy's ``schedule()`` with many running requests, for either cache manager."""

from __future__ import annotations

import statistics
import time
from typing import Any

from tests.peers.fastdeploy_engine import Job, Options, make_config, make_request, make_scheduler

RUNNING = 128
BLOCKS = 20_000
_STEPS = 200


def schedule_cost(manager: str, outputs: int, port: int) -> dict[str, float]:
    """Return the CPU milliseconds of a decode step, median and mean, with 20,000 blocks."""
    options = Options(
        manager=manager,
        blocks=BLOCKS,
        host_blocks=BLOCKS,
        seqs=RUNNING,
        budget=8192,
        length=8192,
        block=64,
        port=port,
    )
    scheduler = make_scheduler(make_config(options), options)
    if manager == "fastdeploy":
        from fastdeploy.cache_manager.v1.cache_utils import get_request_block_hasher

        hasher = get_request_block_hasher(block_size=scheduler.config.cache_config.block_size)
    requests: list[Any] = []
    for index in range(RUNNING):
        request = make_request(Job(f"{index}", [index + 3] * 64, 8000))
        if manager == "fastdeploy":
            request.set_block_hasher(hasher)
        scheduler.add_request(request)
        requests.append(request)
    while scheduler.waiting:
        scheduler.schedule()
    for start in range(0, outputs, 8):
        _decode(requests, min(8, outputs - start))
        scheduler.schedule()
    taken = []
    for _ in range(_STEPS):
        _decode(requests, 1)
        since = time.thread_time()
        scheduler.schedule()
        taken.append(time.thread_time() - since)
    if manager == "fdcache":
        scheduler.cache_manager.close()
    scheduler.need_block_num_signal.clear()
    return {"median_ms": 1000 * statistics.median(taken), "mean_ms": 1000 * statistics.mean(taken)}


def _decode(requests: list[Any], tokens: int) -> None:
    from fastdeploy.engine.request import RequestStatus

    for request in requests:
        request.status = RequestStatus.RUNNING_DECODE
        request.output_token_ids.extend([5] * tokens)
