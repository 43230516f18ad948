"""An engine around FastDeploy's real scheduler, with its engine loop and token processor, without a GPU."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fdcache.integrations.fastdeploy.link import WorkerLost
from tests.faults import FailingLoadsDevice
from tests.peers.fastdeploy_worker import PREEMPTED, ControllerCopier, FastDeployCopier, Worker, answer_to

BLOCK = 16
LAYERS = 2
HEAD_DIM = 4
_STALL_STEPS = 600


@dataclass
class Options:
    """Options of an engine.

    ``manager`` is fdcache or fastdeploy; ``delay`` is loop turns per step of the workers. ``behind``: they compute a
    step before they take the batch that was made for it.
    """

    manager: str = "fdcache"
    policy: str = "write_back"
    blocks: int = 40
    host_blocks: int = 128
    budget: int = 256
    seqs: int = 8
    ranks: int = 1
    delay: int = 1
    behind: bool = False
    mtp: bool = False
    failing: float = 0.0
    profiled_blocks: int | None = None
    length: int = 320
    block: int = BLOCK
    port: int = 0
    processes: bool = False
    whole_images: bool = False
    role: str = "mixed"
    storage_backend: str | None = None


@dataclass
class Job:
    """A request to serve; it is aborted after ``abort_at`` output tokens."""

    name: str
    prompt: list[int]
    outputs: int = 8
    abort_at: int | None = None
    images: list[tuple[int, int, str]] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    request: Any = None
    done: bool = False


@dataclass
class Result:
    """Result of a scenario."""

    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    wrong_answers: list[str] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    checked: int = 0
    stalled: bool = False
    device_hits: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    ahead: int = 0
    token_seconds: float = 0.0
    steps: int = 0
    errors: list[str] = field(default_factory=list)


def make_config(options: Options) -> Any:
    """Return FastDeploy's real configuration of a tiny model."""
    from fastdeploy import config
    from fastdeploy.scheduler import SchedulerConfig

    model = SimpleNamespace(
        model="tiny", dtype="float32", num_hidden_layers=LAYERS, num_key_value_heads=1, num_attention_heads=1,
        head_dim=HEAD_DIM, hidden_size=HEAD_DIM, max_model_len=options.length, architectures=["Tiny"], enable_mm=False,
        quantization=None, quantization_config=None, revision="master", version="init", eos_tokens_lens=1,
        mm_max_tokens_per_item=None, enable_logprob=False, kv_lora_rank=0,
    )  # fmt: skip
    cache = config.CacheConfig(
        {
            "model_cfg": model,
            "block_size": options.block,
            "num_gpu_blocks_override": options.blocks,
            "num_cpu_blocks": options.host_blocks,
            "enable_prefix_caching": True,
            "write_policy": options.policy,
            "disable_chunked_mm_input": options.whole_images,
            "kvcache_storage_backend": options.storage_backend,
        }
    )
    cache.enc_dec_block_num = 1
    speculative = {"method": "mtp", "num_speculative_tokens": 1} if options.mtp else {}
    return config.FDConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=config.ParallelConfig(
            {"engine_worker_queue_port": str(options.port), "tensor_parallel_size": options.ranks}
        ),
        load_config=config.LoadConfig({}),
        scheduler_config=SchedulerConfig(
            {
                "max_num_seqs": options.seqs,
                "max_num_batched_tokens": options.budget,
                "splitwise_role": options.role,
            }
        ),
        graph_opt_config=config.GraphOptimizationConfig({}),
        speculative_config=config.SpeculativeConfig(speculative),
        test_mode=True,
    )


def make_scheduler(config: Any, options: Options) -> Any:
    """Return FastDeploy's real scheduler, with the cache manager that it makes itself."""
    from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1

    return ResourceManagerV1(options.seqs, config, options.ranks, options.role)


def make_token_processor(config: Any, scheduler: Any, clients: Any) -> Any:
    """Return FastDeploy's real token processor, without its message queue."""
    from fastdeploy.output.token_processor import TokenProcessor

    processor = TokenProcessor(config, clients, engine_worker_queue=None, split_connector=None)
    processor.set_resource_manager(scheduler)
    return processor


class Failures:
    """Injected load failures; ``garbage`` holds the device blocks of loads that failed in this step."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._random = np.random.default_rng(seed)
        self.garbage: set[int] = set()

    def choose(self, pairs: Any) -> Sequence[int]:
        if self._random.random() >= self._rate:
            return []
        chosen = [int(self._random.integers(len(pairs)))]
        self.garbage.update(int(pairs.device_slots[index]) for index in chosen)
        return chosen


class Engine:
    """The scheduler and its workers in one process."""

    def __init__(self, options: Options, **parts: Any) -> None:
        self.options = options
        self.result = Result()
        self._parts = parts
        self._start()

    def _start(self) -> None:
        options = self.options
        self.config = make_config(options)
        if options.profiled_blocks:
            self.config.cache_config.total_block_num = options.profiled_blocks
        self.scheduler = make_scheduler(self.config, options)
        self.failures = Failures(options.failing, 5)
        self.seconds: list[float] = []
        self._jobs: dict[str, Job] = {}
        self._batches: deque[bytes] = deque()
        self._turn = 0
        self.tokens = make_token_processor(self.config, self.scheduler, self)
        self.workers: list[Any] = [self._worker(rank) for rank in range(options.ranks)]
        if options.profiled_blocks:
            self._take_up_profile()

    def _worker(self, rank: int) -> Any:
        if self.options.processes:
            from tests.peers.fastdeploy_processes import WorkerProcess

            return WorkerProcess(rank, self.options)
        return make_worker(self.options, rank, self._copier(rank))

    def _copier(self, rank: int) -> Any:
        if self.options.manager == "fastdeploy":
            planes = 2 * (LAYERS + self.options.mtp)
            return FastDeployCopier((1, BLOCK, HEAD_DIM), planes, self.options.host_blocks)
        parts = dict(self._parts)
        if self.options.failing:
            parts["device"] = FailingLoadsDevice(self.failures.choose)
        return ControllerCopier(self.config, rank, **parts)

    def _take_up_profile(self) -> None:
        """Resize to the profiled number of blocks, as the engine does."""
        self.config.cache_config.total_block_num = self.options.blocks
        self.scheduler.reset_cache_config(self.config.cache_config)
        for worker in self.workers:
            worker.sleep()
            worker.wake(self.options.blocks)

    @property
    def manager(self) -> Any:
        return self.scheduler.cache_manager

    def add(self, job: Job) -> None:
        """Add a request."""
        job.request = make_request(job)
        if self.options.manager == "fastdeploy":
            from fastdeploy.cache_manager.v1.cache_utils import get_request_block_hasher

            job.request.set_block_hasher(get_request_block_hasher(block_size=BLOCK))
        self._jobs[job.name] = job
        self.scheduler.add_request(job.request)

    def run(self, until: Callable[[], bool] | None = None) -> bool:
        """Run until every request has ended or ``until`` returns True; note a stall and return False if it stops."""
        idle = 0
        while not (until() if until else all(job.done for job in self._jobs.values())):
            idle = 0 if self.turn() else idle + 1
            if idle > _STALL_STEPS:
                self.result.stalled = True
                return False
            if idle:
                time.sleep(0.002)
        return True

    def turn(self) -> bool:
        """Run one turn of the engine's loop; return True if it made progress."""
        self._turn += 1
        self.result.steps += 1
        if not self._batches:
            since = time.perf_counter()
            batch, errors = self.scheduler.schedule()
            self.seconds.append(time.perf_counter() - since)
            self.result.errors += [str(error) for error in errors]
            if len(batch):
                self.scheduler.get_real_bsz()
                self._batches.append(pickle.dumps((batch, self.scheduler.real_bsz)))
        if self._turn % self.options.delay:
            return bool(self._batches)
        self.failures.garbage.clear()
        moved = bool(self._batches)
        if self.options.behind:
            time.sleep(0.002)  # for copies that wait for no batch
            outputs = [worker.step() for worker in self.workers]
        while self._batches:
            data = self._batches.popleft()
            for worker in self.workers:
                worker.insert(data)
        if not self.options.behind:
            outputs = [worker.step() for worker in self.workers]
        self._gather()
        self._process(outputs[0])
        return moved or bool(outputs[0])

    def _gather(self) -> None:
        """Collect the workers' findings, without blocks of loads that failed in this step."""
        for worker in self.workers:
            self.result.checked += worker.checked
            worker.checked = 0
            self.result.wrong += [
                asdict(found) for found in worker.wrong if not (found.blocks & self.failures.garbage)
            ]
            worker.wrong.clear()

    def _process(self, outputs: dict[int, tuple[str, list[int]]]) -> None:
        """Process a step's tokens as the token processor does; its last step is the real one."""
        from fastdeploy.engine.request import CompletionOutput, RequestOutput, RequestStatus

        results = []

        scheduler = self.scheduler
        for index, (_, tokens) in outputs.items():
            task = scheduler.tasks_list[index]
            if task is None or scheduler.stop_flags[index]:
                continue
            name = task.request_id
            if tokens[-1] == PREEMPTED:
                if name in scheduler.to_be_aborted_req_id_set:
                    scheduler.recycle_abort_task(name)
                    self._jobs[name].done = True
                    self.result.aborted += 1
                if name in scheduler.to_be_rescheduled_request_id_set:
                    scheduler.reschedule_preempt_task(name)
                    self.result.preempted += 1
                continue
            if task.status == RequestStatus.RUNNING_PREFILL:
                task.status = RequestStatus.RUNNING_DECODE
            task.output_token_ids.extend(tokens)
            self.tokens.tokens_counter[name] += len(tokens)
            job = self._jobs[name]
            if job.abort_at is not None and len(task.output_token_ids) >= job.abort_at:
                scheduler.add_abort_req_ids(name)
            finished = len(task.output_token_ids) >= job.outputs
            outputs_of = CompletionOutput(index=index, send_idx=0, token_ids=list(tokens), draft_token_ids=[])
            results.append(RequestOutput(request_id=name, outputs=outputs_of, finished=finished))
            if finished:
                scheduler.finish_requests(name)
                job.done = True
                self.result.finished += 1
        self.tokens.postprocess(results)

    def put_results(self, results: list[Any]) -> None:
        """Take the tokens that are sent to the clients."""
        for result in results:
            job = self._jobs[result.request_id]
            job.answer += result.outputs.token_ids
            if result.finished and job.answer != answer_to(job.prompt, len(job.answer)):
                self.result.wrong_answers.append(job.name)

    def sleep_and_wake(self) -> None:
        """Put the engine to sleep when nothing runs, and wake it with empty device memory."""
        self.manager.reset_cache()
        for worker in self.workers:
            worker.sleep()
            worker.wake(self.options.blocks)

    def kill_worker(self, rank: int) -> None:
        """Kill a rank's process and replace it; every request is recomputed."""
        self.workers[rank].kill()
        self._batches.clear()
        names = [task.request_id for task in self.scheduler.preempted_all()]
        for worker in self.workers:
            if worker.rank != rank:
                worker.drop_requests()
        while not any(isinstance(event, WorkerLost) for event in self.manager.link.pending_events):
            time.sleep(0.01)
        self.manager.check_and_add_pending_backup()
        self.workers[rank] = self._worker(rank)
        for name in names:
            self.scheduler.reschedule_preempt_task(name)

    def restart(self) -> None:
        """End everything and start again with only the storage."""
        self.close()
        self._start()

    def close(self) -> Result:
        """End the workers, then the scheduler."""
        for worker in self.workers:
            worker.copier.close()
        if self.options.manager == "fdcache":
            self.result.ahead += self.manager.core.get_stats().counters.blocks_loaded_ahead
            self.manager.close()
        self.scheduler.need_block_num_signal.clear()
        self.scheduler.finish_execution_pool.shutdown()
        self.scheduler.async_preprocess_pool.shutdown()
        return self.result


def make_worker(options: Options, rank: int, copier: Any) -> Worker:
    """Return one rank's worker, with the engine's initial blocks."""
    return Worker(rank, copier, LAYERS, BLOCK, options.profiled_blocks or options.blocks, options.mtp)


def make_request(job: Job) -> Any:
    """Return FastDeploy's real request."""
    from fastdeploy.engine.request import ImagePosition, Request, RequestMetrics
    from fastdeploy.engine.sampling_params import SamplingParams

    images = {
        "mm_positions": [ImagePosition(offset, length) for offset, length, _ in job.images],
        "mm_hashes": [name for _, _, name in job.images],
    }
    request = Request(
        job.name,
        prompt_token_ids=list(job.prompt),
        prompt_token_ids_len=len(job.prompt),
        eos_token_ids=[2],
        sampling_params=SamplingParams(max_tokens=job.outputs),
        metrics=RequestMetrics(),
        multimodal_inputs=images if job.images else None,
    )
    request.need_prefill_tokens = len(job.prompt)
    return request
