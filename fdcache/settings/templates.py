"""Files generated from the variables: dotenv, compose, Helm values, Markdown, JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from fdcache.settings.sources import OWN_PREFIX, quote
from fdcache.settings.tree import GROUPS, VARIABLES
from fdcache.settings.variable import Variable

ACTIONS = "What FastDeploy's variables do in fdcache"
"""Heading of a table in the reference page."""

_PASSED_ON = "passed on"
_UNCOMMENTED = "FDCACHE_PREFIX_CACHING"
"""The one variable that YAML templates set, so that their mapping is not empty."""


def heading(group: str) -> str:
    """Return a group's name as a heading."""
    return group.replace("_", " ")


def default_text(variable: Variable) -> str:
    """Return a default as text, empty if nothing is set."""
    return "" if variable.secret else variable.render(variable.default) or ""


def facts(variable: Variable) -> list[str]:
    """Return the type, range and unit of a variable in words."""
    parts = [
        variable.expects if variable.choices else " ".join(filter(None, (variable.type, variable.range)))
    ]
    if variable.unit:
        parts.append(f"unit {variable.unit}")
    if variable.secret:
        parts.append(f"secret, better set by {variable.name}_FILE")
    return parts


def _effect(variable: Variable) -> str:
    return variable.effect if variable.used_in else f"{variable.effect}: no effect in fdcache"


def _comments(variable: Variable, indent: str) -> Iterator[str]:
    yield f"{indent}# {variable.meaning}"
    yield f"{indent}# {'; '.join(facts(variable))}"
    yield f"{indent}# {_effect(variable)}"


def render_dotenv(chosen: Mapping[str, str] | None = None) -> str:
    """Write a dotenv file with every variable commented out at its default.

    With ``chosen`` these are set, at the top, and the others are those with an effect in fdcache.
    """
    lines = ["# Settings of fdcache. Uncomment a line to set it; FDCACHE_ENV_FILE must name this file."]
    if chosen:
        lines += ["", "# --- chosen ---"]
        for name, value in chosen.items():
            lines += ["", *_comments(VARIABLES[name], ""), f"{name}={quote(value)}"]
    for group, members in GROUPS.items():
        shown = [each for each in members if not chosen or (each.used_in and each.name not in chosen)]
        lines += ["", f"# --- {heading(group)} ---"] if shown else []
        for variable in shown:
            lines += ["", *_comments(variable, "")]
            lines.append(f"# {variable.name}={quote(default_text(variable))}")
    return "\n".join(lines) + "\n"


def _yaml_entries(indent: str) -> Iterator[str]:
    for group, members in GROUPS.items():
        yield f"{indent}# --- {heading(group)} ---"
        for variable in members:
            yield from _comments(variable, indent)
            mark = "" if variable.name == _UNCOMMENTED else "# "
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
    kind = "; ".join(fact for fact in facts(variable) if not fact.startswith("secret"))
    notes = " Secret." if variable.secret else ""
    if variable.aliases:
        notes += f" Deprecated names: {', '.join(f'`{alias}`' for alias in variable.aliases)}."
    cells = (
        f"`{variable.name}`",
        _cell(kind),
        f"`{default}`" if default else "",
        _cell(variable.meaning) + notes,
        variable.effect,
        variable.takes_effect.value,
        variable.since,
    )
    return f"| {' | '.join(cells)} |"


def _effects_table() -> Iterator[str]:
    """Yield a table of the engine's variables by their effect."""
    old = [variable for variable in VARIABLES.values() if variable.old is not None]
    described = [variable for variable in old if not variable.undeclared]
    used = sum(bool(variable.used_in) for variable in described)
    checked = sum(bool(variable.checked_against) for variable in described if not variable.used_in)
    rest = len(described) - used - checked
    yield f"FastDeploy describes {len(described)} variables. fdcache acts on {used} of them, compares {checked} more"
    yield f"with others and passes {rest} on:"
    yield ""
    yield "| Effect | Number | Variables |"
    yield "|---|---|---|"
    for effect, names in _by_effect(described):
        listed = "all others" if effect == _PASSED_ON else ", ".join(f"`{name}`" for name in names)
        yield f"| {effect} | {len(names)} | {listed} |"
    yield ""
    yield "In addition there are fdcache's own variables, names that FastDeploy's code reads and does not describe,"
    yield "and names of Mooncake:"
    yield ""
    described_names = {variable.name for variable in described}
    others = [
        v for v in VARIABLES.values() if v.name not in described_names and not v.name.startswith(OWN_PREFIX)
    ]
    for effect, names in _by_effect(others):
        yield f"- {effect}: {', '.join(f'`{name}`' for name in names)}"


def _actions_table() -> Iterator[str]:
    """Yield a table of what FastDeploy's variables do in fdcache."""
    yield "These variables of FastDeploy act in fdcache; it passes all others on:"
    yield ""
    yield "| Variable | In fdcache | Component |"
    yield "|---|---|---|"
    for variable in VARIABLES.values():
        if variable.used_in and variable.group != "mooncake" and not variable.name.startswith(OWN_PREFIX):
            text = variable.acts or variable.meaning
            said = text[:1].upper() + text[1:].rstrip(".")
            yield f"| `{variable.name}` | {_cell(said)}. | {', '.join(variable.used_in)} |"


def _by_effect(variables: Iterable[Variable]) -> list[tuple[str, list[str]]]:
    """Group names by effect, those passed on last."""
    by_effect: dict[str, list[str]] = {}
    for variable in variables:
        by_effect.setdefault(variable.effect, []).append(variable.name)
    return sorted(by_effect.items(), key=lambda each: (each[0] == _PASSED_ON, each))


def render_markdown() -> str:
    """Write the reference page."""
    lines = [
        "# Environment variables",
        "",
        "Generated by `fdcache env template --format markdown`; do not edit.",
        "",
        "Every variable can also be set by `NAME_FILE`, the path of a file that contains the value.",
        "An empty variable counts as unset. Flags take 0/1, true/false, yes/no and on/off. Sizes take a unit",
        "(`512MiB`, `8GiB`, `4GB`), and so do durations (`500ms`, `30s`, `2m`). *Seen* is when a changed value takes",
        "effect: at the next start, or live.",
        "",
        "*Effect* is the variable's effect in fdcache:",
        "",
        "- *used*, with the components. *manager* and *controller* are the two halves of the cache in an engine,",
        "  and `replay` has both; *storage* is the storage tier of an engine, of `replay` or of `fdcache serve`;",
        "- *checked against* another variable, with which it may conflict;",
        "- *passed on*: `fdcache env` shows it and checks its type, `fdcache.envs` returns it to the engine, and",
        "  nothing in fdcache acts on it. A value that is wrong for the engine alone fails `fdcache env check` and",
        "  nothing else.",
        "",
        *_effects_table(),
        "",
        f"## {ACTIONS}",
        "",
        *_actions_table(),
    ]
    for group, members in GROUPS.items():
        lines += [
            "",
            f"## {heading(group).capitalize()}",
            "",
            "| Variable | Type | Default | Meaning | Effect | Seen | Since |",
            "|---|---|---|---|---|---|---|",
            *map(_markdown_row, members),
        ]
    return "\n".join(lines) + "\n"


def _schema(variable: Variable) -> dict[str, object]:
    schema: dict[str, object] = {**variable.kind.schema, "description": variable.meaning}
    if variable.choices and variable.used_in:
        schema["enum"] = list(variable.choices)
    elif variable.choices:
        schema["examples"] = list(variable.choices)  # the engine may know more
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
