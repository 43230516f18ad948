"""The page: one document with its scripts and styles, which a service serves and a replay writes to a file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

SCRIPTS = (
    "vendor/uPlot.js",
    "format.js",
    "charts.js",
    "tree.js",
    "panels.js",
    "explain.js",
    "source.js",
    "page.js",
)
STYLES = ("vendor/uPlot.css", "page.css")
_DOCUMENT = "page.html"


@cache
def asset(name: str) -> str:
    """Return the text of a file of the page."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def document() -> str:
    """Return the document, whose scripts and styles are files below ``page/``."""
    links = [f'<link rel="stylesheet" href="page/{name}">' for name in STYLES]
    scripts = [f'<script src="page/{name}" defer></script>' for name in SCRIPTS]
    return asset(_DOCUMENT).replace("<!-- head -->", "\n".join((*links, *scripts)))
