"""Any environment loads, or its errors name the variables and show no secret."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdcache.settings import VARIABLES, LoadResult, Settings, SettingsError, read_settings
from fdcache.settings.effective import EffectiveValue, effective_values
from fdcache.settings.kinds import format_size, parse_size
from fdcache.settings.sources import parse_dotenv, quote
from fdcache_cli.env_show import SettingsReport
from tests.seeds import budget

MARKER = "S3CRET"
SECRETS = [name for name, variable in VARIABLES.items() if variable.secret]

texts = st.text(st.characters(exclude_characters="\0"), max_size=40)
plausible = st.sampled_from(
    [
        "0",
        "1",
        "true",
        "off",
        "-1",
        "1e400",
        "nan",
        "8GiB",
        "4G",
        "30s",
        "9" * 5000,
        "1,2",
        "[80,90]",
        "[[[[",
        "~x",
        "~",
        "http://u:p@h",
        "http://[",
        "tcp://10.0.0.1:80",
        "write_back",
        "INFO",
        "\udcff",
        "/dev/zero",
        "/proc/self/mem",
        "/",
    ]
)
known = st.sampled_from([name for name, variable in VARIABLES.items() if not variable.secret])
file_names = known.map(lambda name: name + "_FILE")
like_ours = st.sampled_from(["FD_", "FDCACHE_", ""]).flatmap(
    lambda prefix: st.text(
        st.characters(codec="ascii", categories=("Lu", "Nd"), include_characters="_"), max_size=12
    ).map(prefix.__add__)
)
names = st.one_of(known, known, file_names, like_ours, texts.filter(lambda text: "=" not in text))
secret_texts = texts.map(lambda text: f"{MARKER}{text}{MARKER}")
environments = st.builds(
    lambda plain, secret: {**plain, **secret},
    st.dictionaries(names.filter(lambda name: name not in SECRETS), texts | plausible, max_size=8),
    st.dictionaries(st.sampled_from(SECRETS), secret_texts | secret_texts.map("\0".__add__), max_size=3),
)


def everything_shown(found: LoadResult) -> str:
    states = effective_values(found.settings, found.rejected)
    encoded = msgspec.json.encode(states)
    assert msgspec.json.decode(encoded, type=dict[str, EffectiveValue]) == states, "a service can send it"
    report = SettingsReport(states)
    shown = [
        encoded.decode(),
        repr(found),
        str(found.settings),
        found.settings.model_dump_json(),
        found.settings.fingerprint,
    ]
    for variable in VARIABLES.values():
        shown += [*report.row(variable), json.dumps(report.record(variable)), *report.details(variable)]
    shown += [json.dumps(asdict(problem)) + str(problem) for problem in found.problems]
    return "\n".join(shown)


@settings(max_examples=budget(300))
@given(environments)
def test_any_environment_loads_or_names_the_variables(environ: dict[str, str]) -> None:
    found = read_settings(environ)
    for problem in found.problems:
        assert problem.variables
        assert all(name in environ or name in VARIABLES for name in problem.variables)
    assert MARKER not in everything_shown(found)


@settings(max_examples=budget(200))
@given(environments)
def test_loading_raises_settings_errors_only(environ: dict[str, str]) -> None:
    found = read_settings(environ)
    assert {problem for problem in found.problems if problem not in found.own_errors} == set(
        found.settings.warnings
    )
    if not found.own_errors:
        with pytest.warns(FutureWarning) if found.deprecations else redirect_stdout(io.StringIO()):
            assert Settings.load(environ=environ).fingerprint == found.settings.fingerprint
        return
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ=environ)
    assert caught.value.problems == found.own_errors
    assert MARKER not in str(caught.value) + repr(caught.value)


@settings(max_examples=budget(200))
@given(st.binary(max_size=200), st.dictionaries(st.sampled_from(SECRETS), secret_texts, max_size=2))
def test_any_dotenv_file_loads_or_names_its_lines(noise: bytes, secret: dict[str, str]) -> None:
    lines = [f"{name}={quote(text)}" for name, text in secret.items()]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.env"
        path.write_bytes(noise + "\n".join(["", *lines]).encode(errors="replace"))
        found = read_settings({"FDCACHE_ENV_FILE": str(path)})
    assert all(problem.source and problem.variables for problem in found.problems)
    assert MARKER not in everything_shown(found)


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_quoted_text_is_read_back(text: str) -> None:
    (entry,) = parse_dotenv(f"NAME={quote(text)}")
    assert entry.text == text


@given(st.integers(0, 2**63 - 1))
def test_sizes_are_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == parse_size(str(size)) == size
