"""Make the environments of the vLLM tests, each with the exact versions of its file in ``requirements``.

    python -m tests.vllm.setup [VERSION ...] [--home FOLDER]

About 3 GB each. torch is a build for CPUs; where pip's own index has none, name one that has in PIP_EXTRA_INDEX_URL or
PIP_FIND_LINKS.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.vllm.environments import MARKER, PACKAGES, VERSIONS, default_home, is_complete, requirements

_PACKAGES_LINE = (
    f"import os, site; os.environ.get('{PACKAGES}') and site.addsitedir(os.environ['{PACKAGES}'])\n"
)


class SetupError(Exception):
    """pip has failed; the message has its last line."""


def make_environment(home: Path, version: str) -> None:
    """Make one environment afresh. Packages are installed without their dependencies: the file lists all that is used.

    Raises ``SetupError`` if pip fails.
    """
    folder, wanted = home / version, requirements(version)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/pip"), "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--requirement", str(wanted)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        hint = "; name an index with torch for CPUs in PIP_EXTRA_INDEX_URL" if "torch" in str(errors) else ""
        raise SetupError(f"vLLM {version}: pip failed: {(errors or ['no message'])[-1]}{hint}")
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    (site_packages / "zz-fdcache.pth").write_text(_PACKAGES_LINE)
    (folder / MARKER).write_text(wanted.read_text())


def main(arguments: list[str] | None = None) -> int:
    """Make the environments that are missing or have other versions."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.setup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}; default all"
    )
    parser.add_argument("--home", type=Path, default=default_home(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := set(options.versions) - set(VERSIONS):
        parser.error(f"no requirements for {', '.join(sorted(unknown))}: there are {', '.join(VERSIONS)}")
    for version in options.versions or VERSIONS:
        if is_complete(options.home, version):
            print(f"vLLM {version}: {options.home / version} is complete")
            continue
        print(f"vLLM {version}: installing into {options.home / version}", flush=True)
        try:
            make_environment(options.home, version)
        except SetupError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
