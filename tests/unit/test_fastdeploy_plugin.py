"""The plug-in and a FastDeploy with other classes or signatures."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fdcache.integrations.fastdeploy import plugin
from fdcache.integrations.fastdeploy.plugin import EXPECTED_SIGNATURES, find_differences


def known() -> dict[str, Any]:
    """Return modules with exactly the functions that the plug-in expects."""
    modules: dict[str, Any] = {}
    for (module, path), parameters in EXPECTED_SIGNATURES.items():
        owner, member = path.split(".")
        place = modules.setdefault(module, ModuleType(module))
        if not hasattr(place, owner):
            setattr(place, owner, type(owner, (), {}))
        scope: dict[str, Any] = {}
        exec(f"def member({', '.join(parameters)}): pass", scope)
        setattr(getattr(place, owner), member, scope["member"])
    return modules


def test_the_expected_signatures_have_no_differences() -> None:
    assert find_differences(known()) == []


def test_every_difference_is_reported() -> None:
    modules = known()
    cache = modules["fastdeploy.cache_manager.v1"]
    scheduler = modules["fastdeploy.engine.sched.resource_manager_v1"].ResourceManagerV1
    cache.CacheManager.match_prefix = lambda self, request, skip_storage, tenant: None
    cache.CacheManager.evacuate = lambda self: None
    del scheduler._prepare_preempt_task
    found = "; ".join(find_differences(modules))
    assert "CacheManager.match_prefix takes ('self', 'request', 'skip_storage', 'tenant')" in found
    assert "CacheManager has unknown members: evacuate" in found
    assert "ResourceManagerV1._prepare_preempt_task is missing" in found
    assert len(find_differences(modules)) == 3


def test_a_missing_class_is_reported() -> None:
    modules = known()
    modules["fastdeploy.cache_manager.v1"] = SimpleNamespace(CacheManager=object)
    found = find_differences(modules)
    assert "fastdeploy.cache_manager.v1.CacheController.submit_swap_tasks is missing" in found


def test_a_scheduler_decorated_by_another_plug_in_is_adapted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = known()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    scheduler = modules["fastdeploy.engine.sched.resource_manager_v1"].ResourceManagerV1
    original = scheduler.schedule

    @functools.wraps(original)
    def schedule(self):  # type: ignore[no-untyped-def]
        return original(self)

    scheduler.schedule = schedule
    plugin.adapt_scheduler()
    adapted = scheduler.schedule
    assert adapted is not schedule
    plugin.adapt_scheduler()
    assert scheduler.schedule is adapted, "once is enough"
