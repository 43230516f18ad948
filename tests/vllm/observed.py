"""An engine in this process with a look at what its connector does."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fdcache.controller.arena import HostArena
from fdcache.integrations.vllm.planes import page_tensor
from fdcache.integrations.vllm.scheduler import SchedulerSide
from fdcache.integrations.vllm.worker import WorkerSide
from fdcache.manager import OffloadManager
from fdcache.tiers.statistics import Counters
from tests.service_help import TIMEOUT
from tests.vllm.engine import generate, scheduler_of


def told(records: Sequence[logging.LogRecord], text: str) -> list[str]:
    """Return the messages that contain a text, each record once, however many handlers have had it."""
    found = {id(each): each.getMessage() for each in records if text in each.getMessage()}
    return list(found.values())


def settle(llm: Any) -> None:
    """Step until no request is left and no copy is in flight."""
    core = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        scheduler = core.scheduler
        if not (scheduler.has_requests() or core.batch_queue or scheduler.connector.has_pending_push_work()):
            return
        core.step_fn()
    raise AssertionError("copies do not end")


class Observed:
    """An engine, its scheduler, and both sides of its connector."""

    def __init__(self, llm: Any, *, index: int | None = None) -> None:
        """``index``: of fdcache's connector among those of an outer one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        def inner(connector: Any) -> Any:
            return connector if index is None else connector._connectors[index]

        self.llm = llm
        self.core = llm.llm_engine
        self.scheduler = scheduler_of(llm)
        self.connector = inner(self.scheduler.connector)
        self.side: SchedulerSide = self.connector._scheduler
        self.manager: OffloadManager = self.side.manager
        self.worker_connector = inner(get_kv_transfer_group())
        self.worker: WorkerSide = self.worker_connector._worker
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model = runner.model
        layout = self.manager.layout
        blocks = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.tensors = [page_tensor([tensor], layout.planes[0].nbytes, blocks) for tensor in runner.kv_caches]
        self._number = 0

    @property
    def counters(self) -> Counters:
        """The manager's counters now."""
        return self.manager.get_stats().counters

    def answers(
        self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, **options: Any
    ) -> list[list[int]]:
        """Return the tokens that the engine answers with."""
        return generate(self.llm, prompts, num_tokens, **options)

    def add(self, prompt: Sequence[int], num_tokens: int = 8, **options: Any) -> str:
        """Add a request without waiting for it; return its id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self._number += 1
        name = f"added-{self._number}"
        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True)
        self.core.add_request(name, TokensPrompt(prompt_token_ids=list(prompt), **options), parameters)
        return name

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.core.abort_request([name])

    def internal(self, name: str) -> str | None:
        """Return the scheduler's id of a request, None if it has none now."""
        return next((found for found in self.scheduler.requests if found.startswith(name)), None)

    def status(self, name: str) -> str | None:
        """Return the status of a request, None if it has ended."""
        found = self.internal(name)
        return None if found is None else self.scheduler.requests[found].status.name

    def steps_until(self, condition: Callable[[], object]) -> dict[str, list[int]]:
        """Step until something is true; return the answers that ended meanwhile."""
        ended: dict[str, list[int]] = {}
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if condition():
                return ended
            for output in self.core.step():
                if output.finished:
                    ended[output.request_id] = list(output.outputs[0].token_ids)
        raise AssertionError(f"not within {TIMEOUT:g} s of steps")

    def finish(self) -> dict[str, list[int]]:
        """Step until no request is left; return their answers."""
        return self.steps_until(lambda: not self.core.has_unfinished_requests())

    def settle(self) -> None:
        """Step until no copy is in flight."""
        settle(self.llm)

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, so that only the connector has the blocks."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    @contextmanager
    def withheld_loads(self) -> Iterator[None]:
        """Let no load end meanwhile."""
        poll = self.worker.poll

        def nothing() -> set[str]:
            return set()

        self.worker.poll = nothing  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.worker.poll = poll  # type: ignore[method-assign]

    def corrupt_host_records(self) -> None:
        """Invert every byte in host memory."""
        assert self.worker._controller is not None
        arena = self.worker._controller.host_arena
        assert isinstance(arena, HostArena)
        for extent in arena.extents:
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent.nbytes).from_address(extent.address))
            np.invert(memory, out=memory)

    def assert_nothing_is_held(self) -> None:
        """Every block, request, pin and plan has been given back, and the tiers are consistent."""
        self.settle()
        pool = self.scheduler.kv_cache_manager.block_pool
        stats = self.manager.get_stats()
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # the null block is never free
        assert not self.scheduler.requests
        assert not self.side._running
        assert stats.plans_in_flight == 0
        assert stats.host is not None
        if self.manager.settings.server is None:  # a service has other engines, and slots granted ahead
            assert stats.host.pins == stats.host.leases == stats.host.writing == 0
        assert self.side.inconsistencies == 0
        self.manager.check_integrity()
