"""``fdcache inspect eviction``: what the tiers of a service and of its engines have learned of reuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fdcache.settings.cache import CacheSettings, EvictionPolicy, WritePolicy
from tests.service_engine import PROMPT, Engine, ready_blocks
from tests.service_help import TIMEOUT, local_service, run, until


def test_tiers_of_service_and_engine_show_reuse_by_class_and_age(tmp_path: Path) -> None:
    with local_service(tmp_path, FDCACHE_EVICTION="learned") as service:
        settings = CacheSettings(
            server=service.address,
            device_blocks=32,
            write_policy=WritePolicy.WRITE_THROUGH,
            rpc_timeout=TIMEOUT,
            eviction=EvictionPolicy.LEARNED,
        )
        engine = Engine(service.address, settings=settings)
        engine.manager._device.set_clock(0)
        engine.serve(PROMPT)
        until(lambda: ready_blocks(service) == 10, "the blocks are stored")
        (namespace,) = service.service.namespaces.values()
        assert namespace.tier.reuse() is not None
        for step in range(1, 3):
            engine.manager._device.set_clock(20_000 * step)
            engine.serve(PROMPT)

        def told() -> list[Any]:
            engine.manager.take_plans()
            tiers = service.ask("eviction")
            return [each for each in tiers if each["tier"] == "device" and each["learned"]["classes"]]

        until(told, "the engine has told what it learned")
        (device,) = told()
        assert device["of"] == service.ask("clients")[0]["name"]
        every = next(each for each in device["learned"]["classes"] if each["group"] == "all")
        assert sum(every["reused"]) > 0
        shown = run("inspect", "eviction", "--server", service.address)
        assert shown.returncode == 0, shown.stderr
        assert f"device of {device['of']}, namespace {namespace.id}" in shown.stdout
        assert f"host of service, namespace {namespace.id}: nothing learned yet" in shown.stdout
        assert "output tokens" in shown.stdout and "%" in shown.stdout
        written = run("inspect", "eviction", "--server", service.address, "--json")
        assert [each["tier"] for each in json.loads(written.stdout)] == ["host", "device"]
        picture = tmp_path / "reuse.png"
        drawn = run("inspect", "eviction", "--server", service.address, "--plot", str(picture))
        assert drawn.returncode == 0, drawn.stderr
        assert picture.read_bytes().startswith(b"\x89PNG")
        engine.close()


def test_tiers_that_do_not_learn_name_the_setting(tmp_path: Path) -> None:
    with local_service(tmp_path, FDCACHE_EVICTION="lru") as service:
        engine = Engine(service.address)
        engine.serve(PROMPT)
        shown = run("inspect", "eviction", "--server", service.address)
        assert "learns nothing; set FDCACHE_EVICTION=learned" in shown.stdout
        engine.close()
