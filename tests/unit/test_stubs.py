"""The stub of the native module says what the module says."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

from nanobind.stubgen import StubGen

ROOT = Path(__file__).parents[2]


def meaning(stub: str) -> str:
    """The stub's syntax tree, without the layout of its text and its docstrings."""
    tree = ast.parse(stub)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = inspect.cleandoc(node.value)
    return ast.dump(tree, indent=1)


def test_the_stub_is_that_of_the_installed_module() -> None:
    module = importlib.import_module("fdcache._core")
    generator = StubGen(module)
    generator.put(module)
    committed = ROOT / "fdcache/_core.pyi"
    assert meaning(committed.read_text()) == meaning(generator.get()), (
        f"{committed} is stale; run `make stubs`"
    )
