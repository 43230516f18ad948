"""Every command that README and guides show is one that the program takes. They are parsed, not run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fdcache_cli.commands import load_command, make_app

ROOT = Path(__file__).parent.parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))]
PROGRAMS = ("fdcache", "make", "python")
STANDS_FOR = {
    "ADDRESS": "ipc:///run/fdcache.sock",
    "HASH": "ab" * 32,
    "FILE": "README.md",
    "prod.env": "README.md",
    "test.env": "README.md",
}


def shown(page: str) -> Iterator[str]:
    """Lines of blocks of commands, and commands in the text; without comments, prompts and assignments before them."""
    fence, candidates = "", []
    for line in re.sub(r"\s*\\\n\s*", " ", (ROOT / page).read_text()).splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence in ("```", "```bash", "```sh", "```console"):
            candidates.append(line)
        elif not fence:
            candidates += re.findall(r"`([^`]+)`", line)
    for candidate in candidates:
        command = re.sub(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?", "", candidate)
        if command.split(" ")[0] in PROGRAMS and " " in command:
            yield command


def words_of(command: str) -> list[str]:
    """Its words: of alternatives the last, of optional ones all, a value for what stands for one."""
    words = shlex.split(re.sub(r"[\[\]]", "", command), comments=True)
    return [STANDS_FOR.get(last, last) for last in (word.split("|")[-1] for word in words)]


COMMANDS_SHOWN = sorted({(page, command) for page in PAGES for command in shown(page)})


def test_there_are_commands_to_look_at() -> None:
    assert len([command for page, command in COMMANDS_SHOWN if page == "README.md"]) >= 6
    assert len(COMMANDS_SHOWN) > 40


@pytest.mark.parametrize(("page", "command"), COMMANDS_SHOWN, ids=lambda text: text[:60])
def test_the_program_takes_what_is_shown(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = words_of(command)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
    elif program == "fdcache":
        takes_fdcache(words)
    elif words[0] == "-m":
        takes_module(words[1], words[2:], monkeypatch)
    else:
        assert (ROOT / words[0]).is_file()


def takes_fdcache(words: list[str]) -> None:
    if words[0].startswith("-"):
        options = {name for parameter in get_command(make_app()).params for name in parameter.opts}
        assert set(words) <= options | {"--help", "--version"}
        return
    command: Any = load_command(words[0])
    rest = words[1:]
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        name, *rest = rest
        found = command.get_command(None, name)
        assert found is not None, f"no subcommand {name}"
        command = found
    options = {name for parameter in command.params for name in parameter.opts + parameter.secondary_opts}
    for word in rest:
        if word.startswith("-"):
            assert word.split("=")[0] in options | {"--help"}, f"no option {word}"
    if rest and "--help" not in rest:
        command.make_context("fdcache", rest)


def takes_module(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec(name) is not None
    if name == "examples.paddle_engine":
        demo = pytest.importorskip("examples.paddle_engine.__main__")
        monkeypatch.setattr(demo.Demo, "check", lambda self: None)
        demo.parse(words)
        return
    path = ROOT / name.replace(".", "/")
    part = path / f"{words[0].replace('-', '_')}.py" if words else path
    sources = [part] if part.is_file() else list(path.glob("*.py")) or [path.with_suffix(".py")]
    text = "".join(source.read_text() for source in sources)
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{name} has no {word}"


def test_what_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["replay", "--no-such-option"], ["inspect", "nothing"], ["serve", "--storage"]):
        with pytest.raises(Exception, match=r"no |requires|argument"):
            takes_fdcache(words)
    with pytest.raises(AssertionError, match="has no --nothing"):
        takes_module("benchmarks.ttft", ["--nothing"], monkeypatch)
