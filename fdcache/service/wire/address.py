"""Address of a service: a socket in a runtime directory that only its user can enter."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from fdcache.errors import ConfigurationError
from fdcache.machine.session import expand_home, user_runtime_dir
from fdcache.settings import Problem, Settings, SettingsError
from fdcache.settings.loading import read_settings
from fdcache.settings.sources import FILE_SUFFIX

SCHEME = "ipc://"
_MAX_PATH_BYTES = 107  # of a unix socket
_SOCKET = "fdcache.sock"
_ADDRESS_VARIABLES = {"FDCACHE_SERVER", "FDCACHE_RUNTIME_DIR", "FDCACHE_ENV_FILE", "FDCACHE_SECRETS_DIR"}


def default_runtime_dir(configured: Path | None = None) -> Path:
    """Return ``configured``, else ``fdcache`` in the user's runtime directory, else the user's own in /tmp."""
    if configured is not None:
        return configured
    base = user_runtime_dir()
    return base / "fdcache" if base else _own_in_tmp()


def _own_in_tmp() -> Path:
    return Path(f"/tmp/fdcache-{os.geteuid()}")


def default_address(runtime_dir: Path | None = None) -> str:
    """Return the address of a service without FDCACHE_SERVER and --socket."""
    return f"{SCHEME}{default_runtime_dir(runtime_dir) / _SOCKET}"


def socket_path(address: str) -> Path:
    """Return the path of the socket. Raises ``ConfigurationError`` for an invalid address."""
    text = address.removeprefix(SCHEME)
    if "://" in text:
        raise ConfigurationError(
            f"address {address!r}: a service is reachable on its own node only; write ipc:///directory/name.sock"
        )
    try:
        path = expand_home(Path(text))
    except ValueError as error:
        raise ConfigurationError(
            f"address {address!r}: {error}; begin it with /, as in /run/fdcache/x.sock"
        ) from None
    if not path.is_absolute():
        raise ConfigurationError(
            f"address {address!r}: the path must be absolute; begin it with /, as in /run/fdcache/x.sock"
        )
    if len(str(path).encode()) > _MAX_PATH_BYTES:
        raise ConfigurationError(
            f"address {address!r}: the path is longer than the {_MAX_PATH_BYTES} bytes of a socket; "
            "use a shorter directory"
        )
    return path


def http_key_path(address: str) -> Path:
    """Return the file beside the socket with the key that the service's own user sends over HTTP."""
    socket = socket_path(address)
    return socket.with_name(socket.name + ".key")


def make_runtime_dir(directory: Path) -> None:
    """Create the directory, mode 0700. Raises ``ConfigurationError`` if it fails, or if others own or may enter it."""
    if (problem := runtime_dir_problem(directory)) is not None:
        raise ConfigurationError("; ".join(problem))
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{directory}: the directory of the socket cannot be created: {error.strerror}; choose another --socket, "
            "or set FDCACHE_RUNTIME_DIR"
        ) from error


def runtime_dir_problem(directory: Path) -> tuple[str, str] | None:
    """Return why a service cannot have its socket in a directory, and the remedy; a missing one will be created."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return _creation_problem(directory)
    except OSError as error:
        wrong = f"{directory}: the directory of the socket cannot be entered: {error.strerror}"
        return wrong, _choose_another(directory)
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory}: the directory of the socket is not a directory", _choose_another(directory)
    if status.st_uid != os.geteuid():
        return f"{directory}: not a directory of this user", _choose_another(directory)
    if stat.S_IMODE(status.st_mode) & 0o077:
        # Others may need it, so the remedy is not to close it to them.
        return f"{directory}: other users can enter it", _choose_another(directory)
    return None


def _choose_another(wrong: Path) -> str:
    remedy = "choose another --socket, or set FDCACHE_RUNTIME_DIR to another directory"
    candidates = (default_runtime_dir(), _own_in_tmp())
    own = next((each for each in candidates if not wrong.is_relative_to(each)), None)
    return remedy if own is None else f"{remedy}, such as {own}, which is created for this user alone"


def socket_problem(socket: Path) -> tuple[str, str] | None:
    """Return the problem and remedy if something else is in the place of a service's socket."""
    try:
        mode = socket.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISSOCK(mode):
        return None
    return f"{socket}: exists and is not a socket", "choose another --socket, or move it away"


def require_socket(socket: Path) -> None:
    """Raise ``ConfigurationError`` if something else is in the place of a service's socket."""
    if problem := socket_problem(socket):
        raise ConfigurationError("; ".join(problem))


def _creation_problem(directory: Path) -> tuple[str, str] | None:
    nearest = next(each for each in directory.parents if os.path.lexists(each))
    if not nearest.is_dir():
        wrong = f"{directory}: the directory of the socket cannot be created: {nearest} is not a directory"
        return wrong, _choose_another(directory)
    if not os.access(nearest, os.W_OK | os.X_OK) or is_read_only(nearest):
        wrong = f"{directory}: the directory of the socket cannot be created in {nearest}"
        return wrong, _choose_another(directory)
    return None


def is_directory(path: Path) -> bool:
    """Return True for a directory. Below one that may not be entered it is False, where ``Path.is_dir`` raises."""
    return os.path.isdir(path)  # noqa: PTH112


def is_read_only(directory: Path) -> bool:
    """Return True if not even root can create files in a directory: a read-only mount, or one of the kernel's."""
    is_kernels = directory.is_relative_to("/proc") or directory.is_relative_to("/sys")
    return is_kernels or bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


def client_dir(address: str) -> Path:
    """Return the directory of a service's socket, where clients keep their live files; create it if it is missing.

    Raises ``ConfigurationError``.
    """
    directory = socket_path(address).parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"FDCACHE_SERVER: the directory of the socket cannot be created: {error}; "
            "choose one that this user may use"
        ) from error
    return directory


def find_address(arguments: Mapping[str, object]) -> tuple[str, tuple[Problem, ...]]:
    """Return the address of the service to ask, and the errors in the settings that do not concern it.

    Invalid settings must not keep anyone from looking into a running service. ``arguments`` are as for
    ``Settings.load``. Raises ``SettingsError`` for errors in the settings that the address depends on.
    """
    found = read_settings(arguments=arguments)
    about_address = [
        each for each in found.errors if not _ADDRESS_VARIABLES.isdisjoint(_without_suffix(each.variables))
    ]
    if about_address:
        raise SettingsError(about_address)
    settings = found.settings
    return settings.cache.server or default_address(settings.server.runtime_dir), found.errors


def _without_suffix(names: Iterable[str]) -> set[str]:
    return {name if name in _ADDRESS_VARIABLES else name.removesuffix(FILE_SUFFIX) for name in names}


def load_settings(arguments: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Settings:
    """Load the settings of a service or its tools; FDCACHE_SERVER defaults to the default address.

    ``arguments`` and ``environ`` are as for ``Settings.load``. Raises ``SettingsError``.
    """
    default = default_address(read_settings(environ, arguments).settings.server.runtime_dir)
    return Settings.load(environ=environ, arguments=arguments, defaults={"FDCACHE_SERVER": default})
