"""What ``fdcache init`` makes: the folders that serving uses, and a file to write settings in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fdcache.node.address import default_runtime_dir, is_folder
from fdcache.server.machine_report import Finding
from fdcache.settings import Settings, Source
from fdcache.settings.machine import config_base
from fdcache.settings.templates import render_dotenv

_FOLDER_MODE = 0o700


def default_env_file() -> Path:
    """Where the settings of this user are written down when no other place is named."""
    return config_base() / "fdcache" / "fdcache.env"


def make_folders(settings: Settings) -> list[Finding]:
    """Make the folders that are not there yet; those that could not be made are problems."""
    return [found for name, folder in _folders(settings) if (found := _make(name, folder)) is not None]


def _folders(settings: Settings) -> Iterator[tuple[str, Path]]:
    yield "FDCACHE_RUNTIME_DIR", default_runtime_dir(settings.server.runtime_dir)
    yield "FDCACHE_CALIBRATION_DIR", settings.transfer.calibration_dir
    if settings.source("FD_LOG_DIR") is not Source.DEFAULT:
        yield "FD_LOG_DIR", settings.logging.directory
    if settings.storage_tier.connector == "local":
        yield "FDCACHE_STORAGE_DIR", settings.storage_tier.directory


def _make(name: str, folder: Path) -> Finding | None:
    if is_folder(folder):
        return None
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True)
    except OSError as error:
        problem = f"{name}: {folder} cannot be made: {error.strerror}; choose another that this user may use"
        return Finding("folder", f"{folder}, not made", problem)
    return Finding("folder", f"{folder}, made")


def write_env_file(path: Path, findings: Iterable[Finding]) -> Finding:
    """Write every setting with its meaning, below what was found of the machine; a file that is there stays."""
    hint = f"export FDCACHE_ENV_FILE={path}"
    if path.exists():
        return Finding("settings file", f"{path}, kept as it is; in use with {hint}")
    found = "".join(f"#   {each.name}: {each.found}\n" for each in findings)
    text = f"# Written by `fdcache init`, which found on this machine:\n{found}#\n{render_dotenv()}"
    try:
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=False)  # secrets may come to stand in it
        path.write_text(text)
    except OSError as error:
        problem = f"--env-file: {path} cannot be written: {error.strerror}; choose another"
        return Finding("settings file", f"{path}, not written", problem)
    return Finding("settings file", f"{path}, written; in use with {hint}")
