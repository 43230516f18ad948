"""Where a service is: a socket in a runtime folder that only its user can enter."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from fdcache.errors import ConfigurationError
from fdcache.machine.session import user_runtime_dir
from fdcache.settings import Problem, Settings, SettingsError
from fdcache.settings.loading import read_settings
from fdcache.settings.sources import FILE_SUFFIX

SCHEME = "ipc://"
_LONGEST = 107  # bytes of a unix socket's path
_SOCKET = "fdcache.sock"


def default_runtime_dir(configured: Path | None = None) -> Path:
    """``configured``, else fdcache in the user's runtime folder, else one of the user's in /tmp."""
    if configured is not None:
        return configured
    base = user_runtime_dir()
    return base / "fdcache" if base else _own_in_tmp()


def _own_in_tmp() -> Path:
    return Path(f"/tmp/fdcache-{os.geteuid()}")


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
            f"address {address!r}: the path must be absolute; begin it with /, as in /run/fdcache/x.sock"
        )
    if len(str(path).encode()) > _LONGEST:
        raise ConfigurationError(
            f"address {address!r}: the path has more than the {_LONGEST} bytes of a socket; use a shorter folder"
        )
    return path


def make_runtime_dir(directory: Path) -> None:
    """Make the folder, mode 0700. Raises ``ConfigurationError`` when it cannot be, or others own it or can enter it."""
    if (problem := runtime_dir_problem(directory)) is not None:
        raise ConfigurationError("; ".join(problem))
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{directory}: the folder of the socket cannot be made: {error.strerror}; choose another --socket, or set "
            "FDCACHE_RUNTIME_DIR"
        ) from error


def runtime_dir_problem(directory: Path) -> tuple[str, str] | None:
    """Say why a service cannot have its socket in a folder, and the remedy. One that is not there will be made."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return _making_problem(directory)
    except OSError as error:
        return f"{directory}: the folder of the socket cannot be entered: {error.strerror}", _another(
            directory
        )
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory}: the folder of the socket is no folder", _another(directory)
    if status.st_uid != os.geteuid():
        return f"{directory}: not a folder of this user", _another(directory)
    if stat.S_IMODE(status.st_mode) & 0o077:
        # Others may need it: it is not for fdcache to have it closed to them.
        return f"{directory}: others can enter it", _another(directory)
    return None


def _another(wrong: Path) -> str:
    """Advise a folder of the user's own in place of one that will not do."""
    remedy = "choose another --socket, or set FDCACHE_RUNTIME_DIR to another folder"
    candidates = (default_runtime_dir(), _own_in_tmp())
    own = next((each for each in candidates if not wrong.is_relative_to(each)), None)
    return remedy if own is None else f"{remedy}, such as {own}, which is made for this user alone"


def socket_problem(socket: Path) -> tuple[str, str] | None:
    """Say that something else than a socket is where a service would make its own, and the remedy."""
    try:
        mode = socket.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISSOCK(mode):
        return None
    return f"{socket}: there is something else than a socket", "choose another --socket, or move it away"


def require_socket(socket: Path) -> None:
    """Raise ``ConfigurationError`` where a service would have to replace something else than a socket."""
    if problem := socket_problem(socket):
        raise ConfigurationError("; ".join(problem))


def _making_problem(directory: Path) -> tuple[str, str] | None:
    nearest = next(each for each in directory.parents if os.path.lexists(each))
    if not nearest.is_dir():
        return f"{directory}: the folder of the socket cannot be made: {nearest} is no folder", _another(
            directory
        )
    if not os.access(nearest, os.W_OK | os.X_OK) or is_read_only(nearest):
        return f"{directory}: the folder of the socket cannot be made in {nearest}", _another(directory)
    return None


def is_folder(path: Path) -> bool:
    """Return True for a folder, and False below one that may not be entered, where ``Path.is_dir`` raises."""
    return os.path.isdir(path)  # noqa: PTH112


def is_read_only(folder: Path) -> bool:
    """Return whether nothing can be made in a folder even by root: a read-only mount, or one of the kernel's."""
    is_kernels = folder.is_relative_to("/proc") or folder.is_relative_to("/sys")
    return is_kernels or bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


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


_ADDRESS = {"FDCACHE_SERVER", "FDCACHE_RUNTIME_DIR", "FDCACHE_ENV_FILE", "FDCACHE_SECRETS_DIR"}
"""What decides where a service is."""


def find_address(arguments: Mapping[str, object]) -> tuple[str, tuple[Problem, ...]]:
    """Give the address of the service to ask, and what is wrong with the settings otherwise.

    Who looks into a service when something is wrong must not be kept from it by other settings. ``arguments`` are as
    for ``Settings.load``. Raises ``SettingsError`` for what the address follows from.
    """
    found = read_settings(arguments=arguments)
    about_address = [each for each in found.errors if not _ADDRESS.isdisjoint(_plain(each.variables))]
    if about_address:
        raise SettingsError(about_address)
    settings = found.settings
    return settings.cache.server or default_address(settings.server.runtime_dir), found.errors


def _plain(names: Iterable[str]) -> set[str]:
    return {name.removesuffix(FILE_SUFFIX) if name not in _ADDRESS else name for name in names}


def load_settings(arguments: Mapping[str, object]) -> Settings:
    """The settings of a service, or of whoever asks one: with the address that stands when none is given.

    ``arguments`` are as for ``Settings.load``. Raises ``SettingsError``.
    """
    default = default_address(read_settings(arguments=arguments).settings.server.runtime_dir)
    return Settings.load(arguments=arguments, defaults={"FDCACHE_SERVER": default})
