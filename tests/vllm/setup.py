"""Make the environments of the vLLM tests, each with the exact versions of its file in ``requirements``.

    python -m tests.vllm.setup [VERSION ...] [--home FOLDER]

About 3 GB each. torch is a build for CPUs; where pip's own index has none, name one that has in PIP_EXTRA_INDEX_URL or
PIP_FIND_LINKS.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.setup import Setup, make_environment
from tests.vllm.environments import PACKAGES, VERSIONS, default_home, requirements

_PACKAGES_LINE = (
    f"import os, site; os.environ.get('{PACKAGES}') and site.addsitedir(os.environ['{PACKAGES}'])\n"
)


def make(home: Path, version: str) -> None:
    """Make the environment of a version, which also reads the folders of packages named in its environment."""
    folder = home / version
    make_environment(folder, requirements(version))
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    (site_packages / "zz-fdcache.pth").write_text(_PACKAGES_LINE)


if __name__ == "__main__":
    command = Setup(VERSIONS, requirements, make)
    sys.exit(command.run("python -m tests.vllm.setup", __doc__, default_home()))
