"""The page: one document with its scripts and styles, which a service serves and a replay writes to a file."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
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


def recorded(recording: str) -> str:
    """Return one document with scripts, styles and a recording in it, a JSON text. It needs no other file."""
    scripts, styles = [asset(name) for name in SCRIPTS], [asset(name) for name in STYLES]
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [f'<meta http-equiv="Content-Security-Policy" content="{policy}">']
    head += [f"<style>{style}</style>" for style in styles]
    data = recording.replace("<", "\\u003c")  # whatever names are in it
    body = [f'<script type="application/json" id="recording">{data}</script>']
    body += [f"<script>{script}</script>" for script in scripts]
    page = asset(_DOCUMENT).replace("<!-- head -->", "\n".join(head))
    before, _, after = page.rpartition("</body>")
    return "".join((before, *body, "</body>", after))


def _digests(texts: list[str]) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
