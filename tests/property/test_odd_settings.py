"""Any text for any setting or option is taken or refused by name: no other exception, on the way to no command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdcache import envs
from fdcache.errors import ConfigurationError
from fdcache.service.server.preflight import check_environment
from fdcache.service.wire.address import find_address, socket_path
from fdcache.settings import VARIABLES, Problem, SettingsError, read_settings
from fdcache.settings.effective import effective_values
from tests.commands import everything, fdcache
from tests.seeds import budget

NAMES = sorted(VARIABLES)
KINDS = sorted({variable.kind.name for variable in VARIABLES.values()})

NUMBERS = (
    *(
        "0",
        "-0",
        "1",
        "-1",
        "+1",
        " 1 ",
        "1_000",
        "007",
        "0x10",
        "1e3",
        "1e400",
        "-1e400",
        "nan",
        "inf",
        "1.5",
        ".",
    ),
    *("9" * 19, "9" * 309, "9" * 5000, str(2**63), str(-(2**63)), "0." + "0" * 400 + "1"),
    *("１２", "²", "٣", "Ⅷ", "½", "−1", "1\u00a0000"),  # noqa: RUF001
)
UNITS = (
    *("8GiB", "8 gib", "8Mi", "4GB", "1.5MiB", "9" * 30 + "TiB", "-1MiB", "1PiB", "８GiB", "KiB", "1.5"),  # noqa: RUF001
    *("30s", "500ms", "2m", "1h", "7d", "9" * 308 + "d", "36501d", "1e308d", "3０s", "-5s", "s", "1 h"),  # noqa: RUF001
    *("90%", "0.5", "101%", "0%", "９0%", "a=0.5,b=10%", "a=0.5,a=0.5", "=", "=1", "a=", ",,,"),  # noqa: RUF001
)
PLACES = (
    *(
        "127.0.0.1:9470",
        "127.0.0.1:²",
        "[::1]:9470",
        ":9470",
        "host:",
        "host:99999999999",
        "host:-1",
        "h:1:2",
    ),
    *(
        "off",
        "none",
        "http://[",
        "http://u:p@h",
        "tcp://h:9",
        "ipc:///x",
        "ipc://",
        "://",
        "a b://c",
        "tcp://0:0",
    ),
    *("~", "~/x", "~nosuch/x", "~nosuch", "~root/x", "/", "//", ".", "..", "", " ", "/dev/null", "/dev/zero"),
    *(
        "/proc/self/mem",
        "/proc/1/root/x",
        "/nonexistent/x",
        "a" * 5000,
        "/" + "a" * 300,
        "/a/" * 2000,
        "/etc/passwd/x",
    ),
)
WORDS = (
    *(
        "true",
        "YES",
        "off",
        "2",
        "write_back",
        "INFO",
        "None",
        "null",
        "[80,90]",
        "[[[[",
        "[80",
        "1,2",
        "8202,",
        "-",
    ),
    *(
        "\n",
        "a\nb",
        "\t",
        "\x1b[2J",
        "\udcff",
        "\ud800",
        "é",
        "💥",
        "%s%s%n",
        "{0}",
        "$(id)",
        "'; --",
        '"',
        "\\",
    ),
)
ODD = (*NUMBERS, *UNITS, *PLACES, *WORDS)
odd_texts = st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0"), max_size=30)


def problems_of(environ: dict[str, str]) -> Iterator[Problem]:
    """Every problem that `fdcache env check` prints, each written out."""
    found = read_settings(environ)
    yield from found.problems
    yield from check_environment(found.settings)
    effective_values(found.settings, found.rejected)
    for name in NAMES:
        found.settings.render(name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_of_every_kind_takes_or_refuses_every_odd_text(kind: str) -> None:
    for variable in VARIABLES.values():
        if variable.kind.name == kind:
            for text in ODD:
                if variable.accepts(text):
                    value = variable.parse(text)
                    assert isinstance(variable.render(value), str | None)
                    assert variable.accepts(value), f"{variable.name} takes back {value!r}"
                assert variable.show(text) and str(variable.exceeds(text))


@pytest.mark.parametrize("text", ODD, ids=lambda text: ascii(text)[:30])
def test_one_odd_text_in_all_settings_at_once_gives_problems_with_names(text: str) -> None:
    for problem in problems_of(dict.fromkeys(NAMES, text)):
        assert problem.variables and problem.wrong and problem.right
        assert str(problem).isprintable()


@settings(max_examples=budget(600), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), odd_texts, min_size=1, max_size=4))
def test_any_odd_settings_are_problems_with_names(environ: dict[str, str]) -> None:
    for problem in problems_of(environ):
        assert problem.variables and str(problem)


@settings(max_examples=budget(500), deadline=None)
@given(st.sampled_from(["FDCACHE_SERVER", "FDCACHE_RUNTIME_DIR", "FDCACHE_ENV_FILE"]), odd_texts)
def test_an_odd_address_is_a_configuration_error(name: str, text: str) -> None:
    try:
        socket_path(find_address({name: text})[0])
    except ConfigurationError as error:
        assert str(error)


@settings(max_examples=budget(500), deadline=None)
@given(st.sampled_from(NAMES), odd_texts)
def test_the_old_module_gives_a_value_or_a_settings_error(name: str, text: str) -> None:
    if VARIABLES[name].old is None:
        return
    before = dict(os.environ)
    try:
        os.environ[name] = text
        getattr(envs, name)
    except (SettingsError, UnicodeEncodeError) as error:
        assert isinstance(error, SettingsError) or not text.isascii()
    finally:
        os.environ.clear()
        os.environ.update(before)


OPTIONS = (
    ("serve", "--check", "--host-memory", "{}"),
    ("serve", "--check", "--http", "{}"),
    ("serve", "--check", "--socket", "{}"),
    ("serve", "--check", "--storage", "{}"),
    ("serve", "--check", "--storage", "/tmp/none", "--storage-size", "{}"),
    ("serve", "--check", "--arena-dir", "{}"),
    ("inspect", "--server", "{}"),
    ("inspect", "block", "{}"),
    ("inspect", "tree", "--limit", "{}"),
    ("inspect", "explain", "--tokens", "{}"),
    ("inspect", "storage", "{}", "--verify"),
    ("reset", "--older-than", "{}", "--yes"),
    ("reset", "--wait", "{}", "--yes"),
    ("reset", "storage", "{}", "--all", "--dry-run"),
    ("reset", "storage", "/nonexistent", "--older-than", "{}", "--dry-run"),
    ("env", "show", "{}"),
    ("env", "show", "--group", "{}"),
    ("env", "diff", "{}"),
    ("env", "migrate", "{}"),
    ("env", "template", "--format", "{}"),
    ("replay", "{}", "--requests", "1"),
    ("replay", "--requests", "1", "--host-memory", "{}"),
    ("replay", "--requests", "1", "--layout", "{}"),
    ("replay", "--pd", "--requests", "1", "--pd-ranks", "{}:1"),
    ("replay", "--pd", "--requests", "1", "--faults", "{}="),
    ("replay", "--requests", "{}x"),
)


@pytest.mark.parametrize("words", OPTIONS, ids=" ".join)
def test_an_odd_value_of_an_option_ends_a_command_with_a_status_of_its_own(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    step = max(len(ODD) // budget(len(ODD)), 1)
    texts = ODD[OPTIONS.index(words) % step :: step]
    for text in texts:
        done = fdcache(*(word.format(text) for word in words), FDCACHE_RUNTIME_DIR=str(tmp_path / "run"))
        assert done.returncode in (0, 1, 2, 78), text
        assert done.returncode == 0 or everything(done).strip(), text
        assert "Traceback" not in everything(done)
