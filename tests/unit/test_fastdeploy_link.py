"""The link between FastDeploy's scheduler and its workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest

from fdcache.errors import CacheNotReadyError, ConfigurationError, LayoutError
from fdcache.integrations.fastdeploy import layout_from_config, link
from fdcache.integrations.fastdeploy.engine import PlanMark, marked_plan
from fdcache.integrations.fastdeploy.link import SchedulerLink, WorkerLink, WorkerLost
from fdcache.metadata import StorageScan, TransferPlan, TransferReport
from tests.fastdeploy_help import fd_config
from tests.service_help import until

LAYOUT = layout_from_config(fd_config(ranks=2))
SECONDS = 10.0


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[SchedulerLink]:
    link = SchedulerLink(tmp_path / "line.sock", LAYOUT, None)
    yield link
    link.close()


def worker(scheduler: SchedulerLink, rank: int = 0) -> WorkerLink:
    return WorkerLink(scheduler.path, rank, LAYOUT, None, SECONDS)


def take(rank: WorkerLink, number: int, batch: int = 0) -> list[int]:
    """Take the plans up to a number, once they have arrived; return their ids."""
    rank.wait_for(number, SECONDS)
    return [plan.plan_id for _, plan in rank.take(number, batch)]


def test_plans_of_a_step_wait_for_the_batch_that_names_them(scheduler: SchedulerLink) -> None:
    rank = worker(scheduler)
    rank.start(lambda plan: None, lambda: None)
    numbers = [scheduler.announce(TransferPlan(plan_id=number)) for number in (5, 6, 9)]
    assert take(rank, 0) == []
    assert take(rank, numbers[1]) == [5, 6]
    assert take(rank, numbers[1]) == []
    assert take(rank, numbers[2]) == [9]
    rank.close()


def test_plans_without_a_step_are_submitted_on_arrival(scheduler: SchedulerLink) -> None:
    submitted: Queue[TransferPlan] = Queue()
    rank = worker(scheduler)
    rank.start(submitted.put, lambda: None)
    scheduler.announce(TransferPlan(plan_id=1))
    scheduler.send(TransferPlan(plan_id=2))
    assert submitted.get(timeout=SECONDS).plan_id == 2
    rank.close()


def test_plans_that_wait_for_no_batch_wait_for_the_one_that_stops_requests(scheduler: SchedulerLink) -> None:
    released: Queue[None] = Queue()
    rank = worker(scheduler)
    rank.start(lambda plan: None, lambda: released.put(None))
    last = [scheduler.announce(TransferPlan(plan_id=number)) for number in (5, 6)][-1]
    scheduler.go(3)
    later = scheduler.announce(TransferPlan(plan_id=7))
    released.get(timeout=SECONDS)
    rank.wait_for(later, SECONDS)
    assert take(rank, 0) == take(rank, 0, 2) == []
    assert last < later
    assert take(rank, 0, 3) == [5, 6]
    assert take(rank, later) == [7]
    rank.close()


def test_plans_sent_before_a_rank_connects_wait_for_it(scheduler: SchedulerLink) -> None:
    number = scheduler.announce(TransferPlan(plan_id=3))
    for rank in (0, 1):
        late = worker(scheduler, rank)
        late.start(lambda plan: None, lambda: None)
        assert take(late, number) == [3]
        late.close()


def test_reports_and_scans_come_back_in_order(scheduler: SchedulerLink) -> None:
    rank = worker(scheduler)
    empty = np.empty(0, np.int32)
    hashes = np.empty((0, 32), np.uint8)
    figures = np.empty(0, np.uint64)
    rank.report(TransferReport(plan_id=number, rank=0, results=()) for number in (1, 2))
    rank.send_scan(
        StorageScan(
            rank=0,
            capacity=4,
            slots=empty,
            generations=empty.view(np.uint32),
            hashes=hashes,
            parents=hashes,
            checksums=figures,
            written_ms=figures,
        )
    )
    until(lambda: len(scheduler.pending_events) == 3, "all have arrived")
    first, second, scan = scheduler.collect()
    assert isinstance(first, TransferReport) and isinstance(second, TransferReport)
    assert (first.plan_id, second.plan_id) == (1, 2)
    assert isinstance(scan, StorageScan) and scan.capacity == 4
    assert scheduler.collect() == []
    rank.close()


def test_a_lost_worker_is_replaced_after_forget_and_its_successor_gets_no_older_plan(
    scheduler: SchedulerLink,
) -> None:
    first = worker(scheduler)
    first.close()
    until(lambda: len(scheduler.pending_events) > 0, "the loss is detected")
    assert scheduler.collect() == [WorkerLost(0)]
    settled = scheduler.announce(TransferPlan(plan_id=1))
    scheduler.forget(0)
    second = worker(scheduler)
    second.start(lambda plan: None, lambda: None)
    assert take(second, settled) == []
    assert take(second, scheduler.announce(TransferPlan(plan_id=2))) == [2]
    second.close()


def test_a_worker_with_another_configuration_is_refused_with_the_difference(scheduler: SchedulerLink) -> None:
    with pytest.raises(LayoutError, match="rank 2 is not one of the 2 ranks"):
        worker(scheduler, 2)
    rank = worker(scheduler)
    with pytest.raises(LayoutError, match="a worker of rank 0 already"):
        worker(scheduler)
    rank.close()
    float16 = layout_from_config(fd_config(ranks=2, dtype="float16"))
    with pytest.raises(LayoutError, match="planes differs"):
        WorkerLink(scheduler.path, 1, float16, None, SECONDS)
    with pytest.raises(LayoutError, match=r"quantised as int8.*quantization_config"):
        WorkerLink(scheduler.path, 1, LAYOUT, "int8", SECONDS)


def test_a_worker_adopts_the_schedulers_layout(scheduler: SchedulerLink) -> None:
    other = layout_from_config(fd_config(ranks=2))
    rank = WorkerLink(scheduler.path, 0, other.with_revision("of this process alone"), None, SECONDS)
    assert rank.layout == LAYOUT
    rank.close()


def test_a_missing_scheduler_is_reported_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CacheNotReadyError, match="FD_PLUGINS=fdcache"):
        WorkerLink(tmp_path / "none.sock", 0, LAYOUT, None, 0.01)


def test_the_end_of_the_scheduler_wakes_workers_that_wait_for_plans(tmp_path: Path) -> None:
    scheduler = SchedulerLink(tmp_path / "line.sock", LAYOUT, None)
    rank = worker(scheduler)
    rank.start(lambda plan: None, lambda: None)
    scheduler.close()
    scheduler.close()
    with pytest.raises(CacheNotReadyError, match="has ended"):
        rank.wait_for(7, SECONDS)


def test_marks_survive_the_merging_of_batches() -> None:
    merged = SimpleNamespace(hash_values=[*PlanMark.of(3, 7).hash_values, *PlanMark.of(12, 6).hash_values])
    assert marked_plan(merged) == (12, 7)
    assert marked_plan(None) == (0, 0)
    assert marked_plan(SimpleNamespace(hash_values=[])) == (0, 0)


def test_a_second_engine_on_the_port_is_refused_until_the_first_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_PREDECESSOR_SECONDS", 0.1)
    layout, path = layout_from_config(fd_config()), tmp_path / "fastdeploy-1.sock"
    first = SchedulerLink(path, layout, None)
    with pytest.raises(ConfigurationError, match="an engine with this port is running"):
        SchedulerLink(path, layout, None)
    assert path.is_socket(), "the first one keeps its socket"
    monkeypatch.setattr(link, "_PREDECESSOR_SECONDS", 10.0)
    first.close()
    second = SchedulerLink(path, layout, None)
    assert path.is_socket(), "the end of the first one does not take the socket of the second"
    second.close()
