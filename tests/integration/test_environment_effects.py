"""Effect of every variable of fdcache on a live engine or service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from fdcache.settings import VARIABLES, SettingsError
from tests.environment_help import CASES, ENGINES, Case, prepare
from tests.environment_observers import OBSERVERS
from tests.service_help import local_service

OWN = [name for name in VARIABLES if name.startswith("FDCACHE_")]


def effects() -> Sequence[object]:
    found = []
    for name, case in CASES.items():
        engines = case.engines if case.engine else ()
        for where in (*engines, *(("serve",) if case.serve else ()), *(("",) if case.elsewhere else ())):
            # Two ranks of a replay are two processes.
            slow = [pytest.mark.slow] if (name, where) == ("FDCACHE_RANKS", "replay") else []
            found.append(pytest.param(name, where, marks=slow, id=f"{name}-{where or 'elsewhere'}"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("effects")
    made.chmod(0o700)
    prepare(made)
    return made


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running service for engines."""
    with local_service(tmp_path_factory.mktemp("service")) as running:
        yield running.address


@pytest.fixture(autouse=True)
def bare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set only the variables that keep a service within its folder."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FDCACHE_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("FDCACHE_CALIBRATION_DIR", str(folder / "none"))


SERVICE = {"FDCACHE_ARENA_DIR": "{dir}", "FDCACHE_HTTP_ADDRESS": "off", "FDCACHE_HOST_MEMORY": "4MiB"}


def observe(case: Case, where: str, given: Mapping[str, str]) -> object:
    """Return the observation of a case with these variables set."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in given.items():
            patch.setenv(name, text)
        if not where:
            assert case.elsewhere is not None
            return case.elsewhere()
        read = case.serve if where == "serve" else case.engine
        assert read is not None
        return OBSERVERS[where](read)


def test_every_variable_has_a_case() -> None:
    assert set(CASES) == set(OWN)
    for name, case in CASES.items():
        assert case.engine or case.serve or case.elsewhere, name
        assert set(case.engines) | set(case.refused_by) == set(ENGINES), name


@pytest.mark.parametrize(("name", "where"), effects())
def test_variable_has_an_effect(name: str, where: str, folder: Path, service: str) -> None:
    case = CASES[name]
    # A service cannot use the address of a running one.
    address = f"ipc://{folder}/other.sock" if where == "serve" else service
    around = SERVICE | dict(case.beside) if where == "serve" else dict(case.beside)
    given = {
        each: text.format(dir=folder, service=address) for each, text in {**around, name: case.value}.items()
    }
    without = {each: text for each, text in given.items() if each != name}
    if name in around:
        without[name] = around[name].format(dir=folder)
    if name in ("FDCACHE_ENV_FILE", "FDCACHE_SECRETS_DIR") and where == "serve":
        del given["FDCACHE_HOST_MEMORY"]
    assert VARIABLES[name].parse(given[name]) != VARIABLES[name].default
    before, after = observe(case, where, without), observe(case, where, given)
    assert before != after, f"{name}={given[name]} changes nothing: {after}"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused_by])
def test_variable_that_contradicts_the_engine_is_refused(name: str) -> None:
    case = CASES[name]
    for where in case.refused_by:
        with pytest.raises(SettingsError, match=name):
            observe(case, where, {name: case.value})
