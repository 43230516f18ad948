"""CUDA device on the stand-in driver: its calls, and refusals of each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdcache.settings.cache import WritePolicy
from tests import cuda_stand_in

METHODS = ("auto", "dma", "staged", "kernel")


def run(cuda_driver: Path, *scenarios: str) -> None:
    """Run scenarios one after the other in a process."""
    steps = "; ".join(f"print({each!r}); {each}" for each in scenarios)
    modules = ", ".join({each.partition(".")[0] for each in scenarios})
    done = cuda_stand_in.run_python(cuda_driver, f"from tests import {modules}; {steps}; print('DONE')")
    assert done.stdout.endswith("DONE\n"), done.stdout + done.stderr


def test_copies_match_the_cpu(cuda_driver: Path) -> None:
    ways = [(method, batched) for batched in (True, False) for method in METHODS]
    run(
        cuda_driver, *(f"cuda_scenarios.match_the_cpu({each!r}, batched={batched})" for each, batched in ways)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["staged", "dma", "kernel"])
def test_every_refused_call_is_a_failed_report_without_leaks(cuda_driver: Path, method: str) -> None:
    calls = ["cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuLaunchKernel", "cuStreamWaitEvent"]
    calls += ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime", "cuStreamGetCtx"]
    run(cuda_driver, f"cuda_scenarios.at_every_call({calls}, {method!r}, cuda_scenarios.REFUSED)")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["staged", "dma", "kernel"])
def test_a_gpu_lost_at_any_call_fails_reports_and_the_controller_closes(
    cuda_driver: Path, method: str
) -> None:
    calls = ["cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuLaunchKernel", "cuStreamWaitEvent", "cuEventQuery"]
    calls += ["cuEventRecord", "cuEventElapsedTime"]
    run(cuda_driver, f"cuda_scenarios.at_every_call({calls}, {method!r}, cuda_scenarios.LOST)")


def test_plans_end_whatever_is_refused(cuda_driver: Path) -> None:
    calls = {"dma": "cuMemcpyBatchAsync", "staged": "cuLaunchKernel", "kernel": "cuLaunchKernel"}
    run(
        cuda_driver,
        *(f"cuda_scenarios.succeed_after_a_refusal{each}" for each in calls.items()),
        "cuda_scenarios.keep_slots_of_a_failed_copy()",
        "cuda_scenarios.launch_in_one_call()",
        "cuda_scenarios.keep_loads_in_order()",
        "cuda_scenarios.refuse_a_capture()",
        "cuda_scenarios.refuse_a_foreign_stream()",
        "cuda_scenarios.serve_requests('write_through', 'cuLaunchKernel')",
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", [each.value for each in WritePolicy])
@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuStreamWaitEvent"])
def test_requests_of_every_write_policy_compute_again(cuda_driver: Path, call: str, policy: str) -> None:
    run(cuda_driver, f"cuda_scenarios.serve_requests({policy!r}, {call!r})")


def test_reads_from_a_peer_whose_calls_are_refused_fail_and_leave_nothing_mapped(cuda_driver: Path) -> None:
    run(
        cuda_driver,
        "cuda_peer_scenarios.unmap_after_the_last_read()",
        "cuda_peer_scenarios.refuse_every_call()",
    )


def test_plans_at_a_service_are_submitted_in_one_call(cuda_driver: Path) -> None:
    run(cuda_driver, "cuda_service_scenarios.launch_in_one_call()")
