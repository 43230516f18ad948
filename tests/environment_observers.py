"""Live engines to observe for the effect of a variable: the Paddle example, the adapter, a replay, a service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any
from unittest import mock

from typer import Context
from typer.core import TyperCommand

from fdcache import CacheManager
from fdcache.service.server.lifecycle import Server
from fdcache.service.wire.address import load_settings
from tests.environment_help import Engine, Read
from tests.fastdeploy_help import fd_config


def observe_paddle(read: Read) -> object:
    """Observe the Paddle example, created with options of the model alone."""
    from examples.paddle_engine.__main__ import parse
    from examples.paddle_engine.kv_cache import FdcacheBlocks
    from examples.paddle_engine.worker import Worker

    tiny = ["--requests", "1", "--scale", "12", "--vocab", "64", "--layers", "6", "--hidden", "32"]
    demo, _ = parse([*tiny, "--heads", "2", "--head-dim", "16", "--ffn", "32"])
    cache = FdcacheBlocks(demo.engine)
    worker = Worker(demo.model, demo.engine, cache.host_cache)
    try:
        assert worker.controller is not None
        cache.restore(worker.storage_scans())
        return read(Engine(cache.manager, worker.controller, demo.engine.device_blocks))
    finally:
        worker.shutdown()
        cache.close()


def observe_adapter(read: Read) -> object:
    """Observe the adapter, created from a configuration of FastDeploy."""
    from fdcache.integrations import fastdeploy

    config = fd_config(total_block_num=64, num_cpu_blocks=40)
    config.model_config.num_hidden_layers = 6
    manager = fastdeploy.CacheManager(config)
    controller = fastdeploy.CacheController(config, 0, 0)
    try:
        planes = controller.initialize_kv_cache(None, config.cache_config.total_block_num)
        if scan := controller.initialize_storage():
            manager.core.restore_storage([scan])
        return read(Engine(manager.core, controller.core, planes[0].shape[0]))
    finally:
        controller.shutdown()
        manager.core.close()


def observe_replay(read: Read) -> object:
    """Observe the manager and controller that `fdcache replay` creates, without running a workload."""
    from fdcache.replay import engine as replaying
    from fdcache.replay.ranks import LocalRank
    from fdcache_cli.replay import replay

    found: list[object] = []

    class ObservedRun(replaying.ReplayRun):
        def work(self, *_: object) -> bool:
            # Several ranks run in processes of their own, and their controllers cannot be reached.
            worker = self.ranks.worker if isinstance(self.ranks, LocalRank) else None
            blocks = worker.planes.arrays[0].shape[0] if worker else 0
            controller: Any = worker and worker.controller
            assert isinstance(self.manager, CacheManager)
            found.append(read(Engine(self.manager, controller, blocks)))
            return True

    with mock.patch.object(replaying, "ReplayRun", ObservedRun), redirect_stdout(StringIO()):
        try:
            replay(Context(TyperCommand("replay")), layers=6, json_output=True)
        except SystemExit as end:
            assert end.code == 130, end.code  # interrupted, without leaks
    return found[0]


def observe_serve(read: Read) -> object:
    """Observe a service as `fdcache serve` creates it, after an earlier one at the same address died."""
    earlier = Server(load_settings({}))
    earlier.start()
    incarnation = earlier.arena.manifest.incarnation
    earlier.abandon()
    server: Any = Server(load_settings({}))
    server.start()
    try:
        server.earlier = incarnation
        return read(server)
    finally:
        server.close()
        server.arena.lock()
        server.arena.close(discard=True)


OBSERVERS: dict[str, Callable[[Read], object]] = {
    "paddle": observe_paddle,
    "adapter": observe_adapter,
    "replay": observe_replay,
    "serve": observe_serve,
}
