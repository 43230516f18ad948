"""Install a wheel of fdcache into vLLM's environments, and start vLLM with the line of docs/vllm.md.

    python -m tests.vllm.wheel WHEEL [--version VERSION]

The wheel lies in a layer above an environment of ``tests.vllm.setup``, which is left as it is. Exits 1 if pip would
change a package of vLLM's, or if ``vllm serve`` does not find in host memory what it stored there. A version that is
not there is skipped with a line.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path

from tests.vllm.environments import VERSIONS, default_home, interpreter, is_complete

ROOT = Path(__file__).parents[2]
ASK = """
import json, sys
from pathlib import Path
from tests.vllm.engine import install_plugin, make_model, make_tokenizer
from tests.vllm.served import running, start_engine

folder = Path(sys.argv[1])
install_plugin(folder)
model = make_tokenizer(make_model(folder / "model"))
prompts = [[3 + (7 * i + j) % 500 for j in range(180)] for i in range(8)]  # more than the device holds
server = start_engine(model, folder / "log", json.loads(sys.argv[2]))
with running(server):
    first, second = ([server.tokens(prompt) for prompt in prompts] for _ in range(2))
    hits = server.counter("vllm:external_prefix_cache_hits_total")
import fdcache
assert Path(fdcache.__file__).is_relative_to(sys.prefix), fdcache.__file__
assert first == second
assert hits > 0
print(f"vllm serve: {hits:.0f} tokens from host memory, the same answers")
"""
NEEDED_TO_SERVE = ("orjson",)
"""What ``vllm serve`` imports and the environments lack, which have what an engine in a process needs."""


def main() -> None:
    """Try the wheel with each version of vLLM that is installed."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.wheel", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--version", choices=VERSIONS, action="append", help="default: all")
    parser.add_argument("--home", type=Path, default=default_home(), help="default: %(default)s")
    options = parser.parse_args()
    for version in options.version or VERSIONS:
        if not is_complete(options.home, version):
            print(f"vLLM {version}: skipped, {options.home / version} is missing")
            continue
        with tempfile.TemporaryDirectory(prefix="fdcache-vllm-") as folder:
            layer = make_layer(Path(folder) / "layer", interpreter(options.home, version))
            install(layer, interpreter(options.home, version), options.wheel.absolute())
            try_line(layer, Path(folder))


def make_layer(folder: Path, program: Path) -> Path:
    """Make an environment that sees the packages of another one and has its command; return its interpreter."""
    subprocess.run([program, "-m", "venv", "--without-pip", str(folder)], check=True)
    (below,) = program.parents[1].glob("lib/python*/site-packages")
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    command = folder / "bin/vllm"
    command.write_text(
        f"#!{folder}/bin/python\nimport sys\nfrom vllm.entrypoints.cli.main import main\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    command.chmod(0o755)
    return folder / "bin/python"


def install(layer: Path, program: Path, wheel: Path) -> None:
    """Install the wheel with what it needs beside vLLM's packages, none of which may change."""
    pip = [str(program), "-m", "pip", "--disable-pip-version-check", "--python", str(layer)]

    def freeze() -> set[str]:
        return set(
            subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout.splitlines()
        )

    subprocess.run(
        [*pip, "install", "--quiet", "--only-binary", ":all:", "--no-deps", *NEEDED_TO_SERVE], check=True
    )
    before = freeze()
    subprocess.run([*pip, "install", "--quiet", "--only-binary", ":all:", str(wheel)], check=True)
    after = freeze()
    if moved := sorted(before - after):
        raise SystemExit(f"pip changed packages of vLLM: {', '.join(moved)}")
    print(f"{len(before)} packages as before, new: {', '.join(sorted(after - before))}", flush=True)


def try_line(layer: Path, folder: Path) -> None:
    """Ask a server with the configuration of the guide twice for more prompts than its device holds."""
    (folder / "tests").symlink_to(ROOT / "tests")  # the platform without a GPU; fdcache is the wheel's
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FDCACHE_")}
    environ |= {
        "PYTHONPATH": str(folder),
        "FDCACHE_HOST_MEMORY": "64MiB",
        "FDCACHE_LOAD_OR_RECOMPUTE": "always",
    }
    subprocess.run(
        [layer, "-c", ASK, str(folder), guide_configuration()], cwd=folder, env=environ, check=True
    )


def guide_configuration() -> str:
    """Return the one flag of the guide."""
    text = (ROOT / "docs/vllm.md").read_text()
    found = re.search(r"vllm serve MODEL --kv-transfer-config '({.*?})'", text, re.S)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    main()
