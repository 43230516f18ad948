"""The pinned FastDeploy source, and stand-ins for its heavy packages on a machine without a GPU.

Only imports of the scheduler and the cache manager are replaced; configuration, requests, scheduler and cache
manager are the real ones.
"""

from __future__ import annotations

import logging
import os
import sys
import tarfile
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ARCHIVE = "fastdeploy-c1b7c083.tar.xz"
COMMIT = "c1b7c083"
_PACKAGES = ("paddle", "huggingface_hub", "orjson", "redis", "requests", "tqdm", "yaml")


def find_archive() -> Path | None:
    """Return the archive in ``$PEERS_DIR``, or in ``shared/peers`` beside the project; None if it is missing."""
    folder = os.environ.get("PEERS_DIR")
    places = [Path(folder)] if folder else [Path(__file__).parents[2].parent / "shared" / "peers"]
    return next((place / ARCHIVE for place in places if (place / ARCHIVE).is_file()), None)


def missing() -> str | None:
    """Return the reason why FastDeploy cannot run here, or None."""
    if find_archive() is None:
        return f"{ARCHIVE} is not there; PEERS_DIR names its folder"
    absent = [name for name in _PACKAGES if find_spec(name) is None]
    return f"FastDeploy needs {', '.join(absent)}: install fdcache[peers]" if absent else None


def unpack() -> Path:
    """Return the directory of the package ``fastdeploy``, unpacked once per user and archive."""
    archive = find_archive()
    assert archive is not None
    stat = archive.stat()
    home = Path(tempfile.gettempdir()) / f"fdcache-peers-{os.getuid()}-{COMMIT}-{stat.st_size}"
    if not home.is_dir():
        fresh = Path(tempfile.mkdtemp(prefix=home.name, dir=home.parent))
        with tarfile.open(archive) as content:
            if sys.version_info >= (3, 11, 4):
                content.extractall(fresh, filter="data")
            else:
                content.extractall(fresh)
        try:
            fresh.rename(home)
        except OSError:  # another process was faster
            if not home.is_dir():
                raise
    return home


def install(source: Path, logs: Path) -> None:
    """Make FastDeploy importable from ``source``; its logs go to ``logs``."""
    os.environ["FD_LOG_DIR"] = str(logs)
    package = stand_in("fastdeploy", [str(source / "fastdeploy")])
    package.__file__ = str(source / "fastdeploy" / "__init__.py")
    _stand_ins()


def stand_in(name: str, path: list[str] | None = None, **content: Any) -> ModuleType:
    """Install a module with this content instead of one that is not there."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = path or []
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def _stand_ins() -> None:
    """Install stand-ins for packages that need a GPU or are not in the package index; none of them is called."""
    stand_in("paddleformers")
    stand_in("paddleformers.utils")
    stand_in("paddleformers.utils.log", logger=logging.getLogger("paddleformers"))
    stand_in("paddleformers.transformers")
    config = type("PretrainedConfig", (), {})
    stand_in("paddleformers.transformers.configuration_utils", PretrainedConfig=config)
    stand_in("crcmod")  # has no wheel; only FastDeploy's scheduler over Redis calls it
    stand_in("aistudio_sdk")
    stand_in("aistudio_sdk.snapshot_download", snapshot_download=None)
    names = ["VideoReaderWrapper", "read_video_paddlecodec"]
    names += ["sample_frames", "sample_frames_paddleocr", "sample_frames_qwen"]
    stand_in("fastdeploy.input.utils.video", **dict.fromkeys(names))
