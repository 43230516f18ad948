"""Make the environments of the SGLang tests, each with the exact versions of its file in ``requirements``.

    python -m tests.sglang.setup [VERSION ...] [--home FOLDER]

About 2 GB each. torch is a build for CPUs; where pip's own index has none, name one that has in PIP_EXTRA_INDEX_URL or
PIP_FIND_LINKS.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.setup import Setup, make_environment
from tests.sglang.environments import PACKAGES, VERSIONS, default_home, requirements

_START_LINE = (
    f"import os, site; os.environ.get('{PACKAGES}') and (site.addsitedir(os.environ['{PACKAGES}']), "
    "__import__('tests.sglang.stand_ins', fromlist=['install']).install())\n"
)
"""Run by every Python of the environment that begins with the variable set: SGLang starts processes of its own."""


def make(home: Path, version: str) -> None:
    """Make the environment of a version, which also reads the folder of packages named in its environment."""
    folder = home / version
    make_environment(folder, requirements(version))
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    (site_packages / "zz-fdcache.pth").write_text(_START_LINE)


if __name__ == "__main__":
    command = Setup(VERSIONS, requirements, make)
    sys.exit(command.run("python -m tests.sglang.setup", __doc__, default_home()))
