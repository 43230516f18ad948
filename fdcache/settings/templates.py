"""Files written from the description: dotenv, compose, Helm values, Markdown, JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

from fdcache.settings import dotenv
from fdcache.settings.tree import GROUPS, VARIABLES
from fdcache.settings.variable import User, Variable

_GIVEN = "FDCACHE_PREFIX_CACHING"
"""The one variable that YAML templates set, so that their mapping is not empty."""


def heading(group: str) -> str:
    """Write a group's name as a heading."""
    return group.replace("_", " ")


def default_text(variable: Variable) -> str:
    """Write a default as text, empty where nothing is set."""
    return "" if variable.secret else variable.render(variable.default) or ""


def facts(variable: Variable) -> list[str]:
    """List what a comment says of a variable beside its meaning."""
    told = [variable.expects if variable.choices else " ".join(filter(None, (variable.type, variable.range)))]
    if variable.unit:
        told.append(f"unit {variable.unit}")
    if variable.secret:
        told.append(f"secret, better given by {variable.name}_FILE")
    return told


def _comments(variable: Variable, indent: str) -> Iterator[str]:
    yield f"{indent}# {variable.meaning}"
    yield f"{indent}# {'; '.join(facts(variable))}"


def render_dotenv() -> str:
    """Write a dotenv file with every variable commented out at its default."""
    lines = ["# Settings of fdcache. Take the # from a line to set it; FDCACHE_ENV_FILE must name this file."]
    for group, members in GROUPS.items():
        lines += ["", f"# --- {heading(group)} ---"]
        for variable in members:
            lines += ["", *_comments(variable, "")]
            lines.append(f"# {variable.name}={dotenv.quote(default_text(variable))}")
    return "\n".join(lines) + "\n"


def _yaml_entries(indent: str) -> Iterator[str]:
    for group, members in GROUPS.items():
        yield f"{indent}# --- {heading(group)} ---"
        for variable in members:
            yield from _comments(variable, indent)
            mark = "" if variable.name == _GIVEN else "# "
            yield f"{indent}{mark}{variable.name}: {json.dumps(default_text(variable))}"


def render_compose() -> str:
    """Write the environment of a compose service, all but one variable commented out."""
    head = ["services:", "  fdcache:", "    environment:"]
    return "\n".join([*head, *_yaml_entries("      ")]) + "\n"


def render_helm() -> str:
    """Write Helm values with an ``env`` map, all but one variable commented out."""
    head = ["# Values of a chart that passes `env` to its container.", "env:"]
    return "\n".join([*head, *_yaml_entries("  ")]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _markdown_row(variable: Variable) -> str:
    default = default_text(variable)
    reader = "fdcache" if variable.used_by is User.FDCACHE else "engine"
    kind = "; ".join(fact for fact in facts(variable) if not fact.startswith("secret"))
    notes = " Secret." if variable.secret else ""
    if variable.aliases:
        notes += f" Deprecated names: {', '.join(f'`{alias}`' for alias in variable.aliases)}."
    cells = (
        f"`{variable.name}`",
        _cell(kind),
        f"`{default}`" if default else "",
        _cell(variable.meaning) + notes,
        reader,
        variable.effect.value,
        variable.since,
    )
    return f"| {' | '.join(cells)} |"


def render_markdown() -> str:
    """Write the reference page."""
    lines = [
        "# Environment variables",
        "",
        "Written by `fdcache env template --format markdown`; do not edit.",
        "",
        "Every variable can also be given as `NAME_FILE`, which names a file that holds the value.",
        "An empty variable counts as unset. Flags take 0/1, true/false, yes/no and on/off. Sizes take a unit",
        "(`512MiB`, `8GiB`, `4GB`), durations too (`500ms`, `30s`, `2m`). *Effect* says whether a change is",
        "seen at the next start or live.",
    ]
    for group, members in GROUPS.items():
        lines += [
            "",
            f"## {heading(group).capitalize()}",
            "",
            "| Variable | Type | Default | Meaning | Read by | Effect | Since |",
            "|---|---|---|---|---|---|---|",
            *map(_markdown_row, members),
        ]
    return "\n".join(lines) + "\n"


def _schema(variable: Variable) -> dict[str, object]:
    schema: dict[str, object] = {**variable.kind.schema, "description": variable.meaning}
    if variable.choices:
        schema["enum"] = list(variable.choices)
    limits = (
        ("minimum", variable.minimum),
        ("exclusiveMinimum", variable.above),
        ("maximum", variable.maximum),
    )
    if schema["type"] != "string":
        schema.update({key: limit for key, limit in limits if limit is not None})
    if variable.secret:
        schema["writeOnly"] = True
    elif variable.default is not None:
        default = variable.to_json(variable.default)
        schema["default"] = default if schema["type"] != "string" else variable.render(variable.default)
    return schema


def render_json_schema() -> str:
    """Write a JSON schema of an object that maps variable names to values."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of fdcache",
        "type": "object",
        "properties": {name: _schema(variable) for name, variable in VARIABLES.items()},
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


FORMATS = {
    "dotenv": render_dotenv,
    "compose": render_compose,
    "helm": render_helm,
    "markdown": render_markdown,
    "json-schema": render_json_schema,
}
