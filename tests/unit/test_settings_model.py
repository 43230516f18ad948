"""The variables: descriptions, defaults, kinds of values."""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fdcache.integrations.fastdeploy.log_variables import TracingSettings, UsageSettings
from fdcache.integrations.fastdeploy.model_variables import (
    KernelSettings,
    ModelSettings,
    MoeBackend,
    MoeSettings,
)
from fdcache.integrations.fastdeploy.serving_variables import ServiceSettings
from fdcache.settings import VARIABLES, Settings, SettingsError, Severity, Variable, read_settings
from fdcache.settings.checks import is_service_link
from fdcache.settings.tree import DEFAULTS, GROUPS, KNOWN_NAMES

ROOT = Path(__file__).parents[2]
DOCUMENTED: list[dict[str, Any]] = json.loads((ROOT / "tests/data/environment.json").read_text())
UNDECLARED = ("FD_IPC_APPEND_SUFFIX", "FD_AS_ONLY_FLUSH", "FD_USE_FASTSAFETENSOR", "FD_HEAD_WISE_KV_CACHE")
PARAMS = [pytest.param(entry, id=entry["name"]) for entry in DOCUMENTED]

CHOICES = {
    "FD_LOG_LEVEL": ("INFO", "DEBUG"),
    "FD_TRACE": ("off", "local", "otel", "all"),
    "FD_MODEL_SOURCE": ("AISTUDIO", "MODELSCOPE", "HUGGINGFACE"),
    "FD_ATTENTION_BACKEND": (
        "NATIVE_ATTN",
        "APPEND_ATTN",
        "MLA_ATTN",
        "DSA_ATTN",
        "FLASH_ATTN",
        "FLASH_MASK_ATTN",
        "BLOCK_ATTN",
        "PLAS_ATTN",
        "HPU_ATTN",
    ),
    "FD_SAMPLING_CLASS": ("base", "base_non_truncated", "air", "rejection", "triton"),
    "FD_MOE_BACKEND": (
        "cutlass",
        "marlin",
        "triton",
        "flashinfer-cutlass",
        "flashinfer-cutedsl",
        "flashinfer-trtllm",
    ),
    "FD_MOE_MXFP4_BACKEND": ("flashinfer",),
    "FD_NVFP4_GEMM_BACKEND": ("flashinfer-cutlass", "flashinfer-trtllm", "flashinfer-cudnn"),
    "FD_LOG_REQUESTS_LEVEL": ("0", "1", "2", "3"),
}
FLAG_SPELLINGS = {
    "0": False,
    "1": True,
    "false": False,
    "true": True,
    "no": False,
    "yes": True,
    "off": False,
    "on": True,
    "False": False,
    "True": True,
}
FREE_TEXTS = ("text", "secret", "secrets", "path", "list")


def test_all_115_variables_and_the_four_undeclared_ones_are_described() -> None:
    assert len(DOCUMENTED) == 115
    assert {entry["name"] for entry in DOCUMENTED}.union(UNDECLARED) <= set(VARIABLES)


def test_defaults_are_those_of_the_old_module() -> None:
    expected = {}
    for entry in DOCUMENTED:
        name, default = entry["name"], entry["default"]
        is_none = name == "FD_USAGE_STATS_SERVER" or default is None
        expected[name] = None if is_none else VARIABLES[name].parse("" if default == [] else str(default))
    assert {name: DEFAULTS.value(name) for name in expected} == expected


@pytest.mark.parametrize("entry", PARAMS)
def test_wrong_value_is_an_error_if_fdcache_uses_the_variable(entry: dict[str, Any]) -> None:
    variable = VARIABLES[entry["name"]]
    environ = {variable.name: "\0" if variable.type in FREE_TEXTS else "a b//: ?"}
    (problem,) = read_settings(environ).problems
    assert problem.variables == (variable.name,)
    assert problem.source == "environment"
    assert problem.wrong
    assert problem.right
    may_be_newer = variable.choices and not variable.used_in
    assert problem.severity is (Severity.WARNING if may_be_newer else Severity.ERROR)
    if variable.used_in:
        with pytest.raises(SettingsError, match=variable.name):
            Settings.load(environ=environ)
    else:
        assert Settings.load(environ=environ).warnings == (problem,)


def test_unknown_choice_of_the_engine_is_accepted_and_known_ones_ignore_case() -> None:
    settings = Settings.load(environ={"FD_MOE_BACKEND": "Cutlass", "FD_TRACE": "newer"})
    assert settings.group(MoeSettings).backend is MoeBackend.CUTLASS
    assert (settings.group(TracingSettings).mode, settings.render("FD_TRACE")) == ("newer", "newer")
    (problem,) = settings.warnings
    assert problem.variables == ("FD_TRACE",)
    assert "off, local, otel, all" in problem.right
    assert settings.fingerprint != Settings.load(environ={"FD_TRACE": "other"}).fingerprint


def test_unknown_choice_of_fdcache_is_an_error() -> None:
    for name in ("FDCACHE_WRITE_POLICY", "FD_ATTENTION_BACKEND", "FD_LOG_LEVEL"):
        with pytest.raises(SettingsError, match=f"{name}.*is not one of"):
            Settings.load(environ={name: "newer", "FDCACHE_HOST_MEMORY": "1MiB"})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("FDCACHE_CLEAN_RESERVE", "-1", "'-1' is below 0; use an integer, at least 0"),
        ("FDCACHE_DEVICE_BLOCKS", "0", "'0' is not above 0; use an integer, above 0"),
        (
            "FDCACHE_EVENT_BUFFER",
            "100000001",
            "'100000001' is above 100000000; use an integer from 0 to 100000000",
        ),
        ("FDCACHE_HOST_MEMORY", "-1", "'-1' is below 0; use a size, at least 0"),
        ("FDCACHE_STORAGE_SIZE", "3", "'3' is below 4KiB; use a size, at least 4KiB"),
        ("FDCACHE_STORAGE_SIZE", "-5", "'-5' is below 4KiB; use a size, at least 4KiB"),
        ("FDCACHE_PLAN_TIMEOUT", "-3s", "'-3s' is not above 0; use a duration, above 0"),
        ("FDCACHE_DEVICE_BLOCKS", "some", "'some' is not an integer; use a whole number"),
    ],
)
def test_value_out_of_range_has_its_own_message(name: str, text: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ={name: text})
    assert str(caught.value) == f"{name} (environment): {said}"


@pytest.mark.parametrize(("name", "choices"), CHOICES.items())
def test_each_documented_choice_is_accepted_and_no_other(name: str, choices: tuple[str, ...]) -> None:
    variable = VARIABLES[name]
    for choice in choices:
        assert variable.render(Settings.load(environ={name: choice}).value(name)) == choice
    for wrong in ("nonsense", choices[0] + "x", "-1"):
        assert not (variable.accepts(wrong) and variable.knows(variable.parse(wrong)))


@pytest.mark.parametrize("name", [name for name, v in VARIABLES.items() if v.type == "flag"])
def test_flag_accepts_every_spelling(name: str) -> None:
    for text, flag in FLAG_SPELLINGS.items():
        assert VARIABLES[name].parse(text) is flag
    for wrong in ("2", "t", "enable", "", "00"):
        assert not VARIABLES[name].accepts(wrong)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("1KiB", 1024),
        ("8Gi", 8 << 30),
        ("4G", 4 * 10**9),
        ("4GB", 4 * 10**9),
        ("1.5 MiB", 3 << 19),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert VARIABLES["FDCACHE_HOST_MEMORY"].parse(text) == size


@pytest.mark.parametrize(
    ("text", "value"), [("40GiB", 40 << 30), ("0.9", 0.9), (".5", 0.5), ("90%", 0.9), ("1", 1)]
)
def test_memory_is_a_size_or_a_share(text: str, value: float) -> None:
    variable = VARIABLES["FDCACHE_DEVICE_MEMORY"]
    assert (variable.parse(text), type(variable.parse(text))) == (value, type(value))
    assert variable.parse(variable.render(variable.parse(text))) == value


@pytest.mark.parametrize("text", ["0", "0.0", "0%", "101%", "-1", "most", "nan", "1.5"])
def test_invalid_memory_is_refused(text: str) -> None:
    assert not VARIABLES["FDCACHE_DEVICE_MEMORY"].accepts(text)


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("8MiB", 8), ("1GiB", 1024)])
def test_size_in_mebibytes_accepts_units(text: str, size: int) -> None:
    assert VARIABLES["FD_CUSTOM_AR_MAX_SIZE_MB"].parse(text) == size
    assert not VARIABLES["FD_CUSTOM_AR_MAX_SIZE_MB"].accepts("1KiB")


@pytest.mark.parametrize("text", ["lots", "1.5", "-1", "1XB", "9" * 40, "1.5.2", "GiB", "nan", "1e3"])
def test_invalid_size_is_refused(text: str) -> None:
    assert not VARIABLES["FDCACHE_HOST_MEMORY"].accepts(text)


@pytest.mark.parametrize(
    "text", ["(none)=0.5", "search=0.5,(none)=0.1", "=0.5", "a=0.1,a=0.2", "a=0", "a=2", "a"]
)
def test_invalid_quotas_are_refused(text: str) -> None:
    assert not VARIABLES["FDCACHE_TENANT_QUOTAS"].accepts(text)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("FDCACHE_PLAN_TIMEOUT", "1.5", 1.5),
        ("FDCACHE_PLAN_TIMEOUT", "250ms", 0.25),
        ("FDCACHE_PLAN_TIMEOUT", "2m", 120.0),
        ("FD_WORKER_ALIVE_TIMEOUT", "1h", 3600),
        ("FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS", "2s", 2000),
        ("FD_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS", "700", 700),
    ],
)
def test_durations_have_units(name: str, text: str, value: float) -> None:
    assert VARIABLES[name].parse(text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e400", "soon", "1.5.2s", "9" * 400 + "s"])
def test_invalid_duration_is_refused(text: str) -> None:
    assert not VARIABLES["FDCACHE_PLAN_TIMEOUT"].accepts(text)
    assert not VARIABLES["FD_WORKER_ALIVE_TIMEOUT"].accepts(text)


def test_faults_of_the_old_module_are_fixed() -> None:
    settings = Settings.load(
        environ={
            "FD_NVFP4_GEMM_BACKEND": "flashinfer-cudnn",
            "FD_USE_MACHETE": "0",
            "FD_ZMQ_SNDHWM": "10000",
            "FD_PLUGINS": ",",
            "FD_API_KEY": "",
            "DO_NOT_TRACK": "true",
        }
    )
    assert settings.group(KernelSettings).nvfp4_gemm_backend == "flashinfer-cudnn"
    assert settings.group(KernelSettings).use_machete is False
    assert settings.group(ServiceSettings).send_high_water_mark == 10000
    assert settings.group(ModelSettings).plugins == ()
    assert settings.group(ServiceSettings).api_keys == ()
    assert settings.group(UsageSettings).do_not_track is True
    assert settings.group(UsageSettings).server is None


def test_descriptions_are_complete() -> None:
    for variable in VARIABLES.values():
        assert variable.meaning.endswith("."), variable.name
        assert variable.meaning[0].isupper(), variable.name
        assert variable.group in Settings.model_fields, variable.name
        assert variable.since, variable.name
        assert variable.kind.example, variable.name


def test_own_names_are_no_service_links() -> None:
    own = [name for name in VARIABLES if name.startswith("FDCACHE_")]
    assert len(own) > 15
    for name in own:
        assert not is_service_link(name, "tcp://10.0.0.1:80")
        assert "_SERVICE_" not in name
        assert not name.endswith("_PORT")


def test_group_refuses_unknown_fields() -> None:
    with pytest.raises(ValueError, match="device_blokcs"):
        Settings.model_validate({"cache": {"device_blokcs": 3}})


def test_fingerprint_follows_values_but_not_secrets_or_spelling() -> None:
    plain = Settings.load(environ={}).fingerprint
    assert plain == Settings.load(environ={"FD_DEBUG": "no", "FD_API_KEY": "k1"}).fingerprint
    assert plain != Settings.load(environ={"FD_DEBUG": "1"}).fingerprint
    assert len(plain) == 64


CONSUMERS = {
    "cache": "fdcache/manager fdcache/tiers fdcache/service",
    "server": "fdcache/service/server",
    "transfer": "fdcache/controller fdcache/devices",
    "deployment": "fdcache_cli/replay.py fdcache/integrations/vllm fdcache/manager fdcache/service/server",
    "storage_tier": "fdcache",
    "mooncake": "fdcache/integrations/mooncake",
}


@cache
def attributes_read(room: str) -> frozenset[tuple[str, str]]:
    """Find every attribute read in a file or room, with the name of the object that it is read from."""
    path = ROOT / room
    found = set()
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                found.add((name.strip("_"), node.attr))
    return frozenset(found)


@pytest.mark.parametrize(
    "variable", [v for v in VARIABLES.values() if v.used_in and v.group in CONSUMERS], ids=lambda v: v.name
)
def test_each_own_field_is_read_by_the_room_it_configures(variable: Variable) -> None:
    read = {each for room in CONSUMERS[variable.group].split() for each in attributes_read(room)}
    if variable.name == "FDCACHE_DEVICE_MEMORY":
        assert ("settings", "cache_for") in read
    else:
        assert {("settings", variable.field), (variable.group, variable.field)} & read


def test_each_name_belongs_to_one_variable() -> None:
    variables = [variable for members in GROUPS.values() for variable in members]
    names = [name for variable in variables for name in (variable.name, *variable.aliases)]
    assert sorted(names) == sorted(KNOWN_NAMES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FDCACHE_DEVICE_BLOCKS", "\uff11\uff12"),
        ("FDCACHE_TENANT_QUOTA", "\uff10.5"),
        ("FDCACHE_DRAIN_TIMEOUT", "\uff13"),
        ("FDCACHE_HOST_MEMORY", "\uff18GiB"),
        ("FDCACHE_RANKS", "\u0663"),
    ],
)
def test_digits_of_other_scripts_are_no_number(name: str, text: str) -> None:
    assert not VARIABLES[name].accepts(text)


@pytest.mark.parametrize("text", ["9" * 308 + "d", "1e308d", "36501d", "1e10", "9" * 309 + "d"])
def test_a_duration_ends_within_a_hundred_years(text: str) -> None:
    with pytest.raises(SettingsError, match=r"FDCACHE_DRAIN_TIMEOUT .* is not a duration; .* up to 36500d"):
        Settings.load(environ={"FDCACHE_DRAIN_TIMEOUT": text})
    assert Settings.load(environ={"FDCACHE_DRAIN_TIMEOUT": "36500d"}).server.drain_timeout == 36500 * 86400


def test_a_home_of_an_unknown_user_is_no_path() -> None:
    for name in ("FD_CONFIG_ROOT", "FDCACHE_CALIBRATION_DIR"):
        assert not VARIABLES[name].accepts("~no-such-user/x")


def test_a_path_is_not_longer_than_the_system_takes() -> None:
    assert VARIABLES["FD_LOG_DIR"].accepts("/" + "a" * 255)
    assert not VARIABLES["FD_LOG_DIR"].accepts("/" + "a" * 256)
    assert not VARIABLES["FD_LOG_DIR"].accepts("/a" * 2048)
