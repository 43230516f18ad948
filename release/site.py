"""The documentation as a site in build/site: ``make site``. Every link and anchor is checked.

The pages are those of docs/, the programs of examples/ as pages, and a reference of the public names of ``fdcache``
from their docstrings.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import fdcache

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
_SHIM = Path(__file__).with_name("vendor") / "iframe-worker.js"
_SHIM_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
_LOADED_ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|link rel=\"stylesheet\")[^>]* (?:src|href)=\"?https?:[^>]*>"
)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".env": "sh", "": "dockerfile"}


def stage() -> None:
    """Write the sources of the site. Files and folders of examples/ that a page links become pages.

    Search leaves these out: names in programs would come before the guides.
    """
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    for page in SOURCE.rglob("*.md"):
        text = page.read_text()
        page.write_text(re.sub(r"\]\((?:\.\./)+(examples/[^)#]+)\)", _to_page, text))
    (SOURCE / "reference" / "python.md").write_text(render_reference())


def _to_page(link: re.Match[str]) -> str:
    path = ROOT / link[1]
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    name = f"{link[1].replace('.', '-')}.md"
    page = SOURCE / name
    page.parent.mkdir(parents=True, exist_ok=True)
    parts = [f"---\nsearch:\n  exclude: true\n---\n\n# {link[1]}\n"]
    for file in files:
        heading = f"## {file.name}\n\n" if path.is_dir() else ""
        parts.append(f"{heading}```{_LANGUAGES[file.suffix]}\n{file.read_text().rstrip()}\n```\n")
    page.write_text("\n".join(parts))
    return f"]({name})"


def render_reference() -> str:
    """Return the page of the public names, from signatures and docstrings."""
    lines = [
        "# Python",
        "",
        "The public names of `fdcache`; their modules are imported when they are first used.",
        "",
    ]
    for name in fdcache.__all__:
        value = getattr(fdcache, name)
        if inspect.isclass(value):
            lines += _described_class(name, value)
        elif callable(value):
            lines += _described(f"## {name}", name, value)
    return "\n".join(lines) + "\n"


def _described_class(name: str, value: type) -> Iterator[str]:
    yield from _described(f"## {name}", name, value)
    if issubclass(value, Enum):
        yield from ("| name | value |", "|---|---|")
        yield from (f"| `{each.name}` | `{each.value}` |" for each in value)
        yield ""
        return
    for member in sorted(vars(value)):
        found = inspect.getattr_static(value, member)
        if member.startswith("_"):
            continue
        if isinstance(found, property):
            yield from (f"### {name}.{member}", "", *_text(found), "")
        elif isinstance(found, staticmethod | classmethod) or inspect.isroutine(found):
            yield from _described(f"### {name}.{member}", member, getattr(value, member))


def _described(heading: str, name: str, value: Any) -> Iterator[str]:
    yield from (heading, "")
    if (signature := _signature(value)) is not None:
        yield from ("```python", f"{name}{signature}", "```", "")
    yield from (*_text(value), "")


def _signature(value: Any) -> str | None:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # written in C++, which says it in the docstring
        return None
    shown = [
        each.replace(annotation=_plain(each.annotation))
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    text = str(signature.replace(parameters=shown, return_annotation=_plain(signature.return_annotation)))
    return text if len(text) <= 100 else "(\n    " + ",\n    ".join(map(str, shown)) + ",\n)"


class _Annotation(str):
    """Annotation that is printed without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _plain(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def _text(value: Any) -> list[str]:
    """Return a docstring as Markdown, in which indented examples are code already."""
    lines = (inspect.getdoc(value) or "").replace("``", "`").splitlines()
    return [line if line.startswith("    ") else line.replace("<", "&lt;") for line in lines if line != "::"]


def main() -> None:
    """Build the site. Exits with the status of Zensical, which fails for a link or an anchor that is not there."""
    stage()
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [zensical, "build", "--strict", "--clean", "-f", "mkdocs.yml"], cwd=ROOT, check=False
    )
    if done.returncode == 0:
        keep_at_home()
    sys.exit(done.returncode)


def keep_at_home() -> None:
    """Let the pages load nothing from elsewhere: search in files without a server takes its program from the site."""
    shutil.copy(_SHIM, SITE / "assets/javascripts")
    for page in SITE.rglob("*.html"):
        home = "../" * (len(page.relative_to(SITE).parts) - 1)
        text = page.read_text().replace(_SHIM_ELSEWHERE, f"{home}assets/javascripts/{_SHIM.name}")
        page.write_text(text)
        if found := _LOADED_ELSEWHERE.search(text):
            sys.exit(f"{page.relative_to(SITE)} loads from elsewhere: {found[0]}")


if __name__ == "__main__":
    main()
