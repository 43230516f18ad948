"""Install a wheel of fdcache into vLLM's environments, and start vLLM with the line of docs/vllm.md.

    python -m tests.vllm.wheel WHEEL [--version VERSION]

The wheel lies in a layer above an environment of ``tests.vllm.setup``, which is left as it is. Exits 1 if pip would
change a package of vLLM's, or if vLLM does not find in host memory what it stored there. A version that is not there is
skipped with a line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.environments import VERSIONS, default_home, interpreter, is_complete

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--enforce-eager", "--dtype", "float32", "--block-size", "16", "--num-gpu-blocks-override", "40"),
    *("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"),
    *("--kv-cache-memory-bytes", str(1 << 28), "--compilation-config", '{"custom_ops": ["none"]}'),
)
"""What lets vLLM run the small model on a CPU."""
START_SECONDS = 600


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
            try_line(layer, options.home / version / "bin/vllm", Path(folder))
            print(f"vLLM {version}: answers alike, and loads from host memory", flush=True)


def make_layer(folder: Path, program: Path) -> Path:
    """Make an environment that sees the packages of another one, and return its interpreter."""
    subprocess.run([program, "-m", "venv", "--without-pip", str(folder)], check=True)
    (below,) = program.parents[1].glob("lib/python*/site-packages")
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    return folder / "bin/python"


def install(layer: Path, program: Path, wheel: Path) -> None:
    """Install the wheel with what it needs beside vLLM's packages, none of which may change."""
    pip = [str(program), "-m", "pip", "--disable-pip-version-check", "--python", str(layer)]

    def freeze() -> set[str]:
        return set(
            subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout.splitlines()
        )

    before = freeze()
    subprocess.run([*pip, "install", "--quiet", "--only-binary", ":all:", str(wheel)], check=True)
    after = freeze()
    if moved := sorted(before - after):
        raise SystemExit(f"pip changed packages of vLLM: {', '.join(moved)}")
    print(f"{len(before)} packages as before, new: {', '.join(sorted(after - before))}", flush=True)


def try_line(layer: Path, vllm: Path, folder: Path) -> None:
    """Start vLLM as the guide says, and ask it twice for more prompts than its device holds."""
    (folder / "tests").symlink_to(ROOT / "tests")  # the platform without a GPU; fdcache is the wheel's
    model = folder / "model"
    made = (
        "from pathlib import Path; from tests.vllm.engine import *; "
        f"install_plugin(Path({str(folder)!r})); make_tokenizer(make_model(Path({str(model)!r})))"
    )
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FDCACHE_")},
        **{"PYTHONPATH": str(folder), "FDCACHE_HOST_MEMORY": "64MiB", "FDCACHE_LOAD_OR_RECOMPUTE": "always"},
        **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        **{"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"},
    }
    subprocess.run([layer, "-c", made], cwd=folder, env=environ, check=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    line = [str(model) if word == "MODEL" else word for word in shlex.split(guide_line())[2:]]
    command = [str(layer), str(vllm), "serve", *line, "--host", "127.0.0.1", "--port", str(port), *SMALL]
    with running(command, folder, environ) as process:
        until_ready(f"http://127.0.0.1:{port}", process)
        prompts = [[3 + (7 * i + j) % 500 for j in range(180)] for i in range(8)]
        first, second = ([ask(port, str(model), prompt) for prompt in prompts] for _ in range(2))
        hits = metric(port, "vllm:external_prefix_cache_hits_total")
    if first != second or hits == 0:
        raise SystemExit(f"answers differ: {first != second}; tokens from host memory: {hits:.0f}")


def guide_line() -> str:
    """Return the command of the guide, without its variables."""
    found = re.search(
        r"(vllm serve MODEL --kv-transfer-config '.*?')\n", (ROOT / "docs/vllm.md").read_text(), re.S
    )
    assert found is not None
    return found[1]


@contextmanager
def running(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and show the end of what it wrote if something fails."""
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            sys.stderr.write(log.read_text()[-4000:])
            raise
        finally:
            process.terminate()


def until_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until vLLM answers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit("vLLM did not start")


def ask(port: int, model: str, prompt: list[int]) -> Any:
    """Return the text that vLLM answers."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def metric(port: int, name: str) -> float:
    """Return the sum of a metric."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
