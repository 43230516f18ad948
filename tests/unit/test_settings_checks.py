"""Checks across settings, and values derived from other settings."""

from pathlib import Path

import pytest

from fdcache.errors import ConfigurationError, TransferError
from fdcache.integrations.fastdeploy.variables import FALLBACKS, GRID, MODE, SPLIT
from fdcache.layout import KVLayout
from fdcache.machine.memory import MemoryLimits
from fdcache.settings import VARIABLES, Settings, SettingsError, Severity, Source, read_settings
from fdcache.settings.checks import cross_checks
from fdcache.settings.sources import Sourced
from fdcache.transfer.access import rank_address, require_peer_address

PLENTY = MemoryLimits(machine=1 << 50, cgroup=None)


def conflicts_of(environ: dict[str, str], limits: MemoryLimits = PLENTY) -> list[tuple[str, ...]]:
    found = cross_checks(read_settings(environ).settings, limits)
    return [problem.variables for problem in found if problem.severity is not Severity.NOTE]


def test_split_size_is_a_power_of_two() -> None:
    with pytest.raises(SettingsError, match="power of two"):
        Settings.load(environ={"FD_DETERMINISTIC_SPLIT_KV_SIZE": "24"})


@pytest.mark.parametrize(
    ("split", "block", "fits"), [(16, 64, True), (64, 16, True), (32, 48, False), (16, 48, True)]
)
def test_deterministic_grid_must_fit_the_block_size(split: int, block: int, fits: bool) -> None:
    environ = {"FD_DETERMINISTIC_SPLIT_KV_SIZE": str(split), "FDCACHE_BLOCK_SIZE": str(block)}
    assert conflicts_of(environ) == []
    names = ("FD_DETERMINISTIC_SPLIT_KV_SIZE", "FDCACHE_BLOCK_SIZE")
    assert conflicts_of({**environ, "FD_DETERMINISTIC_MODE": "1"}) == ([] if fits else [names])


@pytest.mark.parametrize(
    ("split", "block", "asked", "grid"),
    [(32, 16, None, 32), (16, 64, None, 16), (32, 16, 64, 64), (16, 64, 32, 32), (32, 16, 0, 32)],
)
def test_deterministic_mode_sets_the_reuse_grid(split: int, block: int, asked: int | None, grid: int) -> None:
    environ = {"FD_DETERMINISTIC_SPLIT_KV_SIZE": str(split), "FDCACHE_BLOCK_SIZE": str(block)}
    if asked is not None:
        environ["FDCACHE_REUSE_GRID"] = str(asked)
    assert Settings.load(environ=environ).cache.reuse_grid == (asked or 0)
    settings = Settings.load(environ={**environ, "FD_DETERMINISTIC_MODE": "1"})
    assert settings.cache.reuse_grid == settings.value("FDCACHE_REUSE_GRID") == grid


@pytest.mark.parametrize(("split", "block", "asked"), [(32, 16, 16), (64, 16, 32), (64, 16, 8)])
def test_reuse_grid_must_fit_the_deterministic_grid(split: int, block: int, asked: int) -> None:
    environ = {
        "FD_DETERMINISTIC_SPLIT_KV_SIZE": str(split),
        "FDCACHE_BLOCK_SIZE": str(block),
        "FDCACHE_REUSE_GRID": str(asked),
    }
    assert conflicts_of(environ) == []
    names = ("FDCACHE_REUSE_GRID", "FD_DETERMINISTIC_SPLIT_KV_SIZE")
    assert conflicts_of({**environ, "FD_DETERMINISTIC_MODE": "1"}) == [names]


def test_host_tier_must_fit_into_machine_and_cgroup() -> None:
    environ = {"FDCACHE_HOST_MEMORY": "8GiB"}
    assert conflicts_of(environ, MemoryLimits(16 << 30, None)) == []
    assert conflicts_of(environ, MemoryLimits(4 << 30, None)) == [("FDCACHE_HOST_MEMORY",)]
    assert conflicts_of(environ, MemoryLimits(16 << 30, 4 << 30)) == [("FDCACHE_HOST_MEMORY",)]
    assert conflicts_of(environ, MemoryLimits(None, None)) == []
    assert (
        conflicts_of({**environ, "FDCACHE_RANKS": "4"}, MemoryLimits(16 << 30, None)) == []
    )  # it is that of all ranks


def test_write_policy_needs_a_host_tier() -> None:
    names = ("FDCACHE_WRITE_POLICY", "FDCACHE_HOST_MEMORY")
    assert conflicts_of({"FDCACHE_WRITE_POLICY": "write_back", "FDCACHE_HOST_MEMORY": "0"}) == [names]
    assert conflicts_of({"FDCACHE_WRITE_POLICY": "write_back", "FDCACHE_HOST_MEMORY": "1GiB"}) == []
    assert conflicts_of({}) == []


def test_v1_scheduler_needs_recovery() -> None:
    names = ("FD_DISABLED_RECOVER", "ENABLE_V1_KVCACHE_SCHEDULER")
    assert conflicts_of({"FD_DISABLED_RECOVER": "1"}) == [names]
    assert conflicts_of({"FD_DISABLED_RECOVER": "1", "ENABLE_V1_KVCACHE_SCHEDULER": "0"}) == []


@pytest.mark.parametrize(
    ("devices", "fits"), [("0", False), ("0,1", True), ("-1", True), ("GPU-a,GPU-b,GPU-c", True)]
)
def test_each_rank_needs_a_device(devices: str, fits: bool) -> None:
    found = conflicts_of({"FDCACHE_RANKS": "2", "CUDA_VISIBLE_DEVICES": devices})
    assert found == ([] if fits else [("FDCACHE_RANKS", "CUDA_VISIBLE_DEVICES")])


def test_conflict_names_remedy_and_sources() -> None:
    (problem,) = read_settings({"FD_DISABLED_RECOVER": "1"}).errors
    assert problem.source == "environment, default"
    assert "FD_DISABLED_RECOVER=0" in problem.right
    named = "FD_DISABLED_RECOVER (environment), ENABLE_V1_KVCACHE_SCHEDULER (default): "
    assert str(problem).startswith(named)


def test_conflict_names_a_common_place_once() -> None:
    with pytest.raises(SettingsError, match=r"^FDCACHE_RANKS, CUDA_VISIBLE_DEVICES \(environment\): 2 ranks"):
        Settings.load(environ={"FDCACHE_RANKS": "2", "CUDA_VISIBLE_DEVICES": "0"})


def test_conflict_names_lines_of_a_file_and_options(tmp_path: Path) -> None:
    file = tmp_path / "a.env"
    file.write_text(
        "# storage\nFDCACHE_STORAGE=local\nFDCACHE_DEVICE_MEMORY=1GiB\n\nFDCACHE_DEVICE_BLOCKS=7\n"
    )
    arguments = {"FDCACHE_ENV_FILE": file, "FDCACHE_HOST_MEMORY": Sourced("--host-memory of a command", "0")}
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ={}, arguments=arguments)
    blocks, storage = str(caught.value).splitlines()
    assert blocks.startswith(f"FDCACHE_DEVICE_BLOCKS ({file}:5), FDCACHE_DEVICE_MEMORY ({file}:3): both set")
    assert storage.startswith(
        f"FDCACHE_STORAGE ({file}:2), FDCACHE_HOST_MEMORY (--host-memory of a command): local"
    )


def test_value_and_file_at_once_are_named_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "a.env"
    file.write_text(f"FD_API_KEY=k1\nFD_API_KEY_FILE={tmp_path}/key\n")
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ={"FDCACHE_ENV_FILE": str(file)})
    assert str(caught.value).startswith(f"FD_API_KEY ({file}:1), FD_API_KEY_FILE ({file}:2): both are set")


def test_rejected_value_causes_no_conflicts() -> None:
    found = read_settings({"FDCACHE_WRITE_POLICY": "write_back", "FDCACHE_HOST_MEMORY": "lots"})
    assert found.conflicts == ()
    assert [problem.variables for problem in found.errors] == [("FDCACHE_HOST_MEMORY",)]


LAYOUT = KVLayout.uniform(
    model="m",
    revision="1",
    num_layers=2,
    num_draft_layers=1,
    draft_block_ratio=2.0,
    block_size=64,
    kv_heads=1,
    head_dim=16,
    dtype="bfloat16",
    tp_size=2,
)
BLOCK_BYTES = 2 * (64 * 16 * 2) * 2 + 2 * (64 * 16 * 2) * 2


def test_layout_must_match_block_size_and_ranks() -> None:
    Settings.load(environ={"FDCACHE_RANKS": "2"}).check_layout(LAYOUT)
    Settings.load(environ={}).check_layout(LAYOUT)
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ={"FDCACHE_BLOCK_SIZE": "32", "FDCACHE_RANKS": "3"}).check_layout(LAYOUT)
    assert [problem.variables for problem in caught.value.problems] == [
        ("FDCACHE_BLOCK_SIZE",),
        ("FDCACHE_RANKS",),
    ]
    assert "set FDCACHE_BLOCK_SIZE=64" in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "device_bytes", "blocks"),
    [
        (str(10 * BLOCK_BYTES + 1), None, 10),
        ("1MiB", None, (1 << 20) // BLOCK_BYTES),
        ("0.5", 10 * BLOCK_BYTES, 5),
        ("100%", 10 * BLOCK_BYTES, 10),
    ],
)
def test_device_memory_is_converted_to_blocks(memory: str, device_bytes: int | None, blocks: int) -> None:
    settings = Settings.load(environ={"FDCACHE_DEVICE_MEMORY": memory})
    assert settings.cache_for(LAYOUT, device_bytes).device_blocks == blocks
    assert settings.cache_for(LAYOUT, lambda: device_bytes or 0).device_blocks == blocks
    assert Settings.load(environ={}).cache_for(LAYOUT).device_blocks == 1024


@pytest.mark.parametrize("memory", [str(BLOCK_BYTES - 1), "0.5"])
def test_device_memory_below_one_block_is_refused(memory: str) -> None:
    settings = Settings.load(environ={"FDCACHE_DEVICE_MEMORY": memory})
    with pytest.raises(SettingsError, match="FDCACHE_DEVICE_MEMORY"):
        settings.cache_for(LAYOUT)


def test_device_memory_and_blocks_conflict_in_one_source() -> None:
    environ = {"FDCACHE_DEVICE_MEMORY": "1GiB", "FDCACHE_DEVICE_BLOCKS": "7"}
    assert conflicts_of(environ) == [("FDCACHE_DEVICE_BLOCKS", "FDCACHE_DEVICE_MEMORY")]
    stronger = Settings.load(
        environ={"FDCACHE_DEVICE_MEMORY": "1GiB"}, arguments={"FDCACHE_DEVICE_BLOCKS": 7}
    )
    assert stronger.cache_for(LAYOUT).device_blocks == 7
    weaker = Settings.load(environ={"FDCACHE_DEVICE_MEMORY": "1GiB"}, defaults={"FDCACHE_DEVICE_BLOCKS": 7})
    assert weaker.cache_for(LAYOUT).device_blocks == (1 << 30) // BLOCK_BYTES


NEEDS_HOST_TIER = [("FDCACHE_WRITE_POLICY", "write_back"), ("FDCACHE_STORAGE", "local")]


@pytest.mark.parametrize(("name", "value"), NEEDS_HOST_TIER)
def test_missing_host_tier_is_a_note_unless_it_is_disabled(name: str, value: str) -> None:
    found = read_settings({name: value})
    (problem,) = found.problems
    assert (problem.severity, problem.variables) == (Severity.NOTE, (name, "FDCACHE_HOST_MEMORY"))
    assert "an engine whose own default is no host tier does not start" in problem.wrong
    assert found.errors == ()
    (problem,) = read_settings({name: value, "FDCACHE_HOST_MEMORY": "0"}).problems
    assert problem.severity is Severity.ERROR
    assert read_settings({name: value}, defaults={"FDCACHE_HOST_MEMORY": "1MiB"}).problems == ()


def test_storage_beside_a_service_is_a_note_if_neither_is_an_argument_or_default() -> None:
    environ = {"FDCACHE_STORAGE": "local", "FDCACHE_SERVER": "ipc:///tmp/s/s.sock"}
    (problem,) = read_settings(environ).problems
    assert (problem.severity, problem.variables) == (Severity.NOTE, tuple(environ))
    assert (
        read_settings({"FDCACHE_STORAGE": "local"}, arguments={"FDCACHE_SERVER": "ipc:///s"}).problems == ()
    )
    assert read_settings({"FDCACHE_STORAGE": "local"}, defaults={"FDCACHE_SERVER": "ipc:///s"}).problems == ()


DERIVED_FROM = sorted({*FALLBACKS.values(), SPLIT})


@pytest.mark.parametrize("name", DERIVED_FROM)
def test_boundary_values_are_derived_or_a_warning(name: str) -> None:
    variable = VARIABLES[name]
    bounds = {0, 1, 2**62, 2**63 - 1, variable.minimum, variable.maximum}
    texts = [str(int(bound)) for bound in bounds if bound is not None] + ["/", "x" * 300, "1ms", "1e300"]
    accepted = [text for text in texts if variable.accepts(text)]
    assert len(accepted) > 1
    for text in accepted:
        environ = {name: text, MODE: "1"}
        found = read_settings(environ)
        for target in [*(target for target, source in FALLBACKS.items() if source == name), GRID]:
            taken = found.settings.source(target) is Source.DERIVED
            assert taken or any(target in each.wrong for each in found.warnings), (text, target)


def test_value_that_cannot_be_derived_is_a_warning_about_its_source() -> None:
    settings = Settings.load(environ={"FD_CACHE_PROC_EXIT_TIMEOUT": "0"})
    assert (settings.server.drain_timeout, settings.transfer.drain_timeout) == (0, 30)
    assert settings.source("FDCACHE_SWAP_DRAIN_TIMEOUT") is Source.DEFAULT
    (problem,) = settings.warnings
    assert problem.variables == ("FD_CACHE_PROC_EXIT_TIMEOUT",)
    assert "FDCACHE_SWAP_DRAIN_TIMEOUT is derived from it and cannot be 0, which is not above 0" in str(
        problem
    )


def test_derived_value_overrides_a_callers_default() -> None:
    environ = {MODE: "1", SPLIT: "64"}
    assert Settings.load(environ=environ, defaults={GRID: 32}).cache.reuse_grid == 64
    assert Settings.load(environ={**environ, GRID: "128"}, defaults={GRID: 32}).cache.reuse_grid == 128
    assert Settings.load(environ={}, defaults={GRID: 32}).cache.reuse_grid == 32


def test_place_of_a_derived_value_names_its_variable() -> None:
    settings = Settings.load(environ={"FILE_BACKEND_STORAGE_DIR": "/theirs"})
    assert settings.place("FDCACHE_STORAGE_DIR") == "FILE_BACKEND_STORAGE_DIR in environment"


def test_misspelt_names_are_only_those_of_fdcache() -> None:
    environ = {"FDCACHE_HOST_MEMROY": "1GiB", "FDCACHE_RANK_FILE": "/x", "FD_LOG_DRI": "x", "FD_NEW": "1"}
    assert {name for each in Settings.load(environ=environ).misspelt for name in each.variables} == {
        "FDCACHE_HOST_MEMROY",
        "FDCACHE_RANK_FILE",
    }


def test_hand_overs_in_the_network_need_a_key() -> None:
    environ = {"FDCACHE_TRANSFER": "rdma", "FDCACHE_TRANSFER_ADDRESS": "tcp://10.0.0.1:7000"}
    assert conflicts_of(environ) == [("FDCACHE_TRANSFER_ADDRESS", "FDCACHE_TRANSFER_KEY")]
    assert conflicts_of({**environ, "FDCACHE_TRANSFER_KEY": "k" * 32}) == []
    assert conflicts_of({**environ, "FDCACHE_TRANSFER": "none"}) == []
    assert conflicts_of({**environ, "FDCACHE_TRANSFER_ADDRESS": "ipc:///run/fdcache/t"}) == []


@pytest.mark.parametrize(
    ("address", "ranks"),
    [
        ("tcp://0.0.0.0:7411", 1),
        ("tcp://*:7411", 1),
        ("tcp://[::]:7411", 1),
        ("tcp://[0::0]:7411", 1),
        ("tcp://0:7411", 1),
        ("tcp://0.0:7411", 1),
        ("tcp://000.000.000.000:7411", 1),
        ("tcp:// h:7411", 1),
        ("tcp://user@h:7411", 1),
        ("tcp://a:1;b:7411", 1),
        ("ipc:///a\nb", 1),
        ("tcp://h:65535", 2),
        ("h:7411", 1),
    ],
)
def test_addresses_at_which_no_peer_can_ask_are_reported_as_an_engine_refuses_them(
    address: str, ranks: int
) -> None:
    environ = {"FDCACHE_TRANSFER": "rdma", "FDCACHE_TRANSFER_KEY": "k" * 32, "FDCACHE_RANKS": str(ranks)}
    assert conflicts_of({**environ, "FDCACHE_TRANSFER_ADDRESS": address}) == [("FDCACHE_TRANSFER_ADDRESS",)]
    with pytest.raises(ConfigurationError):
        rank_address(address, ranks - 1)
    if ranks == 1:
        with pytest.raises(TransferError):
            require_peer_address(address)
    assert conflicts_of({**environ, "FDCACHE_TRANSFER_ADDRESS": "tcp://10.0.0.1:65534"}) == []


def test_a_key_that_can_be_guessed_is_reported_as_an_engine_refuses_it() -> None:
    environ = {"FDCACHE_TRANSFER": "rdma", "FDCACHE_TRANSFER_ADDRESS": "tcp://10.0.0.1:7000"}
    assert conflicts_of({**environ, "FDCACHE_TRANSFER_KEY": "short"}) == [("FDCACHE_TRANSFER_KEY",)]
