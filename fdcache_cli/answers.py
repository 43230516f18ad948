"""Answers to the questions of ``fdcache init``, and the settings that follow from them."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from fdcache.machine.memory import SHARE_OF_MEMORY, available_memory
from fdcache.service.server.preflight import nearest_directory
from fdcache.service.wire.address import default_address
from fdcache.settings import Severity, read_settings
from fdcache.settings.sources import Sourced
from fdcache_cli.engines import ENGINES, installed_engine

_GIB = 1 << 30
_NO_FOLDER = "none"
_LEAST_ROOM = 2 << 20


@dataclass(frozen=True, slots=True)
class Answers:
    """What was given, or None. ``with_engine`` fills in engine and model, ``complete`` the rest, too."""

    engine: str | None = None
    model: str | None = None
    host_memory: str | None = None
    storage: Path | None = None
    service: bool | None = None

    def with_engine(self, *, ask: bool) -> Answers:
        """Return the answers with engine and model asked on the terminal, or by default.

        Raises ``BadParameter`` for an unknown engine, and where it should ask and there is no terminal.
        """
        if self.engine is not None:
            _require_engine(self.engine)
        if ask and not sys.stdin.isatty():
            raise typer.BadParameter("there is no terminal to ask on; give --yes")
        default = installed_engine().name
        if not ask:
            engine = self.engine or default
            return replace(self, engine=engine, model=self.model or _example(engine))
        engine = self.engine or _ask(f"Which engine: {', '.join(ENGINES)}?", default, _require_engine)
        what = "Its program?" if engine == "own" else "Which model, a folder or a name?"
        return replace(self, engine=engine, model=self.model or _ask(what, _example(engine)))

    def complete(self, *, ask: bool) -> Answers:
        """Return the answers with all that is missing asked on the terminal, or by default.

        Raises ``BadParameter`` as ``with_engine``, and for a disk without room.
        """
        if self.storage is not None:
            _require_room(str(self.storage))
        named = self.with_engine(ask=ask)
        if ask:
            return named._with_settings()
        return replace(
            named, host_memory=self.host_memory or self._default_memory(), service=bool(self.service)
        )

    def require_kept(self, file: Path) -> None:
        """Raise ``BadParameter`` if a settings file that exists cannot be kept with these answers."""
        if not file.is_file():
            raise typer.BadParameter(f"{file} is no file; name one", param_hint="--env-file")
        given = {"--host-memory": self.host_memory, "--storage": self.storage, "--service": self.service}
        for option, value in given.items():
            if value is not None:
                raise typer.BadParameter(
                    f"{file} exists and is kept as it is; change it there, remove it for a new one, or name another "
                    "with --env-file",
                    param_hint=option,
                )

    def _with_settings(self) -> Answers:
        memory = self.host_memory or _ask(
            "How much host memory for blocks?", self._default_memory(), _require_memory
        )
        storage = self.storage
        if storage is None:
            folder = _ask(
                "A folder on a local disk for more blocks, which survive restarts, or none?",
                _NO_FOLDER,
                _require_room,
            )
            storage = None if folder == _NO_FOLDER else Path(folder).expanduser()
        service = self.service
        if service is None:
            service = typer.confirm(
                "Do several engines of this machine share the host memory?", False, err=True
            )
        return replace(self, host_memory=memory, storage=storage, service=service)

    def _default_memory(self) -> str:
        """Return what is set, or the default share of the memory that is left; for a service no more than fits."""
        if given := os.environ.get("FDCACHE_HOST_MEMORY"):
            return given
        share = available_memory().nbytes // SHARE_OF_MEMORY
        room = _room(read_settings().settings.server.arena_dir) * 3 // 4  # tables need some of it
        return _rounded(min(share, room) if self.service else share)

    @property
    def title(self) -> str:
        """Name of the engine in a sentence."""
        return ENGINES[self.engine or "own"].title

    @property
    def memory(self) -> dict[str, Sourced]:
        """Setting of the host memory that was given, and by which option."""
        if self.host_memory is None:
            return {}
        return {"FDCACHE_HOST_MEMORY": Sourced("--host-memory of fdcache init", self.host_memory)}

    @property
    def arguments(self) -> dict[str, str]:
        """Settings of all that runs on this machine, by name, to prepare it."""
        chosen = {"FDCACHE_HOST_MEMORY": self.host_memory or "0"}
        if self.storage is not None:
            chosen |= {
                "FDCACHE_STORAGE": "local",
                "FDCACHE_STORAGE_DIR": str(self.storage.absolute()),
                "FDCACHE_STORAGE_SIZE": self._storage_size,
            }
        return chosen

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the engine's process, by name: where a service has memory and storage, its address."""
        return {"FDCACHE_SERVER": _address()} if self.service else self.arguments

    def start(self, file: Path) -> str:
        """Return the line that starts the engine with the settings in ``file``."""
        return ENGINES[self.engine or "own"].start(file, self.model or "")

    @property
    def service_line(self) -> str | None:
        """Line that starts the service, if there is to be one."""
        if not self.service:
            return None
        words = ["fdcache", "serve", "--host-memory", self.host_memory or "0"]
        if self.storage is not None:
            words += ["--storage", f"{self.storage.absolute()}/", "--storage-size", self._storage_size]
        return shlex.join(words)

    @property
    def _storage_size(self) -> str:
        """Half of the room on the disk, for the files of one rank."""
        return _rounded(_room(self.storage or Path()) // 2)


def _ask(question: str, default: str | None, check: Callable[[str], None] | None = None) -> str:
    while True:
        answer = str(typer.prompt(question, default, err=True))
        try:
            if check is not None:
                check(answer)
        except typer.BadParameter as error:
            typer.echo(f"error: {error.message}", err=True)
            continue
        return answer


def _require_engine(name: str) -> None:
    if name not in ENGINES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(ENGINES)}", param_hint="--engine")


def _require_memory(size: str) -> None:
    for problem in read_settings(arguments={"FDCACHE_HOST_MEMORY": size}).problems:
        if problem.severity is Severity.ERROR and "FDCACHE_HOST_MEMORY" in problem.variables:
            raise typer.BadParameter(f"{problem.wrong}; {problem.right}", param_hint="--host-memory")


def _require_room(folder: str) -> None:
    if folder != _NO_FOLDER and (room := _room(Path(folder).expanduser())) < _LEAST_ROOM:
        raise typer.BadParameter(
            f"the disk of {folder} has {room:,} bytes left; name a folder of another one, or make room",
            param_hint="--storage",
        )


def _room(folder: Path) -> int:
    return shutil.disk_usage(nearest_directory(folder.absolute())).free


def _example(engine: str) -> str:
    return "engine.py" if engine == "own" else "MODEL"


def _address() -> str:
    settings = read_settings().settings
    return settings.cache.server or default_address(settings.server.runtime_dir)


def _rounded(nbytes: int) -> str:
    """Return a size in whole GiB, below one in MiB."""
    return f"{nbytes // _GIB}GiB" if nbytes >= _GIB else f"{nbytes >> 20}MiB"
