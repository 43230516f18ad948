"""Stubs of the native modules say what the modules say."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from nanobind.stubgen import StubGen

ROOT = Path(__file__).parents[2]


def meaning(stub: str) -> str:
    """The stub's syntax tree, without the layout of its text and its docstrings."""
    tree = ast.parse(stub)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = inspect.cleandoc(node.value)
    return ast.dump(tree, indent=1)


@pytest.mark.parametrize("name", ["fdcache._core", "fdcache.replay._pattern"])
def test_a_stub_is_that_of_the_installed_module(name: str) -> None:
    module = importlib.import_module(name)
    generator = StubGen(module)
    generator.put(module)
    committed = ROOT / f"{name.replace('.', '/')}.pyi"
    assert meaning(committed.read_text()) == meaning(generator.get()), (
        f"{committed} is stale; run `make stubs`"
    )
