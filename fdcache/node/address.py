"""Where a service is: a socket in a runtime folder that only its user can enter."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from fdcache.errors import ConfigurationError
from fdcache.settings import Settings
from fdcache.settings.machine import runtime_base
from fdcache.settings.settings import survey

SCHEME = "ipc://"
_LONGEST = 107  # bytes of a unix socket's path
_SOCKET = "fdcache.sock"


def default_runtime_dir(configured: Path | None = None) -> Path:
    """``configured``, else fdcache in the user's runtime folder, else one of the user's in /tmp."""
    if configured is not None:
        return configured
    base = runtime_base()
    return base / "fdcache" if base else Path(f"/tmp/fdcache-{os.geteuid()}")


def default_address(runtime_dir: Path | None = None) -> str:
    """The socket of a service that was told nothing else."""
    return f"{SCHEME}{default_runtime_dir(runtime_dir) / _SOCKET}"


def socket_path(address: str) -> Path:
    """The socket's file. Raises ``ConfigurationError`` for an address that cannot be."""
    text = address.removeprefix(SCHEME)
    if "://" in text:
        raise ConfigurationError(
            f"address {address!r}: a service is reached on its own node only; write ipc:///folder/name.sock"
        )
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ConfigurationError(
            f"address {address!r}: the path must be absolute, as ipc:///run/fdcache/x.sock"
        )
    if len(str(path).encode()) > _LONGEST:
        raise ConfigurationError(
            f"address {address!r}: the path has more than the {_LONGEST} bytes of a socket; use a shorter folder"
        )
    return path


def make_runtime_dir(directory: Path) -> None:
    """Make the folder, mode 0700. Raises ``ConfigurationError`` when it cannot be, or others own it or can enter it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{directory}: the folder of the socket cannot be made: {error.strerror}; choose another --socket, or set "
            "FDCACHE_RUNTIME_DIR"
        ) from error
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{directory}: not a folder of this user; set FDCACHE_RUNTIME_DIR to another"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"{directory}: others can enter it; run chmod 700 {directory}")


def client_dir(address: str) -> Path:
    """The folder of a service's socket, where clients keep their live files. Raises ``ConfigurationError``."""
    directory = socket_path(address).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"FDCACHE_SERVER: the folder of the socket cannot be made: {error}; choose one that this user may use"
        ) from error
    return directory


def load_settings(arguments: Mapping[str, object]) -> Settings:
    """The settings of a service, or of whoever asks one: with the address that stands when none is given.

    ``arguments`` are as for ``Settings.load``. Raises ``SettingsError``.
    """
    default = default_address(survey(arguments=arguments).settings.server.runtime_dir)
    return Settings.load(arguments=arguments, defaults={"FDCACHE_SERVER": default})
