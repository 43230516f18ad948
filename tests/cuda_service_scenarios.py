"""Scenarios of GPUs at a service, which the tests on the stand-in driver run in processes of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fdcache import _core
from fdcache.controller.submission import PlanSubmission
from fdcache.metadata import TransferPlan
from fdcache.replay.config import ReplayConfig, VerifyBytes
from fdcache.replay.devices import DeviceName
from fdcache.replay.engine import replay
from fdcache.replay.report import Report
from fdcache.replay.workloads import WorkloadName, generate
from fdcache.settings.cache import CacheSettings, CopySettings, WritePolicy
from tests.property.test_round_trips import LAYOUTS
from tests.service_help import ServiceProcess, service_process


class Launches:
    """How many plans with copies were submitted in one call, and by which launchers."""

    def __init__(self) -> None:
        self.plans = self.native = 0
        self.launchers: dict[int, Any] = {}
        submit = PlanSubmission.submit

        def counted(submission: PlanSubmission, plan: TransferPlan, stream: Any) -> Any:
            layers = submit(submission, plan, stream)
            if plan.loads is not None or plan.backups is not None:
                self.plans += 1
                self.native += isinstance(
                    submission.in_flight.executions.get(plan.plan_id), _core.LaunchedPlan
                )
                self.launchers[id(submission.launcher)] = submission.launcher
            return layers

        setattr(PlanSubmission, "submit", counted)  # noqa: B010


def replayed(service: ServiceProcess, seed: int) -> Report:
    config = ReplayConfig(
        layout=LAYOUTS["fp8"],
        cache=CacheSettings(
            device_blocks=256, server=service.address, write_policy=WritePolicy.WRITE_THROUGH
        ),
        transfer=CopySettings(),
        verify=VerifyBytes.ALL,
        device=DeviceName.CUDA,
    )
    report = replay(generate(WorkloadName.CHAT, 20, seed=seed), config)
    assert report.tally.finished == 20 and report.tally.verified_blocks > 0
    assert report.tally.corrupt_blocks == report.tally.failed_loads == 0
    assert report.clean
    return report


def launch_in_one_call() -> None:
    """Most plans take one call, once extents are mapped, also in another session and after the service came back."""
    launches = Launches()
    with (
        tempfile.TemporaryDirectory(prefix="fdcache-test-") as folder,
        service_process(Path(folder) / "service", FDCACHE_HOST_MEMORY="64MiB") as service,
    ):
        replayed(service, 1)
        first = launches.native
        assert 2 * first > launches.plans, (first, launches.plans)
        replayed(service, 1)
        assert launches.native > first
        service.kill()
        service.start()
        before = launches.native
        replayed(service, 1)
        assert launches.native > before
        assert len(launches.launchers) > 2, "each session has its own, and extents are mapped one by one"
