"""The user's session, from environment variables that are no settings of fdcache.

This is the one module beside ``fdcache.settings`` that reads the environment.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_runtime_dir() -> Path | None:
    """Return the user's runtime folder (``XDG_RUNTIME_DIR``); None outside a login session."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) if base else None


def user_config_dir() -> Path:
    """Return the folder of the user's configuration files (``XDG_CONFIG_HOME``, else ``~/.config``)."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base) if base else expand_home(Path("~/.config"))


def expand_home(path: Path) -> Path:
    """Expand ``~`` and ``~name``. The home of a user who has none is ``/nonexistent``, where nothing can be stored.

    Raises:
        ValueError: there is no user of that name.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        if path.parts[0] != "~":
            raise ValueError(f"there is no user {path.parts[0][1:]!r}") from None
        return Path("/nonexistent", *path.parts[1:])


def notify_socket() -> str | None:
    """Return the service manager's socket for readiness messages, as in ``sd_notify(3)``; None without one."""
    return os.environ.get("NOTIFY_SOCKET") or None
