"""Report of ``fdcache env show``, and the settings that a service's options changed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fdcache.errors import ProtocolError
from fdcache.settings import VARIABLES, Source, Sourced, read_settings
from fdcache.settings.effective import EffectiveValue, effective_values
from fdcache_cli.env_show import SettingsReport, service_note
from fdcache_cli.running_service import RunningService, ask_service

MEMORY = VARIABLES["FDCACHE_HOST_MEMORY"]
OPTION = Sourced("--host-memory of fdcache serve", "4MiB")


def states(environ: dict[str, str] | None = None, **arguments: object) -> dict[str, EffectiveValue]:
    found = read_settings(environ or {}, arguments)
    return effective_values(found.settings, found.rejected)


def service(**arguments: Sourced) -> RunningService:
    return RunningService("ipc:///run/x.sock", "1", 7, "f", states({}, **arguments))


def test_an_option_is_the_source_and_beats_the_environment() -> None:
    report = SettingsReport(states({"FDCACHE_HOST_MEMORY": "1MiB"}, FDCACHE_HOST_MEMORY=OPTION))
    assert report.row(MEMORY) == (MEMORY.name, "4MiB", "--host-memory of fdcache serve", "0", "yes")
    record = report.record(MEMORY)
    assert (record["value"], record["source"], record["place"]) == (4 << 20, "argument", OPTION.place)
    winner, loser = [line.strip() for line in report.details(MEMORY)][-3:-1]
    assert winner == "argument     '4MiB' by --host-memory of fdcache serve"
    assert loser == "environment  '1MiB' as FDCACHE_HOST_MEMORY in environment"


@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_option_is_no_source(value: object) -> None:
    state = states(FDCACHE_HOST_MEMORY=Sourced("--host-memory of fdcache serve", value))[
        "FDCACHE_HOST_MEMORY"
    ]
    assert (state.source, state.origins, state.changed) == (Source.DEFAULT, (), False)


def test_an_error_names_the_option() -> None:
    found = read_settings({}, {"FDCACHE_HOST_MEMORY": Sourced("--host-memory of fdcache serve", "plenty")})
    (problem,) = found.errors
    assert str(problem).startswith(
        "FDCACHE_HOST_MEMORY (--host-memory of fdcache serve): 'plenty' is not a size"
    )
    state = effective_values(found.settings, found.rejected)["FDCACHE_HOST_MEMORY"]
    assert (state.valid, state.value, state.text) == (False, None, None)
    assert SettingsReport({MEMORY.name: state}).row(MEMORY)[1] == "(not valid)"


def test_options_equal_to_the_environment_override_nothing() -> None:
    running = service(
        FDCACHE_HOST_MEMORY=OPTION, FDCACHE_HTTP_ADDRESS=Sourced("--http of fdcache serve", "off")
    )
    here = states({"FDCACHE_HOST_MEMORY": "4194304"})
    assert set(running.overrides(here)) == {"FDCACHE_HTTP_ADDRESS"}
    assert "its options set FDCACHE_HTTP_ADDRESS=off (--http);" in service_note(
        running, running.overrides(here)
    )
    assert "change no setting" in service_note(running, {})


def test_address_and_environment_of_the_service_are_no_overrides() -> None:
    other = RunningService(
        "ipc:///run/x.sock",
        "1",
        7,
        "f",
        states({"FDCACHE_RANKS": "4"}, FDCACHE_SERVER=Sourced("--socket of fdcache serve", "/run/x.sock")),
    )
    assert other.overrides(states({"FDCACHE_SERVER": "ipc:///run/x.sock"})) == {}


class OtherVersion:
    """Client of a service of another version."""

    address = "ipc:///run/x.sock"

    def __init__(self, answer: Any) -> None:
        self.ask = lambda what: answer


def test_a_service_of_this_version_is_understood() -> None:
    settings = states(FDCACHE_HOST_MEMORY=OPTION)
    answer = {"version": "1", "pid": 7, "fingerprint": "f", "settings": msgspec.to_builtins(settings)}
    told = ask_service(OtherVersion(answer))  # type: ignore[arg-type]
    assert told.settings == settings


@pytest.mark.parametrize("answer", [[], {}, {"fingerprint": "f", "settings": {"FD_DEBUG": "0"}}])
def test_a_service_of_another_version_is_named(answer: Any) -> None:
    with pytest.raises(ProtocolError, match=r"x\.sock.*cannot be read.*command of the service.s version"):
        ask_service(OtherVersion(answer))  # type: ignore[arg-type]
