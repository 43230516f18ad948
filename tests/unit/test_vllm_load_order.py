"""Which loads of the vLLM connector wait for the steps in flight. Skipped without vLLM, like ``test_vllm_hooks.py``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: python -m tests.vllm.setup")

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from fdcache.integrations.vllm.metadata import WorkerReports
from tests.service_help import until
from tests.vllm_sides import BLOCK, Engine, continued, request


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def loads_without_waiting(engine: Engine, name: str, blocks: list[int]) -> bool:
    """Load a request's two blocks in the next step; return True if its plan waits for no step in flight."""
    source = request(name)
    assert engine.side.matched(source, 0) == 2 * BLOCK
    engine.side.allocated(source, (blocks,), 2 * BLOCK)
    until(lambda: name in engine.step(), "the end of the load")
    (made,) = [made for made in engine.steps if any(name in loads for loads in made.loads.values())]
    (plan,) = made.loads
    assert made.unordered <= {plan}
    source.status = RequestStatus.FINISHED_ABORTED
    engine.side.finished(source, [])
    return bool(made.unordered)


def test_a_load_waits_for_steps_in_flight_that_use_its_blocks(engine: Engine) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    other = request("b", list(range(50, 60)))
    assert loads_without_waiting(engine, "fresh", [8, 9])
    assert engine.side.matched(other, 0) == 0
    engine.side.allocated(other, ([8, 9, 10],), 0)
    engine.step(engine.admit(other, [8, 9, 10]))
    assert loads_without_waiting(engine, "beside", [11, 12])
    other.num_computed_tokens = other.num_tokens
    engine.step(continued("b", 10, 1, ([],)))
    engine.side.finished(other, ([8, 9, 10],))
    assert not loads_without_waiting(engine, "c", [12, 10])


def test_a_load_waits_for_the_last_step_of_a_preempted_request(engine: Engine) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    other = request("b", list(range(50, 60)))
    assert engine.side.matched(other, 0) == 0
    engine.step(engine.admit(other, [8, 9, 10]))
    engine.step(replace(SchedulerOutput.make_empty(), preempted_req_ids={"b"}))
    assert not loads_without_waiting(engine, "c", [9, 12])
    engine.step()
    engine.step()
    assert loads_without_waiting(engine, "d", [9, 12])


def test_loads_wait_for_steps_with_requests_that_are_not_followed(engine: Engine) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    engine.step(engine.admit(request("b", prompt_embeds=torch.zeros(10, 4)), [8, 9, 10]))
    assert not loads_without_waiting(engine, "c", [11, 12])


def test_a_load_that_waits_for_no_step_shares_no_plan_with_copies_of_what_one_computed(
    engine: Engine,
) -> None:
    engine.compute(request("a"), [3, 4, 5], fill=7)
    other = request("b", list(range(50, 60)))
    assert engine.side.matched(other, 0) == 0
    engine.step(engine.admit(other, [8, 9, 10]), fill=5)
    source = request("c")
    assert engine.side.matched(source, 0) == 2 * BLOCK
    engine.side.allocated(source, ([11, 12],), 2 * BLOCK)
    made = engine.side.step(SchedulerOutput.make_empty())
    plans = {plan.loads is not None: plan for plan in made.plans}
    assert plans[False].backups is not None
    assert plans[True].backups is None and made.unordered == {plans[True].plan_id}
    engine.worker.submit(made)
    engine.side.reported(WorkerReports(engine.worker.take_reports()).reports)
    engine.settle()
    assert engine.content(11) == {7}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("are_used", [False, True])
def test_a_load_is_known_after_the_step_before_unless_that_uses_its_blocks(are_used: bool) -> None:
    engine = Engine(device="cuda")
    engine.compute(request("a"), [3, 4, 5], fill=7)
    other, source = request("b", list(range(50, 60))), request("c")
    assert engine.side.matched(other, 0) == 0
    engine.step(engine.admit(other, [8, 9, 10]))
    torch.cuda._sleep(10**9)
    for pages in engine.pages.values():
        pages[9] = 5
    assert engine.side.matched(source, 0) == 2 * BLOCK
    engine.side.allocated(source, ([9, 12] if are_used else [11, 12],), 2 * BLOCK)
    arrived = engine.step()
    assert are_used or arrived == {"c"}
    until(lambda: not engine.side.has_pending_work or engine.step(), "the end of all copies")
    assert engine.content(9) == {7 if are_used else 5} and engine.content(12) == {7}
    engine.close()
