"""Scenarios that the tests on the stand-in driver run in processes of their own."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import cupy
import msgspec
import numpy as np

from fdcache import _core
from fdcache.errors import DeviceError, StreamError
from fdcache.metadata import TransferPlan, TransferReport, TransferResult, decode_report, encode
from fdcache.replay.config import ReplayConfig, VerifyBytes
from fdcache.replay.devices import DeviceName
from fdcache.replay.engine import replay
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import CacheSettings, CopySettings, WritePolicy
from fdcache.tasks import TransferStatus
from tests.cuda_stand_in import LOST, REFUSED, Driver
from tests.gpu.workers import GpuWorker
from tests.property.test_round_trips import LAYOUTS
from tests.swaps import Worker, header_of, plan, uniform_layout

COMPUTE = cupy.cuda.Stream(non_blocking=True)
BLOCKS = 12
READY = 2
LAYOUT = uniform_layout(num_layers=4)


def shuffled(seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).permutation(BLOCKS)]


def match_the_cpu(method: str, *, batched: bool) -> None:
    """Compare records, headers, checksums and device blocks with those of the CPU, for every layout."""
    if not batched:
        _core.has_batched_copies = lambda: False
    for layout in LAYOUTS.values():
        options: dict[str, Any] = {
            "device_blocks": BLOCKS, "host_blocks": BLOCKS, "seed": 5, "group_layers": 2, "verify": "all",
        }  # fmt: skip
        out, host, back = (shuffled(seed) for seed in (1, 2, 3))
        with GpuWorker(layout, swap_method=method, **options) as gpu, Worker(layout, **options) as cpu:
            for made in (
                plan(1, evict=list(zip(out, host, strict=True))),
                plan(2, load=list(zip(host, back, strict=True))),
            ):
                (result,), (expected,) = gpu.run(made).results, cpu.run(made).results
                assert result.success, result.error_message
                assert result.checksums.tolist() == expected.checksums.tolist()
                assert result.copied_bytes == expected.copied_bytes
            for slot in range(BLOCKS):
                assert gpu.block(slot) == cpu.block(slot)
                assert np.array_equal(gpu.record(slot), cpu.record(slot))
                assert header_of(gpu, slot).to_bytes() == header_of(cpu, slot).to_bytes()


def plans(first_id: int) -> list[TransferPlan]:
    """Return plans that evict and load blocks 0 and 1, and one with copies in both directions."""
    return [
        plan(first_id, evict=[(0, 3), (1, 5)], generation=first_id),
        plan(first_id + 1, load=[(3, 4), (5, 6)], generation=first_id),
        plan(first_id + 2, evict=[(2, 6)], load=[(3, 7), (5, 8)], backup=[(0, 1)], generation=first_id),
    ]


def run(worker: GpuWorker, made: TransferPlan, stream: Any = COMPUTE) -> str | None:
    """Run a plan as far as possible and check its report; return why it was refused or failed."""
    contents = {slot: worker.block(slot) for slot in range(BLOCKS)}
    counter = worker.controller.submit_swap_tasks(made, stream)
    reasons = []
    try:
        for layer in range(counter.num_layers):
            counter.wait_for_layer(layer, stream=stream)
    except DeviceError as error:
        reasons.append(str(error))
    counter.wait_all()
    for swap, result in zip(made.swaps(), worker.report().results, strict=True):
        good = np.setdiff1d(np.arange(len(swap)), result.failed)
        assert result.copied_bytes == len(good) * worker.layout.payload_bytes
        assert (len(result.failed) > 0) == (result.error_message is not None)
        reasons += [result.error_message] if result.error_message else []
        for source, target in zip(swap.src_block_ids[good], swap.dst_block_ids[good], strict=True):
            if swap is made.loads:
                assert worker.block(int(target)) == record_planes(worker, int(source))
            else:
                assert record_planes(worker, int(target)) == contents[int(source)]
                assert header_of(worker, int(target)).state == READY
        for position in result.failed:
            if swap is not made.loads:  # the slot's content must not pass for the block
                header = header_of(worker, int(swap.dst_block_ids[position]))
                assert (header.state, header.generation) != (READY, swap.dst_generations[position])
    return "; ".join(reasons) or None


def record_planes(worker: GpuWorker, slot: int) -> list[bytes]:
    record = worker.record(slot)
    return [record[plane.offset : plane.offset + plane.nbytes].tobytes() for plane in worker.layout.planes]


def at_every_call(calls: Sequence[str], method: str, code: int) -> None:
    """Fail each call once: the first time it is made, then the second time, and so on."""
    driver = Driver()
    before = driver.held()
    for call in calls:
        after = 0
        while fail_once(driver, method, call, after, code):
            after += 1
            gc.collect()
            assert driver.held() == before, (call, after)


def fail_once(driver: Driver, method: str, call: str, after: int, code: int) -> bool:
    """Return True when the call was made that often."""
    worker = GpuWorker(
        LAYOUT, device_blocks=BLOCKS, host_blocks=8, swap_method=method, group_layers=2, verify="all"
    )
    warm = [run(worker, made) for made in plans(1)]  # streams, events and tables are made at first use
    assert warm == [None] * 3
    driver.fail(call, after=after, code=code)
    reasons = [reason for made in plans(11) if (reason := run(worker, made)) is not None]
    if code == LOST and reasons:
        assert run(worker, plan(20, load=[(1, 4)])) is not None
        refused = run(worker, plan(21, load=[(1, 4)]))
        assert refused is not None and "restart this process" in refused
    worker.controller.shutdown()
    worker.controller.shutdown()
    came = driver.recover() > 0
    # Of a GPU that is lost at a call of one thread, another may hear first by another call.
    words = "the stand-in is lost" if code == LOST else call
    told = any(words in reason for reason in reasons)
    # Where a stream cannot wait, or takes no event, the thread waits; and a GPU may be lost when all is done.
    unseen = call in ("cuStreamWaitEvent", "cuEventRecord", "cuEventQuery") and not reasons
    assert told == came or unseen, (call, after, reasons)
    return came


def succeed_after_a_refusal(method: str, call: str) -> None:
    """Run a plan after one that was refused."""
    driver = Driver()
    with GpuWorker(LAYOUT, device_blocks=BLOCKS, host_blocks=8, swap_method=method) as worker:
        driver.fail(call, code=REFUSED)
        refused = run(worker, plan(1, evict=[(0, 3)]))
        assert refused is not None and call in refused
        assert worker.gpu.lost is None
        assert [run(worker, made) for made in plans(2)] == [None] * 3


def keep_slots_of_a_failed_copy() -> None:
    """Refuse every wait from some point on: no copy writes after it is reported as failed."""
    driver = Driver()
    failed = 0
    for after in range(8):
        with GpuWorker(LAYOUT, device_blocks=BLOCKS, host_blocks=8, swap_method="dma") as worker:
            driver.delay(50_000)
            driver.fail("cuStreamWaitEvent", after=after, every=1)
            worker.controller.submit_swap_tasks(plan(1, evict=[(0, 3), (1, 5)]), COMPUTE)
            (result,) = worker.report().results
            driver.delay(0)
            for slot in (3, 5):
                worker.record(slot)[:] = 0xAB  # whose slot it is now
            came = driver.recover()
            cupy.cuda.runtime.deviceSynchronize()
            if len(result.failed):
                assert came and "cuStreamWaitEvent" in str(result.error_message)
                assert all((worker.record(slot) == 0xAB).all() for slot in (3, 5)), after
                failed += 1
            assert worker.gpu.lost is None
    assert failed > 1


def launch_in_one_call() -> None:
    """Compare plans that are submitted in one native call with the same plans submitted piece by piece."""
    made = [
        plan(2, load=[(3, 4), (5, 6)]),
        plan(3, backup=[(4, 1)]),
        plan(4, load=[(3, 7)], backup=[(6, 2), (8, 4)]),
    ]
    seen = []
    for native in (True, False):
        with GpuWorker(LAYOUT, device_blocks=BLOCKS, host_blocks=8, group_layers=2, verify="all") as worker:
            worker.run(plan(1, evict=[(0, 3), (1, 5)]))
            controller = worker.controller
            reports: list[TransferReport] = []
            for each in made:
                if not native:
                    controller._plans.launcher = None
                counter = controller.submit_swap_tasks(each, COMPUTE)
                execution = controller._plans.in_flight.executions[each.plan_id]
                assert isinstance(execution, _core.LaunchedPlan) == native
                handler = controller.handler(each.plan_id)
                assert not handler.cancel() and handler.wait(60) and counter.is_all_done()
                assert handler.status is TransferStatus.COMPLETED
                (report,) = controller.poll()
                assert handler.get_result() == report
                reports.append(report)
            bad = plan(5, load=[(3, 9), (5, 10)])
            assert bad.loads is not None
            bad.loads.src_generations[1] += 1
            reports.append(worker.run(bad))
            seen.append(([_without_time(each) for each in reports], [worker.block(i) for i in range(BLOCKS)]))
    assert seen[0] == seen[1]
    assert seen[0][0][-1][0].failed.tolist() == [1]


def _without_time(report: TransferReport) -> list[TransferResult]:
    assert decode_report(encode(report)) == report
    return [msgspec.structs.replace(result, seconds=0.0) for result in report.results]


def keep_loads_in_order() -> None:
    """Let loads wait for room: plans behind them do not overtake, and those after them go in one call again."""
    driver = Driver()
    options = {"device_blocks": BLOCKS, "host_blocks": 8, "queued_bytes": LAYOUT.payload_bytes}
    with GpuWorker(LAYOUT, **options) as worker:
        worker.run(plan(1, backup=[(slot, slot) for slot in range(8)]))
        expected = [worker.block(slot) for slot in range(8)]
        driver.delay(20_000)
        for number in range(4):
            worker.controller.submit_swap_tasks(plan(2 + number, load=[(number, 11)]), COMPUTE)
        executions: Mapping[int, object] = worker.controller._plans.in_flight.executions
        assert [isinstance(executions[each], _core.LaunchedPlan) for each in (2, 5)] == [True, False]
        reports: list[TransferReport] = []
        while len(reports) < 4:
            reports += worker.controller.wait_reports(60)
        driver.delay(0)
        assert [report.plan_id for report in reports] == [2, 3, 4, 5]
        assert all(report.results[0].success for report in reports)
        assert worker.block(11) == expected[3]
        worker.controller.submit_swap_tasks(plan(6, load=[(0, 11)]), COMPUTE)
        assert isinstance(executions[6], _core.LaunchedPlan)
        worker.report()


def refuse_a_capture() -> None:
    """Refuse a captured stream before any allocation, and serve other streams meanwhile."""
    driver = Driver()
    with GpuWorker(LAYOUT, device_blocks=BLOCKS, host_blocks=8) as worker:
        counter = worker.controller.submit_swap_tasks(plan(1, evict=[(0, 3)]), worker.idle)
        driver.capture(COMPUTE.ptr)
        made = cupy.cuda.Memory.made
        for call in (
            lambda: worker.controller.submit_swap_tasks(plan(2, load=[(3, 4)]), COMPUTE),
            lambda: counter.wait_for_layer(0, stream=COMPUTE),
            lambda: counter.wait_all(stream=COMPUTE),
        ):
            try:
                call()
            except StreamError as error:
                assert "captured into a CUDA graph" in str(error) and "wait_all(stream=...)" in str(error)
            else:
                raise AssertionError("the stream was taken")
        assert cupy.cuda.Memory.made == made
        counter.wait_all()
        reports = {report.plan_id: report.results[0].success for report in worker.controller.poll()}
        assert reports == {1: True, 2: False}
        assert run(worker, plan(3, load=[(3, 4)]), stream=cupy.cuda.Stream()) is None
        driver.capture(0)
        assert run(worker, plan(4, load=[(3, 4)])) is None


def refuse_a_foreign_stream() -> None:
    """Refuse a stream of another GPU, for which no copy could wait."""
    driver = Driver()
    with GpuWorker(LAYOUT, device_blocks=BLOCKS, host_blocks=8) as worker:
        driver.disown(COMPUTE.ptr)
        try:
            worker.controller.submit_swap_tasks(plan(1, evict=[(0, 3)]), COMPUTE)
        except StreamError as error:
            assert "not one of stand-in" in str(error)
        else:
            raise AssertionError("the stream was taken")
        assert worker.report().results[0].failed.tolist() == [0]
        assert run(worker, plan(1, evict=[(0, 3)]), stream=cupy.cuda.Stream()) is None


def serve_requests(policy: str, call: str) -> None:
    """Replay a workload while calls are refused repeatedly, and compare every reused block."""
    layout = LAYOUTS["fp8"]
    config = ReplayConfig(
        layout=layout,
        cache=CacheSettings(
            device_blocks=512,
            host_memory=2048 * layout.record_bytes,
            write_policy=WritePolicy(policy),
            clean_reserve=16,
        ),
        transfer=CopySettings(),
        verify=VerifyBytes.ALL,
        device=DeviceName.CUDA,
    )
    failed_loads = 0
    for seed in range(1, 6):
        driver = Driver()
        driver.fail(call, after=20, every=23)
        report = replay(generate(WorkloadName.CHAT, 60, seed=seed), config)
        assert driver.recover() > 0
        assert report.tally.finished == 60 and report.tally.verified_blocks > 0
        assert report.tally.corrupt_blocks == 0
        assert report.clean
        failed_loads += report.tally.failed_loads
        if failed_loads:
            break
    assert failed_loads > 0, "no refused call was part of a load"
