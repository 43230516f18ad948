"""Sources of settings: precedence, files, dotenv parsing, unknown names."""

import logging
import re
from pathlib import Path

import pytest

from fdcache.integrations.fastdeploy.log_variables import LoggingSettings, TracingSettings
from fdcache.integrations.fastdeploy.model_variables import KernelSettings, ModelSettings
from fdcache.settings import VARIABLES, Settings, SettingsError, Source, read_settings
from fdcache.settings.cache import CacheSettings
from fdcache.settings.checks import REMOVED
from fdcache.settings.sources import DotenvEntry, parse_dotenv, quote, rename

NAME = "FD_SERVICE_NAME"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def everywhere(tmp_path: Path) -> dict[str, str]:
    """An environment with a value in the secrets directory and the dotenv file, too."""
    write(tmp_path / "secrets" / NAME, "from secrets\n")
    write(tmp_path / "prod.env", f"{NAME}='from dotenv'\n")
    return {
        "FDCACHE_SECRETS_DIR": str(tmp_path / "secrets"),
        "FDCACHE_ENV_FILE": str(tmp_path / "prod.env"),
        NAME: "from environment",
    }


def test_precedence_is_argument_environment_secrets_dotenv_default(everywhere: dict[str, str]) -> None:
    environ = dict(everywhere)
    settings = Settings.load(environ=environ, arguments={NAME: "from argument"})
    assert settings.group(TracingSettings).service_name == "from argument"
    assert [candidate.source for candidate in settings.candidates(NAME)] == [
        Source.ARGUMENT,
        Source.ENVIRONMENT,
        Source.SECRETS,
        Source.DOTENV,
    ]
    for source in (Source.ENVIRONMENT, Source.SECRETS, Source.DOTENV):
        settings = Settings.load(environ=environ)
        assert settings.group(TracingSettings).service_name == f"from {source.value}"
        assert settings.source(NAME) is source
        if source is Source.ENVIRONMENT:
            del environ[NAME]
        elif source is Source.SECRETS:
            del environ["FDCACHE_SECRETS_DIR"]
    assert Settings.load(environ={}).source(NAME) is Source.DEFAULT


def test_losing_candidates_have_their_places(everywhere: dict[str, str]) -> None:
    places = [candidate.place for candidate in Settings.load(environ=everywhere).candidates(NAME)]
    assert places[0] == "environment"
    assert places[1].endswith(f"secrets/{NAME}")
    assert places[2].endswith("prod.env:1")


def test_caller_defaults_are_weaker_than_every_source(everywhere: dict[str, str]) -> None:
    settings = Settings.load(environ=everywhere, defaults={NAME: "mine", "FDCACHE_RANKS": 3})
    assert settings.group(TracingSettings).service_name == "from environment"
    assert settings.deployment.ranks == 3
    assert settings.source("FDCACHE_RANKS") is Source.DEFAULT


def test_argument_none_counts_as_not_given() -> None:
    settings = Settings.load(environ={"FDCACHE_RANKS": "2"}, arguments={"FDCACHE_RANKS": None})
    assert settings.deployment.ranks == 2


def test_unknown_argument_raises_type_error() -> None:
    with pytest.raises(TypeError, match="FDCACHE_RANK"):
        Settings.load(environ={}, arguments={"FDCACHE_RANK": 1})


def test_empty_variable_counts_as_unset() -> None:
    settings = Settings.load(environ={"FD_DEBUG": "", "FD_PLUGINS": "", "FDCACHE_ENV_FILE": ""})
    assert settings.group(LoggingSettings).debug is False
    assert settings.group(ModelSettings).plugins is None
    assert settings.source("FD_DEBUG") is Source.DEFAULT


@pytest.mark.parametrize(
    ("name", "text"), [("FDCACHE_RANKS", "4\n"), ("FD_API_KEY", "k1,k2\r\n"), (NAME, "x")]
)
def test_file_can_contain_any_value(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / "value", text)
    settings = Settings.load(environ={f"{name}_FILE": str(path)})
    (candidate,) = settings.candidates(name)
    assert candidate.value == text.strip()
    assert candidate.source is Source.ENVIRONMENT
    assert candidate.place == f"{path}, named by {name}_FILE"
    assert settings.changed(name)


def test_dotenv_file_can_name_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "value", "4")
    env_file = write(tmp_path / "a.env", f"FDCACHE_RANKS_FILE={path}")
    assert Settings.load(environ={"FDCACHE_ENV_FILE": str(env_file)}).deployment.ranks == 4


def test_value_and_file_at_once_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "value", "4")
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ={"FDCACHE_RANKS": "4", "FDCACHE_RANKS_FILE": str(path)})
    assert caught.value.problems[0].variables == ("FDCACHE_RANKS", "FDCACHE_RANKS_FILE")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (1 << 20) + b"y"])
def test_unreadable_file_names_the_variable(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "value"
    if content is not None:
        path.write_bytes(content)
    for name in ("FD_API_KEY_FILE", "FDCACHE_ENV_FILE"):
        with pytest.raises(SettingsError) as caught:
            Settings.load(environ={name: str(path)})
        assert caught.value.problems[0].variables == (name,)


def test_folder_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="regular file"):
        Settings.load(environ={"FDCACHE_RANKS_FILE": str(tmp_path)})


def test_missing_secrets_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="FDCACHE_SECRETS_DIR"):
        Settings.load(environ={"FDCACHE_SECRETS_DIR": str(tmp_path / "nowhere")})


def test_dotenv_in_the_working_directory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / ".env", "FDCACHE_RANKS=7")
    monkeypatch.chdir(tmp_path)
    assert Settings.load(environ={}).deployment.ranks == 1


def test_dotenv_file_does_not_name_another(tmp_path: Path) -> None:
    other = write(tmp_path / "other.env", "FDCACHE_RANKS=7")
    env_file = write(tmp_path / "a.env", f"FDCACHE_ENV_FILE={other}")
    settings = Settings.load(environ={"FDCACHE_ENV_FILE": str(env_file)})
    assert settings.deployment.ranks == 1
    assert settings.files.env_file == env_file


def test_bad_line_of_a_dotenv_file_is_named_without_its_text(tmp_path: Path) -> None:
    env_file = write(tmp_path / "a.env", "FDCACHE_RANKS=2\nhunter2 is no assignment\nFD_JOB_ID='open\n")
    found = read_settings({"FDCACHE_ENV_FILE": str(env_file)})
    assert [problem.source for problem in found.errors] == [f"{env_file}:2", f"{env_file}:3"]
    assert "hunter2" not in str(found.errors)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(environ={"FDCACHE_RANKS": "x", "FD_DEBUG": "2", "FD_LOG_LEVEL": "some"})
    assert {problem.variables[0] for problem in caught.value.problems} == {
        "FDCACHE_RANKS",
        "FD_DEBUG",
        "FD_LOG_LEVEL",
    }


def test_deprecated_name_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="FD_NVFP4_GEMM_BACKEND"):
        settings = Settings.load(environ={"FD_NVFP4_MOE_BACKEND": "flashinfer-trtllm"})
    assert settings.group(KernelSettings).nvfp4_gemm_backend == "flashinfer-trtllm"
    assert settings.candidates("FD_NVFP4_GEMM_BACKEND")[0].name == "FD_NVFP4_MOE_BACKEND"
    assert settings.warnings[0].variables == ("FD_NVFP4_MOE_BACKEND",)


def test_own_name_wins_over_the_deprecated_one() -> None:
    environ = {"FD_NVFP4_MOE_BACKEND": "flashinfer-trtllm", "FD_NVFP4_GEMM_BACKEND": "flashinfer-cudnn"}
    with pytest.warns(FutureWarning, match="FD_NVFP4_MOE_BACKEND"):
        settings = Settings.load(environ=environ)
    assert settings.group(KernelSettings).nvfp4_gemm_backend == "flashinfer-cudnn"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FD_LOG_DRI", "FD_LOG_DIR"),
        ("FDCACHE_HOST_MEMROY", "FDCACHE_HOST_MEMORY"),
        ("FD_SILUANDMUL_USE_PHI_SWIGLU", "FD_SiluAndMul_USE_PHI_SWIGLU"),
        ("FD_API_KEYS", "FD_API_KEY"),
    ],
)
def test_unknown_name_suggests_a_known_one(name: str, meant: str) -> None:
    (warning,) = Settings.load(environ={name: "hunter2"}).warnings
    assert warning.variables == (name,)
    assert f"did you mean {meant}?" in warning.right
    assert "hunter2" not in str(warning)


@pytest.mark.parametrize(
    "name",
    [
        "FDCACHE_PORT",
        "FDCACHE_SERVICE_HOST",
        "FDCACHE_SERVICE_PORT",
        "FDCACHE_SERVICE_PORT_HTTP",
        "FDCACHE_PORT_80_TCP",
        "FDCACHE_PORT_80_TCP_PROTO",
        "FDCACHE_PORT_80_TCP_ADDR",
        "FD_ROUTER_PORT_53_UDP_PORT",
        "FD_ROUTER_PORT",
    ],
)
def test_service_links_are_ignored(name: str) -> None:
    assert Settings.load(environ={name: "tcp://10.0.0.1:80"}).warnings == ()


@pytest.mark.parametrize("name", REMOVED)
def test_a_setting_that_is_gone_is_named_with_a_remedy(name: str, tmp_path: Path) -> None:
    write(tmp_path / "old.env", f"{name}=7")
    settings = Settings.load(environ={"FDCACHE_ENV_FILE": str(tmp_path / "old.env")})
    (warning,) = settings.misspelt
    assert warning.variables == (name,)
    assert warning.source.endswith("old.env:1")
    assert (warning.wrong, warning.right[:8]) == ("this setting is gone", "unset it")
    known = set(re.findall(r"FDCACHE_\w+", warning.right))
    assert known <= VARIABLES.keys()


def test_port_that_is_no_service_link_is_a_warning() -> None:
    (warning,) = Settings.load(environ={"FDCACHE_PORT": "8080"}).warnings
    assert warning.variables == ("FDCACHE_PORT",)


def test_misspelt_secret_file_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "FD_API_KEYS", "hunter2")
    write(tmp_path / "unrelated", "x")
    (warning,) = Settings.load(environ={"FDCACHE_SECRETS_DIR": str(tmp_path)}).warnings
    assert warning.variables == ("FD_API_KEYS",)
    assert "FD_API_KEY" in warning.right


def test_service_link_as_a_value_is_explained() -> None:
    (problem,) = read_settings({"FD_ZMQ_RECV_REQUEST_SERVER_PORT": "tcp://10.0.0.1:80"}).errors
    assert "enableServiceLinks: false" in problem.right


def test_names_without_a_prefix_are_ignored() -> None:
    assert Settings.load(environ={"PATH": "/bin", "FDX": "1", "MY_FD_LOG_DRI": "x"}).warnings == ()


def test_settings_constructor_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / ".env", "cache={}\nFDCACHE_RANKS=7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FDCACHE_RANKS", "7")
    monkeypatch.setenv("deployment", '{"ranks": 7}')
    monkeypatch.setenv("DEPLOYMENT", '{"ranks": 7}')
    assert Settings().model_dump() == Settings.load(environ={}).model_dump()
    given = Settings(cache=CacheSettings(device_blocks=3))
    assert (given.cache.device_blocks, given.deployment.ranks) == (3, 1)


def test_rejected_value_is_replaced_by_the_default(everywhere: dict[str, str]) -> None:
    write(Path(everywhere["FDCACHE_SECRETS_DIR"]) / "FDCACHE_RANKS", "5")
    found = read_settings({**everywhere, "FDCACHE_RANKS": "many"}, defaults={"FDCACHE_RANKS": 3})
    assert found.settings.deployment.ranks == 1
    assert found.rejected == {"FDCACHE_RANKS"}
    assert [candidate.value for candidate in found.settings.candidates("FDCACHE_RANKS")] == ["many", "5", 3]


def test_debug_log_of_pydantic_settings_shows_no_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYDANTIC_SETTINGS_DEBUG", "1")
    environ = {"FD_API_KEY": "hunter2", "EXPORTER_OTLP_ENDPOINT": "http://user:hunter2@host:4317"}
    with caplog.at_level(logging.DEBUG, logger="pydantic_settings"):
        Settings.load(environ=environ)
    assert "environment" in caplog.text
    assert "hunter2" not in caplog.text


def test_user_and_password_of_an_address_are_not_shown() -> None:
    names = [name for name, variable in VARIABLES.items() if variable.type == "address"]
    assert names
    settings = Settings.load(environ=dict.fromkeys(names, "http://user:hunter2@host:4317"))
    assert settings.value(names[0]) == "http://user:hunter2@host:4317"
    for shown in (
        repr(settings),
        str(settings),
        settings.model_dump_json(),
        str(settings.model_dump(mode="json")),
    ):
        assert "host:4317" in shown
        assert "hunter2" not in shown


def entries(content: str) -> dict[str, str]:
    found = list(parse_dotenv(content))
    assert all(entry.text is not None for entry in found)
    return {entry.name: entry.text or "" for entry in found}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=1", "1"),
        ("export A=1", "1"),
        ("  A = 1  ", "1"),
        ("A=1\r", "1"),
        ("A=", ""),
        ("A=a b # comment", "a b"),
        ("A=a#b", "a#b"),
        ("A=#c", "#c"),
        ("A= # comment", ""),
        ("A='a # b \"$X\" \\n'", 'a # b "$X" \\n'),
        ('A="a # \\"b\\" \\n\\t\\\\ $X" # comment', 'a # "b" \n\t\\ $X'),
        ("A=$OTHER", "$OTHER"),
        ("A==b", "=b"),
    ],
)
def test_dotenv_value_is_unquoted(line: str, value: str) -> None:
    assert entries(line) == {"A": value}


def test_dotenv_comments_and_blank_lines_are_skipped_and_lines_counted() -> None:
    assert list(parse_dotenv("# A=1\n\n  # x\nB=2")) == [DotenvEntry("B", 4, "2")]


@pytest.mark.parametrize("line", ["A", "1A=2", "A B=2", "A='x", 'A="x', "=x", 'A="x" y'])
def test_dotenv_line_that_is_no_assignment_has_no_text(line: str) -> None:
    assert list(parse_dotenv(f"\n{line}")) == [DotenvEntry("", 2, None)]


@pytest.mark.parametrize(
    "text", ["", "plain", "two words", "a#b", " # ", "it's", 'say "x"', "a\\nb", "x\ny\tz", "é"]
)
def test_quoted_value_reads_back(text: str) -> None:
    assert entries(f"A={quote(text)} # comment") == {"A": text}


def test_rename_changes_nothing_else() -> None:
    before = "# OLD=1\r\nexport OLD = 'x OLD'  # OLD\nOLDER=2\n\nlast=OLD"
    after, changes = rename(before, {"OLD": "NEW"})
    assert after == "# OLD=1\r\nexport NEW = 'x OLD'  # OLD\nOLDER=2\n\nlast=OLD"
    assert [(change.line, change.dropped) for change in changes] == [(2, False)]


def test_rename_drops_a_line_without_effect() -> None:
    after, changes = rename("OLD=1\nNEW=2\n", {"OLD": "NEW"})
    assert after == "NEW=2\n"
    assert changes[0].dropped


def test_open_quote_does_not_take_in_the_secret_below_it(tmp_path: Path) -> None:
    env_file = write(tmp_path / "a.env", 'FD_LOG_DIR="log\nFD_API_KEY=hunter2\nFD_JOB_ID=1"\n')
    found = read_settings({"FDCACHE_ENV_FILE": str(env_file)})
    assert [problem.source for problem in found.errors] == [f"{env_file}:1"]
    assert found.settings.value("FD_API_KEY")[0].get_secret_value() == "hunter2"


def warnings_of(environ: dict[str, str]) -> list[str]:
    found = read_settings(environ)
    assert found.errors == ()
    return [str(problem) for problem in found.settings.warnings]


def test_a_name_twice_in_a_dotenv_file_is_a_warning_with_both_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "a.env", f"{NAME}=first\nFD_DEBUG=1\n{NAME}=second\n")
    environ = {"FDCACHE_ENV_FILE": str(file)}
    assert read_settings(environ).settings.group(TracingSettings).service_name == "second"
    assert warnings_of(environ) == [
        f"{NAME} ({file}:3): line 1 sets it too, and the last line counts; remove one of them"
    ]


@pytest.mark.parametrize("name", ["FDCACHE_ENV_FILE", f"{NAME}_FILE"])
def test_a_file_that_every_user_can_change_is_a_warning(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.env", f"{NAME}=x\n")
    file.chmod(0o644)
    assert warnings_of({name: str(file)}) == []
    file.chmod(0o646)
    assert warnings_of({name: str(file)}) == [
        f"{name} ({file}): every user of this machine can change it; chmod o-w {file}"
    ]


def test_a_secrets_directory_that_every_user_can_change_is_a_warning(tmp_path: Path) -> None:
    folder = write(tmp_path / "secrets" / NAME, "x").parent
    folder.chmod(0o777)
    (warning,) = warnings_of({"FDCACHE_SECRETS_DIR": str(folder)})
    assert "every user of this machine can change it" in warning
    folder.chmod(0o1777)  # as Kubernetes mounts it: nobody replaces the files of others
    assert warnings_of({"FDCACHE_SECRETS_DIR": str(folder)}) == []


def test_a_secret_in_a_file_that_every_user_can_read_is_a_warning(tmp_path: Path) -> None:
    key = write(tmp_path / "secrets" / "FD_API_KEY", "k1")
    dotenv = write(tmp_path / "a.env", "FD_DEBUG=1\nFD_API_KEY=k1\n")
    ways = {
        "FDCACHE_SECRETS_DIR": (key.parent, key, str(key)),
        "FD_API_KEY_FILE": (key, key, f"{key}, named by FD_API_KEY_FILE"),
        "FDCACHE_ENV_FILE": (dotenv, dotenv, f"{dotenv}:2"),
    }
    for name, (value, file, place) in ways.items():
        file.chmod(0o644)
        assert warnings_of({name: str(value)}) == [
            f"FD_API_KEY ({place}): it is a secret, and every user of this machine can read the file; chmod o-r {file}"
        ]
        file.chmod(0o640)
        assert warnings_of({name: str(value)}) == []


def test_other_settings_may_be_readable_by_every_user(tmp_path: Path) -> None:
    file = write(tmp_path / "a.env", f"{NAME}=x\n")
    file.chmod(0o644)
    assert warnings_of({"FDCACHE_ENV_FILE": str(file)}) == []
