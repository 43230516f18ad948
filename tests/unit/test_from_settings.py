"""Managers and controllers as the settings describe them."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import embedding
from fdcache import CacheController, CacheManager, CopySettings, KVLayout, WritePolicy
from fdcache.devices import topology
from fdcache.devices.cpu import CpuDevice, memory_bytes
from fdcache.errors import CacheNotReadyError, ConfigurationError
from fdcache.replay import devices
from fdcache.replay.devices import DeviceName
from fdcache.settings import Settings, SettingsError
from fdcache.storage.slab import SlabStore
from fdcache.tiers.host import HostCache, host_block_bytes
from tests.environment_help import GPU
from tests.local_connector import LocalConnector

LAYOUT = KVLayout.uniform(
    model="m", revision="1", block_size=16, num_layers=2, kv_heads=1, head_dim=8, dtype="float16", tp_size=2
)


def load(**given: object) -> Settings:
    return Settings.load(environ={name: str(value) for name, value in given.items()})


def test_the_environment_is_read_when_no_settings_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_DEVICE_BLOCKS", "37")
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", str(5 * host_block_bytes(LAYOUT)))
    monkeypatch.setenv("FDCACHE_SWAP_DRAIN_TIMEOUT", "7s")
    manager = CacheManager.from_settings(LAYOUT)
    assert (manager.num_device_blocks, manager.num_host_blocks) == (37, 5)
    with CacheController.from_settings(LAYOUT, rank=1) as controller:
        controller.initialize_host_cache()
        assert controller.host_arena is not None
        assert controller.host_arena.num_blocks == 5
        assert (controller.rank, controller.settings.drain_timeout) == (1, 7.0)
        assert controller.open_storage() is None


def test_arguments_stand_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_DEVICE_BLOCKS", "37")
    monkeypatch.setenv("FDCACHE_WRITE_POLICY", "write_back")
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", "1MiB")
    settings = Settings.load(arguments={"FDCACHE_DEVICE_BLOCKS": 5})
    manager = CacheManager.from_settings(LAYOUT, settings)
    assert (manager.num_device_blocks, manager.settings.write_policy) == (5, WritePolicy.WRITE_BACK)


def test_a_share_of_device_memory_is_one_of_what_the_caller_says() -> None:
    settings = load(FDCACHE_DEVICE_MEMORY="50%")
    block_bytes = sum(plane.device_stride for plane in LAYOUT.planes)
    manager = CacheManager.from_settings(LAYOUT, settings, device_bytes=lambda: 20 * block_bytes)
    assert manager.num_device_blocks == 10
    with pytest.raises(SettingsError, match="unknown; give a size such as 40GiB"):
        CacheManager.from_settings(LAYOUT, settings)


@pytest.mark.parametrize("make", [CacheManager.from_settings, CacheController.from_settings])
@pytest.mark.parametrize(("name", "value"), [("FDCACHE_BLOCK_SIZE", 64), ("FDCACHE_RANKS", 1)])
def test_what_is_set_has_to_fit_the_layout(make: type, name: str, value: int) -> None:
    with pytest.raises(SettingsError, match=name):
        make(LAYOUT, load(**{name: value}))


@pytest.mark.parametrize("make", [CacheManager.from_settings, CacheController.from_settings])
@pytest.mark.parametrize(
    ("name", "value"), [("FDCACHE_WRITE_POLICY", "write_back"), ("FDCACHE_STORAGE", "local")]
)
def test_an_engine_without_a_host_tier_refuses_what_needs_one(make: type, name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}.*there is none; set FDCACHE_HOST_MEMORY"):
        make(LAYOUT, load(**{name: value}))


def test_a_misspelt_name_is_logged_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    settings = load(FDCACHE_DEVICE_BLOKS=3)
    for _ in range(2):
        CacheManager.from_settings(LAYOUT, settings)
        CacheController.from_settings(LAYOUT, settings).shutdown()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "did you mean FDCACHE_DEVICE_BLOCKS?" in record.message


def test_the_example_refuses_storage_beside_a_service_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_STORAGE", "local")
    monkeypatch.setenv("FDCACHE_SERVER", "ipc:///tmp/no/such.sock")
    with pytest.raises(SystemExit, match=r"^error: FDCACHE_STORAGE=local: with FDCACHE_SERVER [^\n]*$"):
        embedding.main()


def test_a_device_is_made_by_the_settings_or_given() -> None:
    seen: list[CopySettings] = []

    def make(settings: CopySettings) -> CpuDevice:
        seen.append(settings)
        return CpuDevice.of(settings)

    settings = load(FDCACHE_VERIFY="all")
    with CacheController.from_settings(LAYOUT, settings, device=make) as controller:
        assert seen == [settings.transfer]
        assert controller.settings is settings.transfer
    device = CpuDevice()
    with CacheController.from_settings(LAYOUT, settings, device=device) as controller:
        assert controller.device is device


def test_a_controller_without_settings_says_what_is_missing() -> None:
    with CacheController(CopySettings(), LAYOUT) as controller:
        for call in (controller.initialize_host_cache, controller.open_storage):
            with pytest.raises(CacheNotReadyError, match="from_settings"):
                call()


def test_the_storage_of_the_settings_is_opened_below_the_host_cache(tmp_path: Path) -> None:
    settings = load(
        FDCACHE_STORAGE="local",
        FDCACHE_STORAGE_DIR=tmp_path,
        FDCACHE_STORAGE_SIZE="1MiB",
        FDCACHE_HOST_MEMORY="1MiB",
    )
    told: list[tuple[int, int]] = []
    with CacheController.from_settings(LAYOUT, settings) as controller:
        with pytest.raises(CacheNotReadyError, match="initialize_host_cache first"):
            controller.open_storage()
        controller.initialize_host_cache()
        scan = controller.open_storage(lambda done, total: told.append((done, total)))
        assert scan is not None and len(scan.slots) == 0
        assert isinstance(controller._parts.storage and controller._parts.storage.storage, SlabStore)
        assert told


def test_a_service_has_host_memory_and_storage_itself() -> None:
    settings = load(FDCACHE_SERVER="ipc:///run/none.sock")
    assert HostCache.of(settings.cache, LAYOUT) == HostCache(server="ipc:///run/none.sock")
    with CacheController.from_settings(LAYOUT, settings) as controller:
        assert controller.open_storage() is None


class Lookup(LocalConnector):
    """A connector that tells whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def lookup(tmp_path: Path) -> Lookup:
    return Lookup(SlabStore(tmp_path, LAYOUT, rank=0, size=1 << 20))


class TestLookup:
    def test_the_manager_closes_what_it_asks(self, lookup: Lookup) -> None:
        settings = load(FDCACHE_STORAGE="other", FDCACHE_HOST_MEMORY="1MiB")
        CacheManager.from_settings(LAYOUT, settings, lookup=lookup).close()
        assert lookup.closed

    def test_nothing_stays_open_when_no_manager_can_be_made(self, lookup: Lookup) -> None:
        settings = load(FDCACHE_STORAGE="other", FDCACHE_HOST_MEMORY="100")
        with pytest.raises(ConfigurationError, match="host_memory"):
            CacheManager.from_settings(LAYOUT, settings, lookup=lookup)
        assert lookup.closed


def test_ranks_on_one_gpu_have_equal_parts_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: [GPU, GPU])
    assert isinstance(GPU, topology.Gpu)
    found = [devices.device_bytes(DeviceName.CUDA, ranks) for ranks in (1, 2, 3, 4, 5)]
    assert found == [GPU.memory_bytes // share for share in (1, 1, 2, 2, 3)]
    assert devices.device_bytes(DeviceName.CPU, 4) == memory_bytes() // 4


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ({}, "5 blocks on the device, 1 on the host, 0 in storage"),
        ({"FDCACHE_HOST_MEMORY": "0"}, "5 blocks on the device, 0 on the host, 0 in storage"),
        ({"FDCACHE_DEVICE_BLOCKS": "20"}, "6 blocks on the device, 0 on the host, 0 in storage"),
        ({"FDCACHE_PREFIX_CACHING": "0"}, "0 blocks on the device, 0 on the host, 0 in storage"),
    ],
)
def test_the_shortest_engine_is_configured_by_the_environment(
    given: dict[str, str], again: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    embedding.main()
    assert capsys.readouterr().out.splitlines()[-1] == f"first again: {again}"


def test_the_shortest_engine_ends_in_a_line_where_its_storage_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FDCACHE_STORAGE", "local")
    monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path / "file"))
    with pytest.raises(
        SystemExit, match=r"^error: FDCACHE_STORAGE_DIR: .* is not a directory; choose another folder$"
    ):
        embedding.main()


def test_the_shortest_engine_finds_in_storage_what_an_earlier_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FDCACHE_STORAGE", "local")
    monkeypatch.setenv("FDCACHE_STORAGE_DIR", str(tmp_path))
    monkeypatch.setenv("FDCACHE_PREFETCH_POLICY", "wait_complete")
    embedding.main()
    embedding.main()
    first = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first: ")]
    assert first[0].endswith("0 in storage")
    assert not first[1].endswith("0 on the host, 0 in storage")
