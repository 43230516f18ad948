"""The peers, and what they need: environments with their packages, and the compiled minimal list."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import machine

HERE = Path(__file__).parent
MINIMAL_SOURCE = HERE / "minimal.cpp"
ENVIRONMENTS = ("vllm", "sglang")
MARKER = "complete"


class MissingError(Exception):
    """Something that a peer needs is not there; the message names it and the remedy."""


@dataclass(frozen=True)
class Peer:
    """A cache manager and how it is run: the module of its adapter, that one's options, and its environment."""

    name: str
    adapter: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: str | None = None


PEERS = (
    Peer("vllm", "vllm", {"hash_name": "sha256"}, "vllm"),
    Peer("vllm-xxhash", "vllm", {"hash_name": "xxhash"}, "vllm"),
    Peer("sglang", "sglang", {}, "sglang"),
    Peer("fdcache-int32", "fdcache", {"lists": False}),
    Peer("fdcache-list", "fdcache", {"lists": True}),
    Peer("minimal", "minimal"),
)
"""In the order of tables. ``vllm`` is vLLM's default."""

NEEDS_A_GPU = (
    "vLLM's workers, which keep the block tables on the GPU",
    "SGLang's kernels, which compute the indices of tokens (here torch does on the CPU; that time is left out)",
    "copies between tiers (fdcache's are measured by benchmarks.swap)",
)
"""Parts of the engines that are not measured here."""


def default_home() -> Path:
    """Return the folder of environments and compiled code: ``fdcache-peers`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fdcache-peers"


def requirements(environment: str) -> Path:
    """Return the file with the exact versions of an environment's packages."""
    return HERE / "requirements" / f"{environment}.txt"


def version(peer: Peer) -> str | None:
    """Return the peer's version, None for what is part of this project."""
    if peer.environment is None:
        return None
    found = re.search(rf"^{peer.adapter}==(\S+)", requirements(peer.environment).read_text(), re.MULTILINE)
    return found.group(1) if found else None


def interpreter(home: Path, environment: str) -> Path:
    """Return the Python of an environment; raise ``MissingError`` unless it is there with the packages of today."""
    python, marker = home / environment / "bin/python", home / environment / MARKER
    remedy = f"run python -m benchmarks.peers.setup{'' if home == default_home() else f' --home {home}'}"
    if not (python.exists() and marker.exists()):
        raise MissingError(f"there is no environment {home / environment}: {remedy}")
    if marker.read_text() != requirements(environment).read_text():
        raise MissingError(f"the environment {home / environment} has other versions of packages: {remedy}")
    return python


def compiler() -> str:
    """Return the C++ compiler: ``CXX``, or one of the usual names; raise ``MissingError`` if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise MissingError("the minimal list needs a C++20 compiler: install g++, or name one in CXX")


def build_minimal(home: Path, source: Path = MINIMAL_SOURCE) -> Path:
    """Return the compiled minimal list; compile it if it or the machine has changed since."""
    command = [compiler(), "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", str(source)]
    key = hashlib.sha256(source.read_bytes() + repr((command, machine())).encode()).hexdigest()[:16]
    library = home / "native" / f"minimal-{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    draft = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "xxhash.h" in done.stderr:
            raise MissingError(
                "the minimal list needs xxhash.h: install libxxhash-dev (xxhash-devel on Fedora)"
            )
        raise MissingError(f"{source} does not compile with {command[0]}: {done.stderr.splitlines()[0]}")
    draft.rename(library)
    return library


def command_of(peer: Peer, home: Path) -> tuple[Path | str, dict[str, Any]]:
    """Return the Python that runs a peer, and its adapter's options; raise ``MissingError`` if it cannot run."""
    if peer.environment is not None:
        return interpreter(home, peer.environment), peer.options
    if peer.adapter == "minimal":
        return sys.executable, {"library": str(build_minimal(home)), **peer.options}
    return sys.executable, peer.options
