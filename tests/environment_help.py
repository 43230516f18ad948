"""The effect of each variable, which the programs of :mod:`tests.environment_observers` show."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from fdcache import CacheController, CacheManager, KVLayout, Request, tracing
from fdcache.devices.calibration import make_policy
from fdcache.devices.topology import Gpu
from fdcache.errors import StorageError
from fdcache.integrations.mooncake.client import ClientOptions
from fdcache.integrations.mooncake.variables import MooncakeSettings
from fdcache.integrations.vllm.config import layout_from_config
from fdcache.integrations.vllm.settings import given_settings
from fdcache.machine.calibration import Calibration, load_calibration, save_calibration
from fdcache.service.server import process
from fdcache.service.server.lifecycle import Server
from fdcache.settings import Settings
from fdcache.storage.objects.bucket import Bucket
from fdcache.storage.objects.variables import ObjectSettings
from fdcache.testing.storage import conformance_layout
from fdcache.transfer.handovers import PeerTerms
from fdcache.transfer.nodes.node import ThisNode
from fdcache.transfer.nodes.variables import NodesSettings
from tests.nodes_help import free_address
from tests.vllm_configs import kv_config, vllm_config

LONG = 100
"""Tokens of a prompt that is served twice."""


@dataclass
class Engine:
    """A program's manager and the controller of rank 0."""

    manager: CacheManager
    controller: CacheController
    device_blocks: int
    hits: int = -1

    def serve_twice(self) -> None:
        """Serve one prompt twice; ``hits`` is the number of tokens found the second time."""
        for name in ("first", "second"):
            request = Request(name, list(range(LONG)))
            match = self.manager.match_prefix([request])[0]
            assert self.manager.allocate_device_blocks([(request, LONG)])[0].ok
            self._copy()
            self.manager.commit([(request, LONG)])
            self.manager.finish([request])
            self._copy()
            self.hits = match.num_cached_tokens

    def _copy(self) -> None:
        for plan in self.manager.take_plans():
            self.controller.submit_swap_tasks(plan)
        while reports := self.controller.wait_reports(timeout=60):
            self.manager.apply(reports)

    @property
    def slab(self) -> Any:
        storage = self.controller._parts.storage
        return storage.storage if storage else None


Read = Callable[[Any], object]
ENGINES = ("paddle", "adapter", "replay")


@dataclass(frozen=True)
class Case:
    """A value of a variable, other than its default, and functions that read its effect.

    ``engine`` and ``serve`` read it from an engine and a service, ``elsewhere`` needs neither. ``engines`` are the
    programs with the effect, ``refused_by`` those that refuse the value. ``beside`` are variables that it needs.
    """

    value: str
    engine: Read | None = None
    serve: Read | None = None
    elsewhere: Callable[[], object] | None = None
    engines: tuple[str, ...] = ENGINES
    refused_by: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


GPU = Gpu(0, "GPU-1", "a GPU", 13000, "0000:00:06.0", "PCIe 32.0 GT/s x16", 1, 132, 1 << 37)
SAVED = Calibration(measured_at="a day", kernel_ctas=7).made_for(GPU)


def policy() -> Any:
    """Return the copy policy of a CUDA device."""
    return make_policy(Settings.load().transfer, Calibration(), batched=True)


def _vllm_fingerprint() -> object:
    """Return what names the blocks of vLLM's connector."""
    made = vllm_config()
    weights = given_settings(made.kv_transfer_config).deployment.weights
    with mock.patch("fdcache.integrations.vllm.config.version", return_value="0.33.0"):
        return layout_from_config(made, kv_config(), weights=weights).fingerprint


def _bucket() -> object:
    """Return the address and the configuration of the client of object storage, None if it is refused."""
    try:
        bucket = Bucket(Settings.load().group(ObjectSettings), timeout=1.0)
    except StorageError:
        return None
    return bucket.place, bucket._store.config


def _node() -> object:
    """Return what a node makes of its settings, None if they are refused."""
    settings = Settings.load().group(NodesSettings)
    try:
        with mock.patch("fdcache.transfer.nodes.node.RedisDirectory") as directory:
            node = ThisNode(settings, retry_after=1.0)
    except StorageError:
        return None
    try:
        node.join(conformance_layout(), 0)
        return node.addresses, node.members.addresses, node.keys, directory.call_args
    finally:
        node.close()


def _swap_method() -> object:
    with mock.patch("fdcache.devices.calibration._core.SwapPolicy") as made:
        policy()
    return made.call_args.kwargs["choice"]


def device_blocks(engine: Engine) -> object:
    return engine.manager.num_device_blocks, engine.device_blocks


def host_blocks(engine: Engine) -> object:
    arena = engine.controller.host_arena
    return engine.manager.num_host_blocks, arena.num_blocks if arena else 0


def hits(engine: Engine) -> object:
    engine.serve_twice()
    return engine.hits


def backed_up(engine: Engine) -> object:
    engine.serve_twice()
    return engine.manager.get_stats().counters.blocks_backed_up


def events(engine: Engine) -> object:
    engine.serve_twice()
    return len(engine.manager.take_events()) > 0


def reads(name: str) -> Read:
    return lambda engine: getattr(engine.manager._tiers.fetches.terms, name)


def in_service(name: str) -> Read:
    """Return a setting that the service reads while it runs."""
    return lambda server: getattr(server.service.settings, name)


def storage_in_service(name: str) -> Read:
    return lambda server: getattr(server.service.storage.settings, name) if server.service.storage else None


def namespace(server: Server) -> Any:
    layout = KVLayout.uniform(
        model="m", revision="1", block_size=4, num_layers=1, kv_heads=1, head_dim=8, dtype="float16"
    )
    return server.service.namespaces.get(layout.fingerprint) or server.service.namespaces.open(layout)


def drains_for(server: Server) -> object:
    with mock.patch("fdcache.service.server.lifecycle.time.monotonic", return_value=0.0):
        server.stop()
    return server._drain_until


def formatter(server: Server) -> object:
    logger = logging.getLogger("fdcache")
    before = (logger.handlers[:], logger.level, logger.propagate)
    logger.handlers = []
    try:
        process.configure(server.settings)
        return type(logger.handlers[0].formatter).__name__
    finally:
        logger.handlers, logger.level, logger.propagate = before


def embedded(read: Read) -> Callable[[], object]:
    """Return an effect on a manager and a controller of the settings, with planes of their own."""

    def observe() -> object:
        settings = Settings.load()
        layout = KVLayout.uniform(
            model="m", revision="1", block_size=64, num_layers=2, kv_heads=1, head_dim=8, dtype="float16"
        )
        manager = CacheManager.from_settings(layout, settings, device_bytes=1 << 20)
        controller = CacheController.from_settings(layout, settings)
        try:
            controller.initialize_kv_cache(8)
            return read(Engine(manager, controller, 8))
        finally:
            controller.shutdown()
            manager.close()

    return observe


def peer_terms(name: str) -> Callable[[], object]:
    return lambda: getattr(PeerTerms.of(Settings.load()).settings, name)


def endpoint(read: Read) -> Callable[[], object]:
    """Return an effect on the endpoint that answers peers."""

    def observe(engine: Engine) -> object:
        engine.controller.open_transfer()
        transfer = engine.controller._parts.transfer
        assert transfer is not None
        return read(transfer.endpoint)

    return embedded(observe)


def _traces() -> object:
    """Return whether an engine records spans."""
    with mock.patch.object(tracing, "spans", None):
        return embedded(lambda _: tracing.spans is not None)()


STORAGE = {"FDCACHE_STORAGE": "local", "FDCACHE_STORAGE_DIR": "{dir}/blocks", "FDCACHE_STORAGE_SIZE": "1MiB"}
BUCKET = {"FDCACHE_OBJECT_URL": "s3://blocks/folder"}
NODES = {"FDCACHE_NODES_KEY": "a-key-of-the-nodes"}
SERVED = {"FDCACHE_SERVER": "{service}"}
PEERS = {"FDCACHE_TRANSFER": "ipc"}

CASES: dict[str, Case] = {
    "FDCACHE_ENV_FILE": Case("{dir}/file.env", device_blocks, lambda server: server.arena.total_bytes),
    "FDCACHE_SECRETS_DIR": Case("{dir}/secrets", device_blocks, lambda server: server.arena.total_bytes),
    "FDCACHE_BLOCK_SIZE": Case(
        "32",
        lambda engine: engine.manager.layout.block_size,
        engines=("paddle", "replay"),
        refused_by=("adapter",),
    ),
    "FDCACHE_RANKS": Case(
        "2",
        lambda engine: engine.manager.layout.tp_size,
        engines=("paddle", "replay"),
        refused_by=("adapter",),
    ),
    "FDCACHE_DEVICE_MEMORY": Case("1MiB", device_blocks),
    "FDCACHE_WEIGHTS": Case("mine@2", elsewhere=_vllm_fingerprint),
    "FDCACHE_DEVICE_BLOCKS": Case("37", device_blocks),
    "FDCACHE_HOST_MEMORY": Case("2MiB", host_blocks, lambda server: server.arena.total_bytes),
    "FDCACHE_SERVER": Case(
        "{service}",
        lambda engine: (engine.manager.host_cache.server, type(engine.controller.host_arena).__name__),
        lambda server: server.endpoints.address,
    ),
    "FDCACHE_RPC_TIMEOUT": Case("7s", lambda engine: engine.manager._host._timeout, beside=SERVED),
    "FDCACHE_PREFIX_CACHING": Case("0", hits),
    "FDCACHE_REUSE_GRID": Case("128", hits),
    "FDCACHE_LOOKAHEAD_TOKENS": Case("70", hits),
    "FDCACHE_WRITE_POLICY": Case("write_back", backed_up, beside={"FDCACHE_CLEAN_RESERVE": "0"}),
    "FDCACHE_WRITE_THROUGH_THRESHOLD": Case(
        "5",
        lambda engine: engine.manager._tiers.copies.follows_hits,
        beside={"FDCACHE_WRITE_POLICY": "write_through_selective"},
    ),
    "FDCACHE_CLEAN_RESERVE": Case("0", backed_up, beside={"FDCACHE_WRITE_POLICY": "write_back"}),
    "FDCACHE_EVICTION": Case(
        "lru",
        lambda engine: engine.manager._tiers.device.reuse() is not None,
        serve=lambda server: namespace(server)._eviction,
    ),
    "FDCACHE_LOAD_OR_RECOMPUTE": Case("always", lambda engine: engine.manager._choices._is_auto),
    "FDCACHE_PLAN_TIMEOUT": Case("7s", lambda engine: engine.manager._plans._ledger._timeout),
    "FDCACHE_EVENT_BUFFER": Case("100", events),
    "FDCACHE_RUNTIME_DIR": Case("{dir}/other", serve=lambda server: server.endpoints.address),
    "FDCACHE_ARENA_DIR": Case("{dir}/blocks", serve=lambda server: server.arena.directory),
    "FDCACHE_HUGE_PAGES": Case("1", serve=lambda server: server.arena._kind.huge_pages),
    "FDCACHE_NUMA_NODE": Case("0", serve=lambda server: server.arena._kind.numa_node),
    "FDCACHE_HTTP_ADDRESS": Case("127.0.0.1:9", serve=lambda server: server.endpoints.http),
    "FDCACHE_KV_EVENTS": Case(
        "tcp://127.0.0.1:*", serve=lambda server: server.service.namespaces.feeds is not None
    ),
    "FDCACHE_KV_EVENTS_REPLAY": Case(
        "tcp://127.0.0.1:*",
        serve=lambda server: server.service.namespaces.feeds.publisher.replay_address is not None,
        beside={"FDCACHE_KV_EVENTS": "tcp://127.0.0.1:*"},
    ),
    "FDCACHE_RECOVER": Case("0", serve=lambda server: server.arena.manifest.incarnation == server.earlier),
    "FDCACHE_DISCARD": Case("1", serve=in_service("discard")),
    "FDCACHE_DRAIN_TIMEOUT": Case("7s", serve=drains_for),
    "FDCACHE_SESSION_TIMEOUT": Case("7s", serve=in_service("session_timeout")),
    "FDCACHE_NAMESPACE_QUOTA": Case("0.5", serve=lambda server: namespace(server).max_extents),
    "FDCACHE_TENANT_QUOTA": Case("0.5", serve=lambda server: namespace(server).tenants.quotas.default),
    "FDCACHE_TENANT_QUOTAS": Case(
        "search=0.5", serve=lambda server: [*namespace(server).tenants.quotas.names.values()]
    ),
    "FDCACHE_TRACES": Case("console", elsewhere=_traces),
    "FDCACHE_LOG_FORMAT": Case("text", serve=formatter),
    "FDCACHE_SWAP_DRAIN_TIMEOUT": Case("7s", lambda engine: engine.controller.settings.drain_timeout),
    "FDCACHE_SWAP_METHOD": Case("dma", elsewhere=_swap_method),
    "FDCACHE_SWAP_SM_BUDGET": Case("1", elsewhere=lambda: policy().transpose_ctas),
    "FDCACHE_VERIFY": Case("all", lambda engine: engine.controller.device._verify),
    "FDCACHE_CALIBRATION_DIR": Case(
        "{dir}/calibration", elsewhere=lambda: load_calibration(GPU, Settings.load().transfer.calibration_dir)
    ),
    "FDCACHE_STORAGE": Case(
        "local",
        lambda engine: engine.slab and engine.slab.name,
        lambda server: server.service.storage is not None,
        beside={name: text for name, text in STORAGE.items() if name != "FDCACHE_STORAGE"},
    ),
    "FDCACHE_STORAGE_DIR": Case(
        "{dir}/other", lambda engine: engine.slab.path, storage_in_service("directory"), beside=STORAGE
    ),
    "FDCACHE_STORAGE_SIZE": Case(
        "2MiB", lambda engine: engine.slab.stats().capacity_blocks, storage_in_service("size"), beside=STORAGE
    ),
    "FDCACHE_STORAGE_FSYNC": Case(
        "always", lambda engine: engine.slab._fsync, storage_in_service("fsync"), beside=STORAGE
    ),
    "FDCACHE_STORAGE_TIMEOUT": Case(
        "7s",
        lambda engine: (
            engine.manager._tiers.storage.reads._timeout,
            engine.manager._tiers.storage.writes._timeout,
        ),
        storage_in_service("timeout"),
        beside=STORAGE,
    ),
    "FDCACHE_PREFETCH_POLICY": Case("best_effort", reads("policy"), beside=STORAGE),
    "FDCACHE_TRANSFER": Case(
        "ipc", elsewhere=embedded(lambda engine: engine.controller.open_transfer() is None)
    ),
    "FDCACHE_TRANSFER_ROLE": Case(
        "decode", elsewhere=endpoint(lambda opened: opened._settings.role), beside=PEERS
    ),
    "FDCACHE_TRANSFER_ADDRESS": Case(
        "ipc://{dir}/peers.sock", elsewhere=endpoint(lambda opened: opened.address), beside=PEERS
    ),
    "FDCACHE_TRANSFER_KEY": Case(
        "a secret of all instances", elsewhere=endpoint(lambda opened: opened._links._keys), beside=PEERS
    ),
    "FDCACHE_TRANSFER_DIR": Case(
        "{dir}/blocks", elsewhere=endpoint(lambda opened: opened._connector.memory), beside=PEERS
    ),
    "FDCACHE_TRANSFER_TIMEOUT": Case("7s", elsewhere=peer_terms("timeout"), beside=PEERS),
    "FDCACHE_TRANSFER_LEASE": Case(
        "7s", elsewhere=endpoint(lambda opened: opened._decode._lease_ms), beside=PEERS
    ),
    "FDCACHE_TRANSFER_HELD": Case("0.5", elsewhere=peer_terms("held"), beside=PEERS),
    "FDCACHE_TRANSFER_PEER_RANKS": Case(
        "1", elsewhere=endpoint(lambda opened: opened._settings.peer_ranks), beside=PEERS
    ),
    "FDCACHE_OBJECT_URL": Case("s3://blocks/folder", elsewhere=_bucket),
    "FDCACHE_OBJECT_ENDPOINT": Case("http://127.0.0.1:1", elsewhere=_bucket, beside=BUCKET),
    "FDCACHE_OBJECT_REGION": Case("eu-west-1", elsewhere=_bucket, beside=BUCKET),
    "FDCACHE_OBJECT_KEY_ID": Case("an-id", elsewhere=_bucket, beside=BUCKET),
    "FDCACHE_OBJECT_KEY": Case("a-key", elsewhere=_bucket, beside=BUCKET),
    "FDCACHE_OBJECT_SESSION_TOKEN": Case("a-token", elsewhere=_bucket, beside=BUCKET),
    "FDCACHE_NODES": Case("tcp://127.0.0.1:1", elsewhere=_node, beside=NODES),
    "FDCACHE_NODES_ADDRESS": Case(free_address(), elsewhere=_node, beside=NODES),
    "FDCACHE_NODES_KEY": Case("another-key-of-nodes", elsewhere=_node),
    "FDCACHE_NODES_DIRECTORY": Case("redis://127.0.0.1:1/0", elsewhere=_node, beside=NODES),
    "FDCACHE_MOONCAKE_LOG_LEVEL": Case(
        "0",
        elsewhere=lambda: ClientOptions.resolve(Settings.load().group(MooncakeSettings), 0).log_level,
        beside={"MOONCAKE_MASTER_SERVER_ADDR": "127.0.0.1:1"},
    ),
}


def prepare(directory: Path) -> None:
    """Create the files and folders that the values name."""
    for name in ("blocks", "other", "secrets"):
        (directory / name).mkdir(mode=0o700)
    values = {"FDCACHE_DEVICE_BLOCKS": "37", "FDCACHE_HOST_MEMORY": "2MiB"}
    (directory / "file.env").write_text("".join(f"{name}={text}\n" for name, text in values.items()))
    for name, text in values.items():
        (directory / "secrets" / name).write_text(text)
    save_calibration(SAVED, GPU, directory / "calibration")
