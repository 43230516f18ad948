"""Pages, templates and container files agree with the description of the variables."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from fdcache.integrations.fastdeploy.log_variables import LoggingSettings
from fdcache.integrations.fastdeploy.old_module import OLD_VARIABLES
from fdcache.machine.memory import MemoryLimits
from fdcache.settings import VARIABLES, Settings, read_settings
from fdcache.settings.checks import REMOVED, cross_checks
from fdcache.settings.kinds import parse_duration, parse_size
from fdcache.settings.sources import PREFIXES, parse_dotenv
from fdcache.settings.templates import ACTIONS, FORMATS
from fdcache_cli.env import COMMANDS, Format

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "examples/container"
SECRETS = {name for name, variable in VARIABLES.items() if variable.secret}
UID = 10001


def test_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/environment.md").read_text() == FORMATS["markdown"]()


def test_command_offers_every_format() -> None:
    assert [known.value for known in Format] == list(FORMATS)


def test_uncommented_dotenv_template_has_the_defaults(tmp_path: Path) -> None:
    text = FORMATS["dotenv"]()
    plain = re.sub(r"^# (?=\w+=)", "", text, flags=re.MULTILINE)
    assert [entry.name for entry in parse_dotenv(plain)] == list(VARIABLES)
    file = tmp_path / "template.env"
    # An explicit write policy needs a host tier, so that line stays a comment.
    file.write_text(re.sub(r"^FDCACHE_WRITE_POLICY=", "# ", plain, flags=re.MULTILINE))
    settings = Settings.load(environ={"FDCACHE_ENV_FILE": str(file)})
    assert (
        settings.fingerprint
        == Settings.load(environ={"FDCACHE_ENV_FILE": str(file)}, arguments={}).fingerprint
    )
    assert [name for name in VARIABLES if settings.changed(name)] == ["FDCACHE_ENV_FILE"]
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("format", "path"), [("compose", ("services", "fdcache", "environment")), ("helm", ("env",))]
)
def test_yaml_templates_parse_and_name_every_variable(format: str, path: tuple[str, ...]) -> None:  # noqa: A002
    text = FORMATS[format]()
    tree = yaml.safe_load(re.sub(r"^( +)# (?=\w+: \")", r"\1", text, flags=re.MULTILINE))
    for key in path:
        tree = tree[key]
    assert set(tree) == set(VARIABLES)
    assert all(isinstance(value, str) for value in tree.values())
    assert yaml.safe_load(text)


def test_json_schema_has_every_variable_with_its_choices_and_default() -> None:
    properties = json.loads(FORMATS["json-schema"]())["properties"]
    assert set(properties) == set(VARIABLES)
    assert properties["FDCACHE_VERIFY"]["enum"] == ["off", "storage", "all"]
    assert properties["FD_TRACE"]["examples"] == ["off", "local", "otel", "all"]
    assert properties["FD_LOG_REQUESTS_LEVEL"] == {
        "type": "integer",
        "description": VARIABLES["FD_LOG_REQUESTS_LEVEL"].meaning,
        "minimum": 0,
        "maximum": 3,
        "default": 2,
    }
    assert properties["FD_API_KEY"]["writeOnly"] is True
    for name, schema in properties.items():
        if "default" in schema and "enum" in schema:
            assert schema["default"] in schema["enum"], name


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        ({"FD_DETERMINISTIC_SPLIT_KV_SIZE": 16}, True),
        ({"FD_DETERMINISTIC_SPLIT_KV_SIZE": 1}, True),
        ({"FD_DETERMINISTIC_SPLIT_KV_SIZE": 24}, False),
        ({"FD_DETERMINISTIC_SPLIT_KV_SIZE": 0}, False),
        ({"FD_DETERMINISTIC_SPLIT_KV_SIZE": -16}, False),
        ({"FD_MOE_BACKEND": "newer"}, True),
        ({"FDCACHE_WRITE_POLICY": "newer"}, False),
        ({"FDCACHE_NO_SUCH_THING": 1}, False),
    ],
)
def test_json_schema_accepts_what_the_settings_accept(settings: dict[str, object], fits: bool) -> None:
    validator = jsonschema_rs.validator_for(json.loads(FORMATS["json-schema"]()))
    assert validator.is_valid(settings) is fits


def test_every_variable_of_the_engine_has_one_effect_in_the_reference_and_the_templates() -> None:
    page, dotenv = FORMATS["markdown"](), FORMATS["dotenv"]()
    for name, variable in OLD_VARIABLES.items():
        *_, row = re.findall(rf"^\| `{name}` \|.*$", page, flags=re.MULTILINE)
        assert row.split(" | ")[4] == variable.effect
        effect = variable.effect if variable.used_in else f"{variable.effect}: no effect in fdcache"
        assert f"# {effect}\n# {name}=" in dotenv
    counts = [int(number) for number in re.findall(r"^\| [a-z].*? \| (\d+) \| ", page, flags=re.MULTILINE)]
    described = {entry["name"] for entry in json.loads((ROOT / "tests/data/environment.json").read_text())}
    assert sum(counts) == len(described)
    used = sum(bool(VARIABLES[name].used_in) for name in described)
    checked = sum(VARIABLES[name].effect.startswith("checked") for name in described)
    acted_on = (
        f"describes {len(described)} variables. fdcache acts on {used} of them, compares {checked} more"
    )
    assert f"{acted_on}\nwith others and passes {len(described) - used - checked} on:" in page
    others = re.findall(
        r"`(\w+)`", "".join(re.findall(r"^- (?:used|passed on): .*$", page, flags=re.MULTILINE))
    )
    own = {name for name in VARIABLES if name.startswith("FDCACHE_")}
    assert sorted(others) == sorted(set(VARIABLES) - described - own)


def table_of_actions() -> dict[str, str]:
    """Return what the reference says that each variable of FastDeploy does in fdcache."""
    page = (ROOT / "docs/reference/environment.md").read_text()
    section = page.split(f"## {ACTIONS}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, flags=re.MULTILINE))


def test_the_reference_says_what_each_variable_of_fastdeploy_does_in_fdcache() -> None:
    acting = {
        name
        for name, variable in VARIABLES.items()
        if variable.used_in and variable.group != "mooncake" and not name.startswith("FDCACHE_")
    }
    table = table_of_actions()
    assert set(table) == acting
    for name, text in table.items():
        known = VARIABLES[name].acts or VARIABLES[name].meaning
        assert text.rstrip(".").casefold() == known.rstrip(".").casefold()


@pytest.mark.parametrize("page", ["configuration.md", "migration.md"])
def test_guides_link_the_table_of_variables_instead_of_repeating_it(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    anchor = re.sub(r"[^\w -]", "", ACTIONS).lower().replace(" ", "-")
    assert f"(reference/environment.md#{anchor})" in text


def test_migration_page_says_of_variables_that_act_what_the_reference_says() -> None:
    text = (ROOT / "docs/migration.md").read_text().split("## From the per-rank transfer process")[1]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", text, flags=re.MULTILINE)
    table = table_of_actions()
    told = {name: said for old, said in rows for name in names_in(old) if name in table}
    assert sorted(told) == ["FD_CACHE_PROC_EXIT_TIMEOUT", "FD_ENABLE_SWAP_SPACE_CLEARING"]
    assert {name: table[name].rstrip(".") for name in told} == told


def test_readme_counts_the_variables_of_fastdeploy() -> None:
    described = json.loads((ROOT / "tests/data/environment.json").read_text())
    assert f"the {len(described)} of FastDeploy" in (ROOT / "README.md").read_text()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:FD|FDCACHE)_[A-Za-z0-9_]+\b", text))


@pytest.mark.parametrize("page", ["docs/configuration.md", "docs/migration.md"])
def test_pages_name_variables_that_exist(page: str) -> None:
    known = set(VARIABLES) | {alias for variable in VARIABLES.values() for alias in variable.aliases}
    text = (ROOT / page).read_text()
    assert {name for name in names_in(text) if name not in known} <= {"FDCACHE_PORT"}
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_guide_has_each_setting_of_fdcache_with_the_question_that_it_answers() -> None:
    text = (ROOT / "docs/configuration.md").read_text().split("## Which variable\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z].*?) \| (`.*?) \| \[", text, flags=re.MULTILINE)
    assert all(question.endswith("?") for question, _ in rows)
    answering = [name for _, variables in rows for name in re.findall(r"`(\w+)`", variables)]
    assert sorted(answering) == sorted(name for name in VARIABLES if name.startswith("FDCACHE_"))


def test_no_page_names_a_setting_that_is_gone() -> None:
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.*")]
    texts = {page: page.read_text() for page in pages if page.suffix in (".md", ".py", ".yaml", ".env")}
    assert [(page, name) for page, text in texts.items() for name in names_in(text) & REMOVED.keys()] == []


def test_guide_lists_secrets_and_commands() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    assert all(f"`{name}`" in text for name in SECRETS)
    assert all(f"`fdcache env {command.name}" in text for command in COMMANDS)


def test_migration_page_has_every_old_text_flag() -> None:
    text = (ROOT / "docs/migration.md").read_text()
    flags = [
        n for n, v in OLD_VARIABLES.items() if v.type == "flag" and v.old is not None and v.old.value == "str"
    ]
    assert len(flags) == 7
    assert all(f"`{name}`" in text for name in flags)


def load_yaml(path: str) -> Any:
    return yaml.safe_load((CONTAINER / path).read_text())


def environment_of_image() -> dict[str, str]:
    text = (CONTAINER / "Dockerfile").read_text()
    assignments = re.findall(r"^(?:ENV| {3}) ((?:[A-Z_]+=\S+ ?)+)\\?$", text, flags=re.MULTILINE)
    return dict(pair.split("=", 1) for line in assignments for pair in line.split())


def settings_of(environ: dict[str, str], secrets: list[str], folder: Path, limit: int) -> Settings:
    """Load the settings of a container with these variables, secrets and memory limit."""
    for name in secrets:
        (folder / name).write_text("a-key")
        (folder / name).chmod(0o440)
    found = read_settings({**environ, "FDCACHE_SECRETS_DIR": str(folder)})
    outside = [problem for problem in found.problems if "FDCACHE_HOST_MEMORY" not in problem.variables]
    assert outside == []
    assert list(cross_checks(found.settings, MemoryLimits(machine=None, cgroup=limit))) == []
    assert all(found.settings.changed(name) for name in secrets)
    return found.settings


def test_dockerfile_is_multi_stage_and_not_root() -> None:
    text = (CONTAINER / "Dockerfile").read_text()
    stages = re.findall(r"^FROM ", text, flags=re.MULTILINE)
    assert len(stages) == 2
    assert re.findall(r"^USER (\S+)$", text, flags=re.MULTILINE)[-1] == str(UID)
    assert f"--uid {UID}" in text
    (probe,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", text, flags=re.MULTILINE)
    assert json.loads(probe)[:2] == ["python", "/opt/fdcache/probe.py"]
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, flags=re.MULTILINE):
        assert (ROOT / source).exists()


def test_key_file_of_the_compose_file_is_ignored() -> None:
    (place,) = [secret["file"] for secret in load_yaml("compose.yaml")["secrets"].values()]
    default = re.fullmatch(r"\$\{\w+:-\./(.+)\}", place)
    assert default
    for ignored in (".dockerignore", ".gitignore"):
        assert f"examples/container/{default[1]}" in (ROOT / ignored).read_text().splitlines()


def test_image_environment_is_valid(tmp_path: Path) -> None:
    environ = environment_of_image()
    assert environ["FDCACHE_SECRETS_DIR"] == "/run/secrets"
    settings_of({k: v for k, v in environ.items() if k.startswith(PREFIXES)}, [], tmp_path, 1 << 34)


def is_command(words: list[str]) -> bool:
    return words[:2] == ["fdcache", "env"] and words[2] in {command.name for command in COMMANDS}


def test_compose_file_agrees_with_the_settings(tmp_path: Path) -> None:
    compose = load_yaml("compose.yaml")
    check, engine = compose["services"]["check"], compose["services"]["engine"]
    assert is_command(check["command"])
    assert engine["depends_on"]["check"]["condition"] == "service_completed_successfully"
    entries = parse_dotenv((CONTAINER / engine["env_file"]).read_text())
    environ = {entry.name: entry.text or "" for entry in entries}
    secrets = list(engine["secrets"])
    assert set(secrets) <= SECRETS & set(compose["secrets"])
    assert not SECRETS & set(environ)
    limit = parse_size(engine["mem_limit"].replace("g", "GiB"))
    assert check["mem_limit"] == engine["mem_limit"]
    settings = settings_of(environ, secrets, tmp_path, limit)
    assert settings.cache.host_memory < parse_size(engine["shm_size"].replace("g", "GiB")) < limit
    assert parse_duration(engine["stop_grace_period"]) > settings.transfer.drain_timeout
    assert engine["healthcheck"]["test"][1:3] == ["python", "/opt/fdcache/probe.py"]
    for service in (check, engine):
        assert service["user"] == str(UID)
        assert service["read_only"] is True


def test_kubernetes_manifests_agree_with_the_settings(tmp_path: Path) -> None:
    config = load_yaml("kubernetes/settings.yaml")
    pod = load_yaml("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    (check,), (engine,) = pod["initContainers"], pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in engine["volumeMounts"]}
    environ = config["data"]
    assert all(isinstance(value, str) for value in environ.values())
    for container in (check, engine):
        assert container["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
        assert "env" not in container
    assert not SECRETS & set(environ)
    secrets = [item["path"] for item in mounts[environ["FDCACHE_SECRETS_DIR"]]["secret"]["items"]]
    assert set(secrets) <= SECRETS
    limit = parse_size(engine["resources"]["limits"]["memory"])
    assert check["resources"]["limits"]["memory"] == engine["resources"]["limits"]["memory"]
    settings = settings_of(environ, secrets, tmp_path, limit)
    arena = mounts["/dev/shm"]["emptyDir"]
    assert arena["medium"] == mounts["/run/fdcache"]["emptyDir"]["medium"] == "Memory"
    assert settings.cache.host_memory < parse_size(arena["sizeLimit"]) < limit
    pause = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + settings.transfer.drain_timeout
    assert str(settings.group(LoggingSettings).directory) in mounts


def test_kubernetes_pod_is_unprivileged_and_has_no_service_links() -> None:
    pod = load_yaml("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    (check,), (engine,) = pod["initContainers"], pod["containers"]
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == UID
    assert is_command(check["command"])
    assert "--strict" in check["command"]
    for container in (check, engine):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = engine[kind]["exec"]["command"]
        assert command[:2] == ["python", "/opt/fdcache/probe.py"]
        assert str(engine["ports"][0]["containerPort"]) in command[2]


def test_the_guide_of_each_question_names_the_variable() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    unnamed = []
    for variables, guides in re.findall(r"^\| [^|]*\? \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE):
        pages = re.findall(r"\]\(([\w-]*\.md)", guides)
        named = set(re.findall(r"\w+", " ".join((ROOT / "docs" / name).read_text() for name in pages)))
        unnamed += [name for name in re.findall(r"FDCACHE_\w+", variables) if pages and name not in named]
    assert unnamed == []
