"""Check the language of docstrings and of comments in C++: plain verbs, and nothing that only restates a name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("fdcache", "fdcache_cli")
FIRST_WORDS = {
    "Let": "say what is set, kept or allowed",
    "Learn": "say record, read or take",
    "Note": "say record",
}
PHRASES = {
    r"\bnone that\b": "say no ... that",
    r"\bso many\b": "name the number",
    r"\bof which none\b": "say without",
    r"\bthat (?:is|are) none\b": "say invalid or unknown",
}
RESTATED = re.compile(r"(?:Return|Get|Set|Do) (?:the )?(?P<noun>\w+)\.")
Finding = tuple[Path, int, str]


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield owner, line and text of every docstring, also of those below attributes."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Expr(ast.Constant(str(text))):
                    yield getattr(node, "name", ""), child.lineno, text


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with a text."""
    for sentence in re.split(r"(?<=[.:;])\s+", text.strip()):
        word = sentence.split(" ", 1)[0]
        if word in FIRST_WORDS:
            yield f"{word!r}: {FIRST_WORDS[word]}"
    flat = " ".join(text.split())
    for pattern, remedy in PHRASES.items():
        if found := re.search(pattern, flat):
            yield f"{found[0]!r}: {remedy}"


def restates(name: str, text: str) -> bool:
    """Whether a docstring says no more than the name."""
    found = RESTATED.fullmatch(text.strip())
    return found is not None and found["noun"].rstrip("s") == name.strip("_").rsplit("_", 1)[-1].rstrip("s")


def in_python(path: Path) -> Iterator[Finding]:
    """Yield the findings of a module."""
    for name, line, text in docstrings(ast.parse(path.read_text())):
        for fault in faults(text):
            yield path, line, fault
        if restates(name, text):
            yield path, line, f"{text!r} restates {name}: say more or leave it out"


def in_native(path: Path) -> Iterator[Finding]:
    """Yield the findings of comments in C++, a block of lines at a time, and of docstrings in bindings."""
    text = path.read_text()
    for found in re.finditer(r"(?:^[ \t]*//.*\n)+", text, re.MULTILINE):
        words = re.sub(r"^[ \t]*// ?", "", found[0], flags=re.MULTILINE)
        line = text.count("\n", 0, found.start()) + 1
        yield from ((path, line, fault) for fault in faults(words))
    for found in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', text):
        words = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', found[0]))
        line = text.count("\n", 0, found.start()) + 1
        yield from ((path, line, fault) for fault in faults(words) if " " in words)


def findings(root: Path) -> Iterator[Finding]:
    """Yield all findings."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield from in_python(path)
    for path in sorted((root / "csrc").rglob("*.[ch]pp")):
        yield from in_native(path)


def main() -> int:
    """Print the findings; return 1 if there are any."""
    found = list(findings(ROOT))
    for path, line, fault in found:
        print(f"{path.relative_to(ROOT)}:{line}: {fault}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
