"""``fdcache.envs`` compared with the environment module that it replaces."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fdcache.envs
from fdcache import envs
from fdcache.integrations.fastdeploy.old_module import OLD_VARIABLES
from fdcache.settings import VARIABLES, SettingsError
from tests.old_environment import INTEGERS, READERS, VALUES

ALIASED = "FD_NVFP4_GEMM_BACKEND"
AGREEMENT = [
    pytest.param(name, text, id=f"{name}={text!r}")
    for name in READERS
    if name != ALIASED
    for text in VALUES.get(name, ("0", "1"))
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without any of the variables in the environment, and restore it."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.removesuffix("_FILE") in VARIABLES]:
            del os.environ[name]
        yield


def same(new: Any, old: Any) -> bool:
    return type(new) is type(old) and bool(new == old)


def test_table_of_values_covers_every_variable_but_flags() -> None:
    assert set(VALUES) <= set(READERS)
    for name in READERS.keys() - VALUES.keys() - {ALIASED}:
        assert VARIABLES[name].type == "flag"


@pytest.mark.parametrize(("name", "text"), AGREEMENT)
def test_set_value_has_the_old_type_and_value(name: str, text: str) -> None:
    os.environ[name] = text
    assert same(getattr(envs, name), READERS[name](os.environ))


def test_unset_values_have_the_old_types_and_values() -> None:
    names = [name for name in READERS if name != "FD_USAGE_STATS_SERVER"]
    assert len(names) > 100
    assert not [name for name in names if not same(getattr(envs, name), READERS[name](os.environ))]


def test_telemetry_address_is_empty_by_default() -> None:
    assert envs.FD_USAGE_STATS_SERVER == ""


def test_backend_is_read_under_its_own_and_its_deprecated_name() -> None:
    os.environ[ALIASED] = "flashinfer-cudnn"
    assert envs.FD_NVFP4_GEMM_BACKEND == "flashinfer-cudnn"
    del envs.FD_NVFP4_GEMM_BACKEND
    os.environ["FD_NVFP4_MOE_BACKEND"] = "flashinfer-cutlass"
    with pytest.warns(FutureWarning, match=ALIASED):
        assert same(envs.FD_NVFP4_GEMM_BACKEND, READERS[ALIASED](os.environ))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("FD_USE_MACHETE", "true", "1"),
        ("FD_USE_MACHETE", "off", "0"),
        ("TRACES_ENABLE", "1", "true"),
        ("FD_CPU_USE_BF16", "yes", "True"),
        ("FD_DEBUG", "on", 1),
        ("FD_USE_DEEP_GEMM", "yes", True),
        ("FD_BUILDING_ARCS", "80,90", "[80,90]"),
        ("FD_WORKER_ALIVE_TIMEOUT", "2m", 120),
        ("FD_API_KEY", " k1 , k2 ,", ["k1", "k2"]),
        ("DO_NOT_TRACK", "true", True),
    ],
)
def test_new_spelling_has_the_value_that_callers_compare_with(name: str, text: str, value: object) -> None:
    os.environ[name] = text
    assert same(getattr(envs, name), value)


@pytest.mark.parametrize("name", [*INTEGERS, "FD_USE_DEEP_GEMM", "FD_DETERMINISTIC_SPLIT_KV_SIZE"])
def test_invalid_value_raises_value_error(name: str) -> None:
    os.environ[name] = "24x"
    with pytest.raises(ValueError, match=name):
        getattr(envs, name)


def test_reads_follow_the_environment() -> None:
    seen = [envs.FD_LOG_DIR]
    for text in ("a", "b", "b", "a"):
        os.environ["FD_LOG_DIR"] = text
        seen.append(envs.FD_LOG_DIR)
    del os.environ["FD_LOG_DIR"]
    seen.append(envs.FD_LOG_DIR)
    assert seen == ["log", "a", "b", "b", "a", "log"]


def test_list_is_a_copy() -> None:
    os.environ["FD_API_KEY"] = "k1"
    envs.FD_API_KEY.append("k2")
    assert envs.FD_API_KEY == ["k1"]
    del envs.FD_API_KEY
    envs.FD_API_KEY.append("k2")
    assert envs.FD_API_KEY == []


def test_home_folder_follows_the_environment() -> None:
    for home in ("/home/a", "/home/b"):
        os.environ["HOME"] = home
        assert f"{home}/.config/fastdeploy" == envs.FD_CONFIG_ROOT


def test_files_and_dotenv_are_read_as_by_settings(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k1,k2\n")
    (tmp_path / "a.env").write_text("FD_DEBUG=1\nFD_LOG_DIR=dotenv\n")
    os.environ["FD_API_KEY_FILE"] = str(tmp_path / "key")
    os.environ["FDCACHE_ENV_FILE"] = str(tmp_path / "a.env")
    assert envs.FD_API_KEY == ["k1", "k2"]
    assert envs.FD_DEBUG == 1
    assert envs.FD_LOG_DIR == "dotenv"
    os.environ["FD_LOG_DIR"] = "environment"
    assert envs.FD_LOG_DIR == "environment"
    del os.environ["FDCACHE_ENV_FILE"]
    assert envs.FD_DEBUG == 0


@pytest.mark.parametrize(
    ("name", "value", "text", "read"),
    [
        ("FD_USE_DEEP_GEMM", True, "1", True),
        ("FD_USE_MACHETE", False, "0", "0"),
        ("TRACES_ENABLE", True, "1", "true"),
        ("FD_DEBUG", 1, "1", 1),
        ("FD_TOKEN_PROCESSOR_HEALTH_TIMEOUT", 1.5, "1.5", 1.5),
        ("FD_LOG_DIR", Path("/x"), "/x", "/x"),
        ("FD_API_KEY", ["a", "b"], "a,b", ["a", "b"]),
        ("FD_PLUGINS", ("a",), "a", ["a"]),
    ],
)
def test_assigning_writes_the_environment(name: str, value: object, text: str, read: object) -> None:
    setattr(envs, name, value)
    assert os.environ[name] == text
    assert same(getattr(envs, name), read)


def test_assigning_none_removes() -> None:
    os.environ["FD_JOB_ID"] = "1"
    envs.FD_JOB_ID = None
    assert "FD_JOB_ID" not in os.environ
    assert envs.FD_JOB_ID is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FD_DEBUG", 2),
        ("FD_LOG_LEVEL", "some"),
        ("FD_API_KEY", ["a,b"]),
        ("FD_LOG_DIR", object()),
        ("FD_DEBUG", True + 1),
    ],
)
def test_assigning_an_invalid_value_changes_nothing(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        setattr(envs, name, value)
    assert name not in os.environ


def test_deleting_removes_the_file_name_too(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("1")
    os.environ["FD_JOB_ID_FILE"] = str(tmp_path / "id")
    assert envs.FD_JOB_ID == "1"
    del envs.FD_JOB_ID
    assert envs.FD_JOB_ID is None
    del envs.FD_JOB_ID


def test_dir_lists_the_variables_only() -> None:
    assert dir(envs) == sorted(OLD_VARIABLES)
    assert set(READERS) <= set(dir(envs))


def test_unknown_names_raise_with_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="did you mean FD_LOG_DIR"):
        _ = envs.FD_LOG_DRI
    with pytest.raises(AttributeError, match="did you mean FD_LOG_DIR"):
        envs.FD_LOG_DRI = "x"
    assert not hasattr(envs, "FDCACHE_RANKS")
    assert "FD_LOG_DRI" not in os.environ


def test_unique_name_has_the_uuid_of_the_deployment() -> None:
    assert envs.get_unique_name("queue") == "queue"
    os.environ["SHM_UUID"] = "17"
    assert envs.get_unique_name("queue") == "queue_17"


def test_patching_an_unset_variable_leaves_it_unset() -> None:
    with mock.patch("fdcache.envs.FD_LOG_DIR", "patched"):
        assert os.environ["FD_LOG_DIR"] == "patched"
        assert envs.FD_LOG_DIR == "patched"
    assert "FD_LOG_DIR" not in os.environ


@pytest.mark.parametrize("text", ["before", " before ", "~"])
def test_patching_restores_a_set_variable(text: str) -> None:
    os.environ["FD_LOG_DIR"] = text
    with mock.patch.object(envs, "FD_LOG_DIR", "outer"):
        with mock.patch("fdcache.envs.FD_LOG_DIR", None):
            assert envs.FD_LOG_DIR == "log"
        assert envs.FD_LOG_DIR == "outer"
    assert os.environ["FD_LOG_DIR"] == text


def test_patching_restores_an_invalid_value() -> None:
    os.environ["FD_DETERMINISTIC_SPLIT_KV_SIZE"] = "24"
    with mock.patch("fdcache.envs.FD_DETERMINISTIC_SPLIT_KV_SIZE", 32):
        assert envs.FD_DETERMINISTIC_SPLIT_KV_SIZE == 32
    assert os.environ["FD_DETERMINISTIC_SPLIT_KV_SIZE"] == "24"


def test_patching_restores_files_and_deprecated_names(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k1")
    before = {"FD_API_KEY_FILE": str(tmp_path / "key"), "FD_NVFP4_MOE_BACKEND": "flashinfer-cudnn"}
    os.environ.update(before)
    with mock.patch.multiple(envs, FD_API_KEY=["k2"], FD_NVFP4_GEMM_BACKEND="flashinfer-trtllm"):
        assert envs.FD_API_KEY == ["k2"]
        assert envs.FD_NVFP4_GEMM_BACKEND == "flashinfer-trtllm"
    assert {name: os.environ[name] for name in before} == before
    assert "FD_API_KEY" not in os.environ


def test_reads_follow_a_patched_environment() -> None:
    with mock.patch.dict(os.environ, {"FD_LOG_DIR": "patched"}):
        assert envs.FD_LOG_DIR == "patched"
    assert envs.FD_LOG_DIR == "log"
    with mock.patch.object(os, "environ", {"FD_LOG_DIR": "replaced"}):
        assert envs.FD_LOG_DIR == "replaced"
    assert envs.FD_LOG_DIR == "log"


def test_saved_values_do_not_show_secrets() -> None:
    os.environ["FD_API_KEY"] = "hunter2"
    assert "hunter2" not in repr(vars(envs))
    assert vars(envs)["__name__"] == "fdcache.envs"


def test_module_can_be_reloaded() -> None:
    importlib.reload(fdcache.envs)
    os.environ["FD_LOG_DIR"] = "x"
    assert fdcache.envs.FD_LOG_DIR == "x"


FIRST_ACCESSES = [
    ("import fdcache.envs as e; e.FD_LOG_DIR = 'x'; import os; print(os.environ['FD_LOG_DIR'])", "x"),
    ("from fdcache.envs import FD_DEBUG; print(FD_DEBUG)", "0"),
    ("import fdcache.envs as e; print(len(dir(e)) > 115)", "True"),
    ("import fdcache.envs as e; del e.FD_LOG_DIR; print(e.FD_LOG_DIR)", "log"),
    ("import fdcache.envs as e; print(e.get_unique_name('q'))", "q"),
    ("from unittest.mock import patch\nwith patch('fdcache.envs.FD_DEBUG', 1) as v: print(v)", "1"),
    ("import fdcache.envs as e; print(hasattr(e, 'FD_NO'), hasattr(e, '__path__'))", "False False"),
]
FORKS = """
import json, os, sys
import fdcache.envs
print(json.dumps([name for name in ("pydantic", "fdcache.settings") if name in sys.modules]), flush=True)
import pydantic_settings
for program in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        exec(program, {})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
"""Run each program in a fork of one process that has imported ``fdcache.envs`` and accessed nothing."""


@pytest.fixture(scope="module")
def fresh_process() -> list[str]:
    """Lines printed by a process that imports the module, then by each first access."""
    programs = json.dumps([program for program, _ in FIRST_ACCESSES])
    command = [sys.executable, "-c", FORKS, programs]
    environ = {"PATH": os.environ.get("PATH", "")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    return done.stdout.splitlines()


def test_import_loads_no_description(fresh_process: list[str]) -> None:
    assert fresh_process[0] == "[]"


@pytest.mark.parametrize(
    "number", range(len(FIRST_ACCESSES)), ids=lambda number: FIRST_ACCESSES[number][0][:60]
)
def test_first_access_may_be_of_any_kind(number: int, fresh_process: list[str]) -> None:
    assert fresh_process[1 + number] == FIRST_ACCESSES[number][1]
