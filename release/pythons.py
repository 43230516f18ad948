"""The CPythons of this machine, with headers, for which wheels are built and tried."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
_ASK = (
    "import json, os, sys, sysconfig; print(json.dumps([sys.executable, 'cp%d%d' % sys.version_info[:2], "
    "os.path.exists(sysconfig.get_path('include') + '/Python.h')]))"
)
_TOOLS = ("scikit-build-core", "nanobind")


@dataclass(frozen=True, slots=True)
class Python:
    """Interpreter for which wheels are built."""

    program: str
    tag: str

    @classmethod
    def found(cls, name: str) -> Python | None:
        """Return the interpreter of this name, None without one, or without its headers."""
        for program in filter(shutil.which, _places(name)):
            done = subprocess.run([program, "-c", _ASK], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                path, tag, has_headers = json.loads(done.stdout)
                if has_headers:
                    return cls(path, tag)
        return None

    def environment(self, folder: Path) -> Path:
        """Return the interpreter of an environment with what a build needs, made once."""
        program = folder / "bin/python"
        if not program.exists():
            subprocess.run([self.program, "-m", "venv", str(folder)], check=True)
            install = ["install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), *_TOOLS]
            subprocess.run([program, "-m", "pip", "--disable-pip-version-check", *install], check=True)
        return program


def _places(name: str) -> Iterator[str]:
    """Yield where an interpreter of this name may be: the path, pyenv, release/debian-python's folder."""
    if (program := shutil.which(name)) is not None:
        yield program
    version = re.sub(r"^python", "", name)
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/{name}"), reverse=True))
    yield str(Path.home() / name / "bin" / name)
