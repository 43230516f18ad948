"""The scenarios: requests and events. Each runs with either cache manager."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from fdcache.storage.connector import BatchResult, RecordBatch
from fdcache.storage.slab import SlabStore
from fdcache.tiers import storage_reads
from tests.peers.fastdeploy_engine import BLOCK, Engine, Job, Options, Result, make_request
from tests.peers.fastdeploy_worker import PREEMPTED

Play = Callable[[Engine], None]


def _tokens(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 50, length)]


def _serve(engine: Engine, jobs: list[Job]) -> None:
    for job in jobs:
        engine.add(job)
    engine.run()


def _shared(engine: Engine) -> None:
    common = _tokens(1, 5 * BLOCK)
    for wave in range(3):
        _serve(engine, [Job(f"{wave}.{i}", common + _tokens(10 * wave + i, 20 + i), 12) for i in range(4)])


def _exact(engine: Engine) -> None:
    for wave in range(3):
        _serve(engine, [Job(f"{wave}.{blocks}", _tokens(blocks, blocks * BLOCK), 5) for blocks in (1, 3, 4)])


def _chunked(engine: Engine) -> None:
    for wave in range(3):
        _serve(engine, [Job(f"{wave}.{i}", _tokens(i, 150 + 11 * i), 6) for i in range(3)])


def _preempted(engine: Engine) -> None:
    _serve(engine, [Job(f"{i}", _tokens(i % 3, 60 + i), 70) for i in range(8)])


def _swapped(engine: Engine) -> None:
    for wave in range(4):
        _serve(engine, [Job(f"{wave}.{i}", _tokens(i, 110), 8) for i in range(6)])


def _mixed(engine: Engine) -> None:
    random = np.random.default_rng(7)
    prefixes = [_tokens(100 + i, int(random.integers(20, 120))) for i in range(6)]
    jobs = []
    for i in range(60):
        prefix = prefixes[int(random.integers(6))]
        prompt = prefix + _tokens(200 + i % 20, int(random.integers(1, 60)))
        jobs.append(Job(f"{i}", prompt, int(random.integers(1, 40))))
    waiting = list(jobs)

    def more() -> bool:
        if waiting and engine.result.steps % 3 == 0:
            engine.add(waiting.pop(0))
        return not waiting and all(job.done for job in jobs)

    engine.run(more)


def _aborts(engine: Engine) -> None:
    for wave in range(3):
        jobs = [
            Job(f"{wave}.{i}", _tokens(i, 90 + i), 30, abort_at=3 + i if i % 2 else None) for i in range(6)
        ]
        _serve(engine, jobs)


def _sleep(engine: Engine) -> None:
    for wave in range(3):
        for again in range(2):
            _serve(engine, [Job(f"{wave}.{again}.{i}", _tokens(i, 100 + i), 8) for i in range(5)])
        engine.sleep_and_wake()


def _killed_worker(engine: Engine) -> None:
    for wave in range(3):
        jobs = [Job(f"{wave}.{i}", _tokens(i, 110), 30) for i in range(5)]
        for job in jobs:
            engine.add(job)
        steps = engine.result.steps
        engine.run(lambda steps=steps: engine.result.steps > steps + 12)  # type: ignore[misc]
        engine.kill_worker(wave % engine.options.ranks)
        engine.run()


def _killed_service(engine: Engine) -> None:
    """Kill the service, process ``SERVICE_PID``, during the second wave."""
    for wave in range(3):
        jobs = [Job(f"{wave}.{i}", _tokens(i, 110), 12) for i in range(6)]
        for job in jobs:
            engine.add(job)
        steps = engine.result.steps
        engine.run(lambda steps=steps: engine.result.steps > steps + 6)  # type: ignore[misc]
        if wave == 1:
            os.kill(int(os.environ["SERVICE_PID"]), signal.SIGKILL)
        engine.run()


def _restarted(engine: Engine) -> None:
    for wave in range(2):
        _serve(engine, [Job(f"{wave}.{i}", _tokens(i, 110), 8) for i in range(6)])
        _wait_for_storage(engine)
        if not wave:
            engine.restart()


def _streamed_alone(engine: Engine) -> None:
    """Read prompts from a slow storage one by one, with nothing else to compute."""
    prompts = [_tokens(i, 150) for i in range(3)]
    _store(engine, prompts)
    with slow_storage():
        for i, prompt in enumerate(prompts):
            _serve(engine, [Job(f"{i}", prompt, 4)])


def _streamed(engine: Engine) -> None:
    """Read prompts from a slow storage while others are computed, preempted and aborted."""
    prompts = [_tokens(i, 150) for i in range(6)]
    for wave in range(3):
        _store(engine, prompts, f"stored.{wave}")
        with slow_storage():
            jobs = [Job(f"{wave}.{i}", prompt, 40) for i, prompt in enumerate(prompts)]
            others = [
                Job(f"{wave}.other.{i}", _tokens(90 + 10 * wave + i, 40), 60, abort_at=9 if i % 2 else None)
                for i in range(6)
            ]
            _serve(engine, [each for pair in zip(others, jobs, strict=True) for each in pair])


def _store(engine: Engine, prompts: list[list[int]], name: str = "stored") -> None:
    """Serve prompts, and start the engine again with them in its storage alone."""
    _serve(engine, [Job(f"{name}.{i}", prompt, 4) for i, prompt in enumerate(prompts)])
    _wait_for_storage(engine)
    engine.restart()


@contextmanager
def slow_storage() -> Iterator[None]:
    """Let each read of a slab file bring two blocks, and take a few milliseconds."""
    get, most = SlabStore.get, storage_reads.MOST_GROUP_BYTES

    def slow_get(self: SlabStore, batch: RecordBatch, *arguments: Any) -> BatchResult:
        time.sleep(0.004)
        return get(self, batch, *arguments)

    SlabStore.get = slow_get  # type: ignore[method-assign, assignment]
    storage_reads.MOST_GROUP_BYTES = 2 * 4096
    try:
        yield
    finally:
        SlabStore.get = get  # type: ignore[method-assign]
        storage_reads.MOST_GROUP_BYTES = most


def _wait_for_storage(engine: Engine) -> None:
    def stored() -> bool:
        stats = engine.manager.core.get_stats()
        return not (stats.queued_stores or stats.plans_in_flight or stats.queued_backups)

    engine.run(stored)


def _images(engine: Engine) -> None:
    """Serve images that are computed in one piece; prompts differ inside an image, so hits end there."""
    image = [7] * 40
    for wave in range(3):
        jobs = []
        for i in range(5):
            prompt = [*_tokens(i, 20 + i), *image, *_tokens(50 + 10 * wave + i, 30)]
            jobs.append(Job(f"{wave}.{i}", prompt, 6, images=[(20 + i, 40, "cat")]))
        _serve(engine, jobs)


def _images_stored(engine: Engine) -> None:
    """Read prompts with images from storage, which a request begins when it is first matched."""
    prompts = [[*_tokens(i, 20 + i), *[7] * 40, *_tokens(50 + i, 60)] for i in range(4)]
    for wave in range(2):
        images = [[(20 + i, 40, "cat")] for i in range(len(prompts))]
        jobs = [
            Job(f"{wave}.{i}", prompt, 6, images=given)
            for i, (prompt, given) in enumerate(zip(prompts, images, strict=True))
        ]
        if not wave:
            _serve(engine, jobs)
            _wait_for_storage(engine)
            engine.restart()
            continue
        with slow_storage():
            _serve(engine, jobs)


def _late_tokens(engine: Engine) -> None:
    """Preempt a request at decode, and give its slot away, while workers still sample for it."""
    from fastdeploy.engine.request import BatchRequest, RequestStatus
    from fastdeploy.output.stream_transfer_data import DecoderState, StreamTransferData

    scheduler, processor = engine.scheduler, engine.tokens
    requests = [make_request(Job(f"{i}", _tokens(i, 40))) for i in range(3)]
    for request in requests:
        request.disaggregate_info = {"role": "decode"}

    def sampled(*slots_and_tokens: tuple[int, int]) -> list[str]:
        data = [
            StreamTransferData(DecoderState.TEXT, slot, tokens=np.array([token]))
            for slot, token in slots_and_tokens
        ]
        return [result.request_id for result in processor._process_batch_output_use_zmq(data)]

    def check(holds: bool, problem: str) -> None:
        if not holds:
            engine.result.errors.append(problem)

    running, stopped, new = requests
    for request in (running, stopped):
        check(scheduler.preallocate_resource_in_d(request), "there is no room for the first requests")
        scheduler.tasks_list[request.idx] = request  # as with its first token
        request.status = RequestStatus.RUNNING_DECODE
        scheduler.running.append(request)
        processor.tokens_counter[request.request_id] = 1
    check(sampled((running.idx, 4), (stopped.idx, 4)) == ["0", "1"], "tokens of running requests are lost")
    scheduler._trigger_preempt(stopped, scheduler.total_block_number(), [], BatchRequest())
    slot = stopped.idx
    check(not scheduler.preallocate_resource_in_d(new), "a slot was given away while workers sample for it")
    check(sampled((running.idx, 5), (slot, 7)) == ["0"], "a late token has changed what others get")
    check(not scheduler.preallocate_resource_in_d(new), "a late token has freed the slot")
    check(sampled((running.idx, 6), (slot, PREEMPTED)) == ["0"], "the last token has changed what others get")
    check(scheduler.preallocate_resource_in_d(new) and new.idx == slot, "the slot was not free after that")
    check(sampled((running.idx, 8), (slot, 9)) == ["0"], "a token came to a request that has not begun")
    engine.result.finished = len(running.output_token_ids)


_BASE = Options(blocks=40, host_blocks=128)
SCENARIOS: dict[str, tuple[Options, Play]] = {
    "shared": (replace(_BASE, policy="write_through_selective"), _shared),
    "exact": (_BASE, _exact),
    "chunked": (replace(_BASE, budget=64), _chunked),
    "preempted": (replace(_BASE, blocks=26), _preempted),
    "swapped, write_through": (replace(_BASE, blocks=24, policy="write_through"), _swapped),
    "swapped, write_through_selective": (
        replace(_BASE, blocks=24, policy="write_through_selective"),
        _swapped,
    ),
    "swapped, write_back": (replace(_BASE, blocks=24), _swapped),
    "mixed": (replace(_BASE, blocks=48, budget=128), _mixed),
    "delayed workers": (replace(_BASE, blocks=26, delay=4), _mixed),
    "aborts": (replace(_BASE, blocks=30), _aborts),
    "resize": (replace(_BASE, blocks=30, profiled_blocks=12), _swapped),
    "sleep": (replace(_BASE, blocks=24), _sleep),
    "MTP": (replace(_BASE, blocks=30, mtp=True), _swapped),
    "images": (replace(_BASE, blocks=24, whole_images=True), _images),
    "failed loads": (replace(_BASE, blocks=24, failing=0.4), _swapped),
}
"""Options and play of each scenario."""

FDCACHE_ONLY: dict[str, tuple[Options, Play]] = {
    "killed worker": (replace(_BASE, blocks=24, ranks=2, processes=True), _killed_worker),
    "killed service": (replace(_BASE, blocks=24), _killed_service),
    "restart with storage": (replace(_BASE, blocks=40, policy="write_through"), _restarted),
    "streams alone": (replace(_BASE, blocks=40, policy="write_through"), _streamed_alone),
    "images in storage": (
        replace(_BASE, blocks=40, policy="write_through", whole_images=True),
        _images_stored,
    ),
    "late tokens": (replace(_BASE, role="decode"), _late_tokens),
    "streams beside others": (replace(_BASE, blocks=60, policy="write_through", delay=3), _streamed),
}
"""Scenarios that FastDeploy's own manager does not support."""


def play(name: str, manager: str, port: int, **changes: Any) -> Result:
    """Run one scenario in this process."""
    options, act = {**SCENARIOS, **FDCACHE_ONLY}[name]
    engine = Engine(replace(options, manager=manager, port=port, **changes))
    try:
        act(engine)
        if manager == "fdcache":
            counters = engine.manager.core.get_stats().counters
            engine.result.device_hits = counters.device_hit_tokens
            engine.result.host_hits = counters.host_hit_tokens
            engine.result.storage_hits = counters.storage_hit_tokens
            loads = engine.manager.core.get_stats().loads
            engine.result.token_seconds = loads.prefill_token_seconds
            engine.manager.core.check_integrity()
    finally:
        engine.close()
    return engine.result
