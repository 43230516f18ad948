"""Set-up of a machine by ``fdcache init``: folders, the file of settings, arenas of services that have ended."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from fdcache.errors import ConfigurationError
from fdcache.machine.files import write_text
from fdcache.machine.session import user_config_dir
from fdcache.service.server.arenas import find_arenas, remove_arena
from fdcache.service.server.machine_findings import Finding
from fdcache.service.wire.address import default_runtime_dir, is_directory
from fdcache.settings import Settings, Source
from fdcache.settings.templates import render_dotenv

_DIRECTORY_MODE = 0o700
_SERVICE = "# The service that these settings name starts with: "


def clean_arenas(settings: Settings) -> list[str]:
    """Remove the dead arenas and return a description of each.

    Raises ``ConfigurationError`` when their directory does not exist.
    """
    directory = settings.server.arena_dir
    if not is_directory(directory):
        raise ConfigurationError(f"FDCACHE_ARENA_DIR: {directory} is not a directory; mount a tmpfs there")
    removed = []
    for arena in find_arenas(directory):
        if not arena.alive:
            remove_arena(arena)
            removed.append(f"{arena.size} of {arena.words}")
    return removed


def default_env_file() -> Path:
    """Return the path of this user's settings file."""
    return user_config_dir() / "fdcache" / "fdcache.env"


def make_directories(settings: Settings) -> list[Finding]:
    """Create the directories that are missing and return them; those that could not be created are problems."""
    directories = [
        ("FDCACHE_RUNTIME_DIR", default_runtime_dir(settings.server.runtime_dir)),
        ("FDCACHE_CALIBRATION_DIR", settings.transfer.calibration_dir),
    ]
    if settings.source("FD_LOG_DIR") is not Source.DEFAULT:
        directories.append(("FD_LOG_DIR", settings.value("FD_LOG_DIR")))
    if settings.storage_tier.connector == "local":
        directories.append(("FDCACHE_STORAGE_DIR", settings.storage_tier.directory))
    return [_make_directory(name, each) for name, each in directories if not is_directory(each)]


def _make_directory(name: str, directory: Path) -> Finding:
    try:
        directory.mkdir(mode=_DIRECTORY_MODE, parents=True)
    except OSError as error:
        problem = (
            f"{name}: {directory} cannot be created: {error.strerror}; choose another that this user may use"
        )
        return Finding("folder", f"{directory}, not created", problem)
    return Finding("folder", f"{directory}, created")


def service_line(path: Path) -> str | None:
    """Return the line that starts the service of a settings file that ``write_env_file`` wrote, None without one."""
    lines = path.read_text().splitlines()
    return next((each.removeprefix(_SERVICE) for each in lines if each.startswith(_SERVICE)), None)


def write_env_file(
    path: Path, findings: Iterable[Finding], chosen: Mapping[str, str], service: str | None = None
) -> Finding:
    """Write the settings in ``chosen``, all others with their meaning, and the findings as a comment.

    The line that starts the service of these settings stands above them. An existing file is left alone.
    """
    use = f"use it with: export FDCACHE_ENV_FILE={shlex.quote(str(path))}"
    if path.exists():
        return Finding("settings file", f"{path}, exists and was not changed; remove it for a new one; {use}")
    found = "".join(f"#   {each.name}: {each.found}\n" for each in findings)
    start = f"{_SERVICE}{service}\n#\n" if service is not None and service.isprintable() else ""
    text = (
        f"# Written by `fdcache init`, which found on this machine:\n{found}#\n{start}{render_dotenv(chosen)}"
    )
    try:
        path.parent.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        write_text(path, text, mode=0o600)  # secrets may be added to it
    except OSError as error:
        problem = f"--env-file: {path} cannot be written: {error.strerror}; choose another"
        return Finding("settings file", f"{path}, not written", problem)
    return Finding("settings file", f"{path}, written; {use}")
