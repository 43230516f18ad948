"""Dependencies between rooms, the cost of importing the package, and who reads the environment."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fdcache

ROOT = Path(fdcache.__file__ or "").parent.parent
FOUNDATION = {
    "_core",
    "block_owners",
    "errors",
    "groups",
    "hashing",
    "hints",
    "layout",
    "layout_encoding",
    "layout_planes",
    "machine",
    "metadata",
    "settings",
    "tasks",
    "tracing",
}
FLOORS = (
    FOUNDATION,
    {"plans"},
    {"devices"},
    {"storage"},
    {"tiers"},
    {"service"},
    {"manager"},
    {"transfer"},
    {"controller"},
    {"integrations"},
    {"replay"},
    {"testing"},
)
"""From the bottom up. A room imports the floors below its own; rooms of one floor do not import each other."""

NEVER = {
    "manager": {"devices", "service", "transfer", "controller"},
    "storage": {"devices", "service", "transfer"},
    "controller": {"manager"},
}
"""What a room does not import either, although it stands below."""

MAY_IMPORT = {
    name: set().union(*FLOORS[:floor], FOUNDATION if name in FOUNDATION else set()) - NEVER.get(name, set())
    for floor, rooms in enumerate(FLOORS)
    for name in rooms
} | {"envs": FOUNDATION | {"integrations"}}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("fdcache", "fdcache_cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports_of(name: str) -> set[str]:
    """Return the project's modules that a module imports anywhere in its text, types included."""
    imported: set[str] = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} uses a relative import"
            base = node.module or ""
            imported.update(
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names
            )
    return {one for one in imported if one.split(".")[0] in ("fdcache", "fdcache_cli")}


MODULES = modules()


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@cache
def nodes(name: str) -> list[ast.AST]:
    """Return all nodes of a module's tree, which many tests look through."""
    return list(ast.walk(tree(name)))


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_a_room_imports_only_what_stands_below_it() -> None:
    names = [name for name in MODULES if name.startswith("fdcache.")]
    assert not [name for name in names if room(name) not in MAY_IMPORT], (
        "in a room that the design does not have"
    )
    beyond = [
        f"{name} imports {one}"
        for name in names
        for one in sorted(imports_of(name))
        if room(one) not in MAY_IMPORT[room(name)] | {room(name), ""} or one.startswith("fdcache_cli")
    ]
    assert not beyond


@pytest.mark.parametrize(("lower", "upper"), [("wire", "client"), ("wire", "server"), ("client", "server")])
def test_a_floor_of_the_service_does_not_import_a_higher_one(lower: str, upper: str) -> None:
    modules = [name for name in MODULES if name.startswith(f"fdcache.service.{lower}")]
    assert modules
    beyond = {
        name
        for name in modules
        if any(one.startswith(f"fdcache.service.{upper}") for one in imports_of(name))
    }
    assert not beyond


def test_no_module_reaches_itself() -> None:
    edges = {
        name: {one for one in imports_of(name) if one in MODULES and one != "fdcache"} for name in MODULES
    }
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for one in edges[name]:
                visit(one, (*path, name))
            finished.add(name)

    for name in edges:
        if name != "fdcache":
            visit(name, ())


def test_no_public_class_name_exists_twice() -> None:
    homes: dict[str, list[str]] = {}
    for name in MODULES:
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


def test_nothing_asks_which_class_the_host_tier_has() -> None:
    owners = {"LocalHostTier", "RemoteHostTier", "HostTier", "SharedHost"}
    asked = {
        f"{name}: {each.id}"
        for name in MODULES
        for node in nodes(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        for each in ast.walk(node.args[1])
        if isinstance(each, ast.Name) and each.id in owners
    }
    assert not asked


@pytest.mark.parametrize(
    "name",
    [
        "fdcache.tiers.host",
        "fdcache.tiers.fetches",
        "fdcache.service.client.remote_tier",
    ],
)
def test_no_host_tier_has_a_method_that_does_nothing(name: str) -> None:
    empty = {
        f"{owner.name}.{node.name}"
        for owner in nodes(name)
        if isinstance(owner, ast.ClassDef)
        and not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in owner.bases)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        and all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body)
    }
    assert not empty


def test_managers_know_few_members_of_a_host_tier() -> None:
    (tier,) = (
        node
        for node in nodes("fdcache.tiers.host")
        if isinstance(node, ast.ClassDef) and node.name == "HostTier"
    )
    assert len([node for node in tier.body if isinstance(node, ast.FunctionDef)]) <= 14


@pytest.fixture(scope="module")
def imported() -> list[Any]:
    """New modules and number of threads after importing the package, then the modules after using every public name."""
    script = (
        "import sys, json; before = set(sys.modules); import fdcache, threading;"
        "print(json.dumps([sorted(set(sys.modules) - before), threading.active_count()]));"
        "[getattr(fdcache, name) for name in fdcache.__all__]; print(json.dumps(sorted(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_the_state_of_requests_belongs_to_one_module() -> None:
    touched = {
        name: f"{node.value.id}.{node.attr}"
        for name in MODULES
        if name.startswith("fdcache.manager.")
        for node in nodes(name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in ("request", "live", "owner") and node.attr.startswith("_")
    }
    assert set(touched) == {"fdcache.manager.requests"}, touched


def test_importing_the_package_starts_nothing_and_loads_no_framework(imported: list[Any]) -> None:
    loaded, threads = imported[0]
    assert threads == 1
    heavy = {"numpy", "pydantic", "msgspec", "rich", "typer", "paddle", "torch", "cupy", "fdcache._core"}
    assert not heavy & set(loaded)


OF_COMMANDS_AND_SERVICE = {
    "typer",
    "click",
    "rich",
    "fastapi",
    "starlette",
    "uvicorn",
    "anyio",
    "prometheus_client",
    "opentelemetry",
    "zmq",
}


def test_the_public_names_load_no_framework(imported: list[Any]) -> None:
    assert not {"paddle", "torch", "cupy", "jax", "matplotlib"} & set(imported[1])


def test_the_public_names_load_no_package_of_the_command_line_or_the_service(imported: list[Any]) -> None:
    assert {"numpy", "pydantic", "msgspec"} <= set(imported[1])
    assert not OF_COMMANDS_AND_SERVICE & set(imported[1])


@pytest.mark.parametrize(
    ("framework", "rooms"),
    [
        ("paddle", {"integrations"}),
        ("torch", {"integrations"}),
        ("vllm", {"integrations"}),
        ("cupy", {"devices"}),
    ],
)
def test_a_framework_is_imported_in_its_room_alone(framework: str, rooms: set[str]) -> None:
    importing = set()
    for name in MODULES:
        for node in nodes(name):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(each.split(".")[0] == framework for each in named):
                importing.add(room(name))
    assert importing == rooms


def test_only_the_settings_and_the_session_read_the_environment() -> None:
    readers = set()
    for name in MODULES:
        for node in nodes(name):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
            if is_read and name.startswith("fdcache."):
                readers.add("fdcache.settings" if room(name) == "settings" else name)
    old_module = "fdcache.integrations.fastdeploy.old_module"
    assert readers == {"fdcache.settings", "fdcache.machine.session", old_module}


def test_every_public_name_is_there_and_unknown_ones_are_refused() -> None:
    for name in fdcache.__all__:
        assert getattr(fdcache, name) is not None
        assert name in dir(fdcache)
    with pytest.raises(AttributeError, match="no attribute 'CacheManger'"):
        _ = fdcache.CacheManger
