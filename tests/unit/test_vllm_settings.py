"""Settings from vLLM's configuration, as plain data: vLLM is not needed."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fdcache.errors import ConfigurationError, TransferNotFoundError
from fdcache.integrations.vllm import settings
from fdcache.machine.memory import available_memory
from fdcache.settings import Source
from fdcache.settings.cache import WritePolicy
from tests.vllm_configs import vllm_config


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FDCACHE_HOST_MEMORY", "FDCACHE_WRITE_POLICY", "FDCACHE_SERVER"):
        monkeypatch.delenv(name, raising=False)


def loaded(extra: dict[str, object], **changed: Any) -> Any:
    return settings.load_settings(vllm_config(extra, **changed), 16)


def test_the_extra_configuration_is_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", "1GiB")
    monkeypatch.setenv("FDCACHE_WRITE_POLICY", "write_back")
    found = loaded({"FDCACHE_HOST_MEMORY": "2GiB"})
    assert found.render("FDCACHE_HOST_MEMORY") == "2GiB"
    assert found.cache.write_policy is WritePolicy.WRITE_BACK
    assert found.place("FDCACHE_HOST_MEMORY") != found.place("FDCACHE_WRITE_POLICY")
    assert found.source("FDCACHE_HOST_MEMORY") is not Source.DEFAULT


def test_blocks_are_written_through_unless_the_user_says_otherwise() -> None:
    assert loaded({"FDCACHE_HOST_MEMORY": "1GiB"}).cache.write_policy is WritePolicy.WRITE_THROUGH


def test_data_parallel_engines_have_folders_of_their_own() -> None:
    """The files of local storage have one owner; other stores are shared."""
    for storage, folders in (("local", ["/s", "/s/engine-1", "/s/engine-2"]), ("mooncake", ["/s"] * 3)):
        given: dict[str, object] = {
            "FDCACHE_HOST_MEMORY": "1GiB",
            "FDCACHE_STORAGE": storage,
            "FDCACHE_STORAGE_DIR": "/s",
            "MOONCAKE_MASTER_SERVER_ADDR": "master:50051",
        }
        found = []
        for index in range(3):
            engine = vllm_config(given, parallel_config__data_parallel_index=index)
            found.append(str(settings.load_settings(engine, 16).storage_tier.directory))
        assert found == folders


def test_the_settings_in_force_are_told_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDCACHE_HOST_MEMORY", "1GiB")
    monkeypatch.setenv("FDCACHE_EVICTION", "lru")
    told = settings.settings_in_force(loaded({"FDCACHE_HOST_MEMORY": "2GiB"})).split(", ")
    assert {
        "FDCACHE_HOST_MEMORY=2GiB (kv_connector_extra_config)",
        "FDCACHE_EVICTION=lru (environment)",
        "FDCACHE_BLOCK_SIZE=16 (default)",
    } <= set(told)
    assert not any(each.startswith("FDCACHE_VERIFY=") for each in told)


def test_an_unknown_name_of_the_extra_configuration_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"FDCACHE_HOST_MEMROY .*FDCACHE_HOST_MEMORY"):
        loaded({"FDCACHE_HOST_MEMROY": "1GiB"})
    with pytest.raises(ConfigurationError, match=r"FDCACHE_SWAP_CTAS is no setting; .*fdcache init"):
        loaded({"FDCACHE_SWAP_CTAS": "4"})


def test_scales_made_at_run_time_are_not_shared() -> None:
    with pytest.raises(ConfigurationError, match=r"FDCACHE_SERVER .*calculate_kv_scales"):
        loaded({"FDCACHE_SERVER": "ipc:///run/fdcache.sock"}, cache_config__calculate_kv_scales=True)
    loaded({"FDCACHE_HOST_MEMORY": "1GiB"}, cache_config__calculate_kv_scales=True)


def check(extra: dict[str, object], outer: Any = None, **changed: Any) -> Any:
    """Check a configuration as before the weights are loaded; return it."""
    made = vllm_config(extra, **changed)
    settings.check_settings(made.kv_transfer_config, outer or made.kv_transfer_config, made)
    return made


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"FDCACHE_HOST_MEMROY": "1GiB"}, "FDCACHE_HOST_MEMROY .*FDCACHE_HOST_MEMORY"),
        ({"FDCACHE_HOST_MEMORY": "much"}, "FDCACHE_HOST_MEMORY .*'much'"),
        ({"FDCACHE_HOST_MEMORY": "0"}, "FDCACHE_HOST_MEMORY=0 .*set FDCACHE_HOST_MEMORY"),
        ({"FDCACHE_HOST_MEMORY": "1GiB", "FDCACHE_RANKS": 2}, "FDCACHE_RANKS=2 .*vLLM has 1; unset it"),
        ({"FDCACHE_HOST_MEMORY": "1GiB", "FDCACHE_BLOCK_SIZE": 32}, "FDCACHE_BLOCK_SIZE=32 .*vLLM has 16"),
        ({"FDCACHE_HOST_MEMORY": "1GiB", "FDCACHE_STORAGE": "nosuch"}, "FDCACHE_STORAGE=nosuch"),
        (
            {"FDCACHE_SERVER": "ipc:///s", "FDCACHE_STORAGE": "local"},
            "FDCACHE_STORAGE .*belongs to the service",
        ),
        ({"FDCACHE_HOST_MEMORY": "1GiB", "kv_load_failure_policy": "retry"}, "'recompute' or 'fail'"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_is_wrong_is_told_before_the_weights_are_loaded(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as raised:
        check(extra)
    assert not isinstance(raised.value, ValueError), "vLLM makes an error of its own of a ValueError"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"FDCACHE_TRANSFER_LEASE": 5}, "FDCACHE_TRANSFER_LEASE .*no effect in vLLM"),
        (
            {"FDCACHE_TRANSFER": "ipc", "FDCACHE_TRANSFER_DIR": "/run"},
            "FDCACHE_TRANSFER_DIR .*no effect in vLLM",
        ),
        ({"FDCACHE_DEVICE_BLOCKS": 5}, "FDCACHE_DEVICE_BLOCKS .*no effect in vLLM"),
        ({"FDCACHE_HUGE_PAGES": "1"}, "FDCACHE_HUGE_PAGES .*a setting of a service"),
        ({"FD_MAX_PREFETCH": "1"}, "FD_MAX_PREFETCH is no setting"),
        ({"FD_CACHE_PARAMS": "none"}, "FD_CACHE_PARAMS .*a setting of another engine"),
        ({"FDCACHE_SERVER": "ipc:///s"}, "FDCACHE_HOST_MEMORY .*no effect beside FDCACHE_SERVER"),
        ({"FDCACHE_SERVER": "ipc:///s", "FDCACHE_EVICTION": "lru"}, "FDCACHE_EVICTION .*no effect beside"),
    ],
    ids=lambda given: next(reversed(given)) if isinstance(given, dict) else "",
)
def test_a_setting_of_the_connector_without_effect_is_refused_by_name(
    extra: dict[str, object], named: str
) -> None:
    memory = {} if "FDCACHE_EVICTION" in extra else {"FDCACHE_HOST_MEMORY": "1GiB"}
    with pytest.raises(ConfigurationError, match=f"{named}.*leave it out|{named}"):
        check({**memory, **extra})


def test_a_variable_without_effect_is_told_by_name_and_others_meant_for_a_service_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {
        "FDCACHE_TRANSFER_LEASE": "5",
        "FDCACHE_HOST_MEMORY": "1GiB",
        "FDCACHE_ARENA_DIR": "/run",
        "FDCACHE_DEVICE_BLOCKS": "1024",  # the default
    }.items():
        monkeypatch.setenv(name, value)
    made = check({"FDCACHE_SERVER": "ipc:///s"})
    with caplog.at_level(logging.WARNING):
        settings.warn_of_settings_without_effect(settings.load_settings(made, 16))
    assert [each.message for each in caplog.records] == [
        "FDCACHE_HOST_MEMORY (environment) has no effect beside FDCACHE_SERVER (kv_connector_extra_config): the "
        "service's counts",
        "FDCACHE_TRANSFER_LEASE (environment) has no effect in vLLM",
    ]


@pytest.mark.parametrize(
    ("role", "extra", "named"),
    [
        ("kv_producer", {}, "kv_role 'kv_producer' hands blocks over, and FDCACHE_TRANSFER is 'none'"),
        ("kv_consumer", {}, "kv_role 'kv_consumer' hands blocks over, and FDCACHE_TRANSFER is 'none'"),
        (
            "kv_consumer",
            {"FDCACHE_TRANSFER": "ipc", "FDCACHE_TRANSFER_ROLE": "prefill"},
            "FDCACHE_TRANSFER_ROLE=prefill .*kv_role is 'kv_consumer'; unset it",
        ),
        ("kv_both", {"FDCACHE_TRANSFER": "pigeons"}, "FDCACHE_TRANSFER=pigeons: no such connector"),
    ],
)
def test_a_role_of_which_nothing_would_come_is_refused_by_name(
    role: str, extra: dict[str, object], named: str
) -> None:
    with pytest.raises((ConfigurationError, TransferNotFoundError), match=named):
        check({"FDCACHE_HOST_MEMORY": "1GiB", **extra}, kv_transfer_config__kv_role=role)


@pytest.mark.parametrize(
    ("role", "part"), [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "mixed")]
)
def test_the_role_of_hand_overs_is_that_of_vllm(role: str, part: str) -> None:
    extra: dict[str, object] = {"FDCACHE_HOST_MEMORY": "1GiB", "FDCACHE_TRANSFER": "ipc"}
    made = check(extra, kv_transfer_config__kv_role=role)
    assert settings.load_settings(made, 16).peers.role.value == part


@pytest.mark.parametrize(
    ("given", "third"), [("tcp://node-1:7000", "tcp://node-1:7004"), ("ipc:///run/kv", "ipc:///run/kv.4")]
)
def test_each_data_parallel_engine_has_addresses_of_its_own(given: str, third: str) -> None:
    extra: dict[str, object] = {
        "FDCACHE_HOST_MEMORY": "1GiB",
        "FDCACHE_TRANSFER": "ipc",
        "FDCACHE_TRANSFER_ADDRESS": given,
        "FDCACHE_TRANSFER_KEY": "s" * 32,
    }
    made = check(extra, parallel_config__world_size=2, parallel_config__data_parallel_index=2)
    assert settings.load_settings(made, 16).peers.address == third


def test_without_host_memory_and_service_a_safe_part_of_the_memory_is_chosen_for_every_process() -> None:
    made = check({})
    chosen = settings.load_settings(made, 16).cache.host_memory
    assert 0 < chosen <= available_memory().nbytes // 3
    assert made.kv_transfer_config.kv_connector_extra_config == {"FDCACHE_HOST_MEMORY": f"{chosen >> 20}MiB"}
    four = check({}, parallel_config__data_parallel_size_local=4)
    of_four = settings.load_settings(four, 16).cache.host_memory
    assert of_four <= available_memory().nbytes // 3 // 4


@pytest.mark.parametrize("given", [{"FDCACHE_HOST_MEMORY": "1GiB"}, {"FDCACHE_SERVER": "ipc:///s"}])
def test_host_memory_or_a_service_that_is_given_stays(given: dict[str, object]) -> None:
    extra = dict(given)
    assert check(extra).kv_transfer_config.kv_connector_extra_config == given


def outer(policy: str, *connectors: dict[str, Any]) -> SimpleNamespace:
    """The transfer configuration of a connector with others in it."""
    return SimpleNamespace(
        kv_connector="MultiConnector",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": list(connectors)},
    )


def test_the_memory_chosen_under_an_outer_connector_is_in_its_configuration() -> None:
    inner = {"kv_connector": "FdcacheConnector", "kv_role": "kv_both"}
    top = outer("recompute", {"kv_connector": "Other"}, inner)
    check({}, top)
    other, own = top.kv_connector_extra_config["connectors"]
    assert other == {"kv_connector": "Other"}
    assert own["kv_connector_extra_config"].keys() == {"FDCACHE_HOST_MEMORY"}
    assert "kv_connector_extra_config" not in inner, "the user's own"


@pytest.mark.parametrize(
    ("of_all", "own", "remedy"),
    [
        (
            "fail",
            None,
            "end with an error; set kv_load_failure_policy to 'recompute' beside .*MultiConnector",
        ),
        ("fail", "recompute", "end with an error; set kv_load_failure_policy to 'recompute' beside"),
        ("recompute", "fail", "be computed; set kv_load_failure_policy to 'fail' beside"),
        ("recompute", None, None),
        ("fail", "fail", None),
    ],
)
def test_under_an_outer_connector_another_failure_policy_than_its_own_is_refused(
    of_all: str, own: str | None, remedy: str | None
) -> None:
    extra: dict[str, object] = {"FDCACHE_HOST_MEMORY": "1GiB"}
    extra |= {} if own is None else {"kv_load_failure_policy": own}
    if remedy is None:
        check(extra, outer(of_all))
        return
    with pytest.raises(ConfigurationError, match=remedy):
        check(extra, outer(of_all))


@pytest.mark.parametrize(
    ("given", "extra", "chosen"),
    [
        ("fail", None, "recompute"),
        ("recompute", None, "recompute"),
        ("fail", "fail", "fail"),
        ("recompute", "fail", "fail"),
    ],
)
def test_failed_loads_are_recomputed_unless_the_user_chose(
    given: str, extra: str | None, chosen: str
) -> None:
    """vLLM's own option has "fail" as its default and does not tell who gave it."""
    named: dict[str, object] = {} if extra is None else {"kv_load_failure_policy": extra}
    transfer = SimpleNamespace(kv_load_failure_policy=given, kv_connector_extra_config=named)
    settings.choose_failure_policy(transfer, transfer)
    assert transfer.kv_load_failure_policy == chosen
    assert not settings.extra_settings(named)
